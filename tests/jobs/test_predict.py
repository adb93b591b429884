"""Predictions of classes and of other outputs, from images and from inputs that are ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mutants import changed_arrays, damaged_bytes, unclean
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import prunekit as pk
from prunekit.errors import DataError, ModelError, UsageError
from prunekit.jobs.analyses.predict import predict_target
from prunekit.jobs.run.subject_sources import resolve

FEED = pk.Preprocessing(8, 8, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
CLASSES = ["red", "green", "blue"]


class Means(nn.Module):
    """Scores each color by its mean: one can say what is right."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.mean((2, 3)) * 8


class Boxes(nn.Module):
    """Returns a list with other shapes for each image, as detectors do."""

    def forward(self, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        return [{"boxes": torch.zeros(int(image[0, 0, 0] * 255) % 3 + 1, 4)} for image in images]


class Two(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": left + right, "wide": (left[:, None] * right[..., None])}


def colored(folder: Path) -> list[Path]:
    folder.mkdir()
    for name, color in (("a_green", (10, 200, 30)), ("b_blue", (0, 20, 180)), ("c_red", (250, 0, 100))):
        Image.new("RGB", (12, 20), color).save(folder / f"{name}.png")
    return sorted(folder.iterdir())


def test_the_most_probable_classes_of_images(tmp_path: Path) -> None:
    paths = colored(tmp_path / "images")
    found = pk.predict(Means(), paths, preprocessing=FEED, classes=CLASSES, top=2, batch=2)
    assert found.probabilities is not None
    expected = (Means()(FEED(paths)).double()).softmax(1)
    torch.testing.assert_close(found.probabilities, expected)
    first = [row for row in found.rows() if row["rank"] == 1]
    assert [row["class"] for row in first] == ["green", "blue", "red"]
    assert [row["label"] for row in first] == [1, 2, 0]
    assert [row["sample"] for row in first] == list(map(str, paths))
    assert len(found.rows()) == 6
    assert "green" in str(found)
    assert found.figures()["top"] == found.rows()


def test_every_form_of_an_image(tmp_path: Path) -> None:
    paths = colored(tmp_path / "images")
    array = np.array(Image.open(paths[2]))
    for given in (
        paths[2],
        str(paths[2]),
        Image.open(paths[2]),
        array,
        [array],
        torch.tensor(array).permute(2, 0, 1)[None] / 255,
    ):
        found = pk.predict(Means(), given, preprocessing=FEED, classes=CLASSES)
        assert found.rows()[0]["class"] == "red"
    assert len(pk.predict(Means(), tmp_path / "images", preprocessing=FEED, classes=CLASSES).samples) == 3
    assert len(pk.predict(Means(), [tmp_path / "images", array], preprocessing=FEED, classes=CLASSES).samples) == 4


def test_a_folder_says_what_its_model_needs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    small = pk.prune(net, torch.randn(1, 3, 8, 8), channels=0.5)
    folder = pk.save(small, tmp_path / "model", preprocessing=FEED, classes=CLASSES, task="image_classification")
    paths = colored(tmp_path / "images")
    found = pk.predict(pk.load(folder, net), paths)
    with torch.no_grad():
        torch.testing.assert_close(found.probabilities, small.model.eval()(FEED(paths)).double().softmax(1))
    assert {row["class"] for row in found.rows()} == set(CLASSES)


def test_classes_without_names_are_numbers() -> None:
    found = pk.predict(Means(), torch.eye(3)[:, :, None, None].expand(3, 3, 8, 8), task="image_classification", top=1)
    assert [row["class"] for row in found.rows()] == ["0", "1", "2"]


def test_outputs_of_another_shape_for_each_image() -> None:
    images = [np.full((8, 8, 3), value, dtype=np.uint8) for value in (0, 1, 2, 3)]
    found = pk.predict(Boxes(), images, preprocessing=FEED)
    assert found.probabilities is None
    assert [tuple(tensor.shape) for tensor in found.outputs.values()] == [(1, 4), (2, 4), (3, 4), (1, 4)]
    assert "boxes_2" in str(found)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_inputs_that_are_ready_by_name(suffix: str, tmp_path: Path) -> None:
    given = {"left": torch.randn(3, 4), "right": torch.randn(3, 4)}
    path = tmp_path / f"inputs{suffix}"
    if suffix == ".npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in given.items()})
    else:
        save_file(given, path)
    found = pk.predict(Two(), path)
    assert torch.equal(found.outputs["sum"], given["left"] + given["right"])
    assert found.outputs["wide"].shape == (3, 4, 4)
    rows = found.rows()
    assert rows[0]["values"] == found.outputs["sum"][0].tolist()
    assert rows[-1]["values"] is None  # 16 values are a range
    assert rows[-1]["max"] == pytest.approx(float(found.outputs["wide"][2].max()))
    again = load_file(found.save(tmp_path / "out" / "outputs.safetensors"))
    assert again.keys() == {"sum", "wide"}
    assert torch.equal(again["wide"], found.outputs["wide"])
    np.savez(tmp_path / "wrong.npz", middle=np.zeros((1, 4), np.float32), left=np.zeros((1, 4), np.float32))
    with pytest.raises(DataError, match=r"has no input 'middle'; .*'left'"):
        pk.predict(Two(), tmp_path / "wrong.npz")


def test_one_array_is_the_only_input(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    folder = pk.save(pk.prune(net, torch.randn(1, 4), channels=0.5), tmp_path / "model")
    model = pk.load(folder, net)
    for array in (np.ones((3, 4)), np.ones(4, np.float32)):
        np.save(tmp_path / "x.npy", array)
        found = pk.predict(model, tmp_path / "x.npy")
        assert torch.allclose(found.outputs["output"], model(torch.ones(array.size // 4, 4)))
    for array, told in (
        (np.ones((3, 5), np.float32), r"expected input: float32 \(batch, 4\), got shape \(3, 5\)"),
        (np.ones((3, 4), np.int64), "got int64"),
    ):
        np.save(tmp_path / "x.npy", array)
        with pytest.raises(DataError, match=told):
            pk.predict(model, tmp_path / "x.npy")


def test_no_object_is_unpickled(tmp_path: Path) -> None:
    class Loud:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    np.save(tmp_path / "x.npy", np.array([Loud()], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "x.npz", left=np.array([Loud()], dtype=object))
    (tmp_path / "x.safetensors").write_bytes(b"\x80\x04.")
    for path in sorted(tmp_path.glob("x.*")):
        with pytest.raises(DataError, match=r"expected tensors, no objects"):
            pk.predict(Two(), path)
    assert not (tmp_path / "ran").exists()


def test_what_cannot_be_predicted_is_said(tmp_path: Path) -> None:
    image = np.zeros((8, 8, 3), dtype=np.uint8)
    (tmp_path / "empty").mkdir()
    for given, how, error, told in (
        (image, {}, UsageError, r"does not say how images become its input: save it again"),
        (tmp_path / "gone.jpg", {"preprocessing": FEED}, DataError, r"gone\.jpg: expected an image file, and there is"),
        (tmp_path / "gone.npy", {}, DataError, r"gone\.npy: expected a file of inputs"),
        (tmp_path / "empty", {"preprocessing": FEED}, DataError, r"no images here"),
        ([], {"preprocessing": FEED}, UsageError, r"at least one image"),
        (["a.npy", "b.jpg"], {"preprocessing": FEED}, UsageError, r"expected images, or one file of inputs, got 2"),
        (image, {"preprocessing": FEED, "classes": ["a", "b"]}, ModelError, r"each of its 2 classes, got 3 scores"),
        (image, {"preprocessing": FEED, "task": "cooking"}, UsageError, r"task: .*'cooking'"),
        (image, {"preprocessing": FEED, "top": 0}, UsageError, r"at least 1"),
        (torch.zeros(1, 3), {}, ModelError, r"Means does not run on float32 \(1, 3\)"),
    ):
        with pytest.raises(error, match=told):
            pk.predict(Means(), given, **how)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"trained weights, but they are random"):
        predict_target(resolve("resnet8"), image)
    with pytest.raises(UsageError, match=r"expected a model, .* got int"):
        pk.predict(3, image)  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["checksum", "end", "half", "name", "deflated"])
def test_a_damaged_archive_is_said_to_be_that(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "x.npz"
    (np.savez_compressed if damage == "deflated" else np.savez)(file, input=np.eye(64, dtype=np.float32))
    content = file.read_bytes()
    changed = {
        "checksum": content[:300] + bytes([content[300] ^ 255]) + content[301:],
        "end": content[:-30],
        "half": content[: len(content) // 2],
        "name": content[:32] + b"Z" + content[33:],
        "deflated": content[:80] + bytes([content[80] ^ 255]) + content[81:],
    }
    file.write_bytes(changed[damage])
    with pytest.raises(DataError, match=r"x.npz: expected tensors, no objects, but"):
        pk.predict(nn.Linear(64, 2), file)


@pytest.mark.parametrize("dtype", ["<U3", "M8[s]", "float128", "V4"])
def test_arrays_that_are_no_tensors_are_named(tmp_path: Path, dtype: str) -> None:
    np.savez(tmp_path / "x.npz", input=np.zeros((2, 4), dtype))
    with pytest.raises(DataError, match=r"x.npz: input: (expected numbers, got|torch has no numbers of)"):
        pk.predict(nn.Linear(4, 2), tmp_path / "x.npz")


def test_one_number_is_no_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", left=np.ones((2, 4), np.float32), right=np.array(1.0, np.float32))
    with pytest.raises(DataError, match=r"x.npz: right: expected samples on the first axis, got one number"):
        pk.predict(Two(), tmp_path / "x.npz")


def test_arrays_of_the_other_byte_order_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(8.0).reshape(2, 4).astype(">f4"))
    model = nn.Linear(4, 2)
    found = pk.predict(model, tmp_path / "x.npy")
    assert torch.equal(found.outputs["output"], model(torch.arange(8.0).view(2, 4)).detach())


@pytest.mark.slow
def test_mutants_of_inputs_are_read_whole_or_refused(tmp_path: Path) -> None:
    model = Two()
    sound = {"left": np.ones((2, 4), np.float32), "right": np.zeros((2, 4), np.float32)}
    npz, npy, tensors = (tmp_path / f"x.{kind}" for kind in ("npz", "npy", "safetensors"))
    np.savez_compressed(npz, **sound)  # type: ignore[arg-type]
    np.save(npy, sound["left"])
    save_file({name: torch.from_numpy(array) for name, array in sound.items()}, tensors)
    mutants: list[Any] = [
        (file, each) for file in (npz, npy, tensors) for each in damaged_bytes(file.read_bytes(), 50, seed=0)
    ]
    mutants += [(npz, each) for each in changed_arrays(sound, 80, seed=0)]

    def read(mutant: tuple[Path, Any]) -> None:
        file, content = mutant
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            np.savez(file, **content)
        pk.predict(model, file).rows()

    assert unclean(read, mutants) == []


def test_nan_has_no_order_of_classes() -> None:
    """A maximum swallows NaN, so that scores may look sound; and sound inputs may become NaN."""

    class Largest(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nan_to_num(x) * self.factor

        factor = 1.0

    x = torch.rand(5, 3)
    x[3, 1] = float("nan")
    with pytest.raises(DataError, match="sample 3: expected numbers, got NaN"):
        pk.predict(Largest(), x, classes=["a", "b", "c"], batch=2)
    with pytest.raises(DataError, match="sample 3: expected numbers, got NaN"):
        pk.predict(Largest(), x)
    model = Largest()
    model.factor = float("inf")
    with pytest.raises(ModelError, match="its scores of 0 are NaN or infinite"):
        pk.predict(model, torch.rand(2, 3), classes=["a", "b", "c"])
    masked = pk.predict(nn.Hardtanh(-1, 1), torch.tensor([[-torch.inf, 0.0, 1.0]]), classes=["a", "b", "c"])
    assert masked.rows()[0]["class"] == "c"
