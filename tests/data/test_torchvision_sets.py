"""torchvision's data sets, from files in their own raw formats."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from prunekit.data.loader import batches
from prunekit.data.roots import SETS
from prunekit.data.sources import load_splits
from prunekit.errors import DataError, UsageError
from prunekit.settings.inputs import DataSettings

Array = np.ndarray[Any, Any]
COUNTS = {"train": 60, "t10k": 20}


def idx(path: Path, array: Array) -> None:
    """Y. LeCun's idx format: magic number, sizes, bytes."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.fixture
def mnist(tmp_path: Path) -> dict[str, Array]:
    """Digits of 28x28 as MNIST's files; the images by part."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    written = {}
    for part, count in COUNTS.items():
        written[part] = np.random.default_rng(count).integers(0, 256, (count, 28, 28))
        idx(raw / f"{part}-images-idx3-ubyte", written[part])
        idx(raw / f"{part}-labels-idx1-ubyte", np.arange(count) % 10)
    return written


def settings(root: Path, name: str, **changes: Any) -> DataSettings:
    return DataSettings(source="torchvision", root=root, name=name, image_size=28, **changes)


def test_mnist_from_its_own_files(mnist: dict[str, Array], tmp_path: Path) -> None:
    splits = load_splits(settings(tmp_path, "MNIST", validation_share=0.2))
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (50, 10, 20)
    assert splits.classes[0] == "0 - zero"
    images, labels = next(iter(batches(splits.test, 20, shuffle_seed=None, workers=1)))
    assert labels.tolist() == [index % 10 for index in range(20)]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    pixels = (images.permute(0, 2, 3, 1) * std + mean) * 255
    torch.testing.assert_close(pixels, torch.tensor(mnist["t10k"])[..., None].expand(-1, -1, -1, 3).float())
    assert load_splits(settings(tmp_path, "MNIST", validation_share=0.2)).fingerprint == splits.fingerprint


def test_labels_that_are_not_to_be_read_are_numbers_of_images(mnist: dict[str, Array], tmp_path: Path) -> None:
    splits = load_splits(settings(tmp_path, "MNIST", labels=False))
    assert (splits.classes, splits.task.main.name) == ((), "agreement")
    assert next(iter(batches(splits.test, 20, shuffle_seed=None)))[1].tolist() == list(range(20))
    assert load_splits(settings(tmp_path, "MNIST")).fingerprint != splits.fingerprint


def test_labels_are_read_without_decoding(
    mnist: dict[str, Array], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    original = Image.fromarray

    def counting(*arguments: Any, **options: Any) -> Image.Image:
        decoded.append(1)
        return original(*arguments, **options)

    monkeypatch.setattr(Image, "fromarray", counting)
    load_splits(settings(tmp_path, "MNIST"))
    assert len(decoded) <= 2 + 2 * 16  # the first image, and those that the fingerprint is taken from


def test_the_fingerprint_follows_the_labels(mnist: dict[str, Array], tmp_path: Path) -> None:
    before = load_splits(settings(tmp_path, "MNIST")).fingerprint
    idx(tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte", np.arange(60)[::-1] % 10)
    assert load_splits(settings(tmp_path, "MNIST")).fingerprint != before


def test_missing_files_are_named(mnist: dict[str, Array], tmp_path: Path) -> None:
    (tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(DataError) as caught:
        load_splits(settings(tmp_path, "MNIST", origin="ask the archivist"))
    message = str(caught.value)
    assert (
        f"missing below {tmp_path}: MNIST/raw/t10k-images-idx3-ubyte; put its files there or set data.root" in message
    )
    assert "data.download=true" in message
    assert message.endswith("; ask the archivist")


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("CIFAR10", "cifar-10-batches-py/data_batch_1, "),
        ("CIFAR100", "cifar-100-python/train, "),
        ("SVHN", r"train_32x32\.mat"),
        ("FashionMNIST", "FashionMNIST/raw/train-images-idx3-ubyte, "),
        ("STL10", r"stl10_binary/train_X\.bin, "),
    ],
)
def test_nothing_is_downloaded_unless_asked(name: str, missing: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"{name} \(.*missing below {tmp_path}: {missing}.*data\.download=true"):
        load_splits(settings(tmp_path, name))


def test_a_download_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", offline)
    with pytest.raises(DataError, match=r"cannot be used: no network; missing below .*put its files there") as caught:
        load_splits(settings(tmp_path / "new", "CIFAR10", download=True))
    assert "data.download=true" not in str(caught.value)


def test_a_set_with_splits_by_name(tmp_path: Path) -> None:
    root = tmp_path / "food-101"
    (root / "meta").mkdir(parents=True)
    for part, count in (("train", 8), ("test", 3)):
        listed = {name: [f"{name}/{part}{index}" for index in range(count)] for name in ("pie", "soup")}
        (root / "meta" / f"{part}.json").write_text(json.dumps(listed))
        for relative in (path for paths in listed.values() for path in paths):
            path = root / "images" / f"{relative}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 30), (200, 9, 9)).save(path)
    splits = load_splits(settings(tmp_path, "Food101", validation_share=0.25))
    assert splits.classes == ("pie", "soup")
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (12, 4, 6)
    assert splits.test[4][1] == 1


def test_a_corrupt_image_of_a_set_is_skipped(tmp_path: Path) -> None:
    for part in ("train", "val"):
        for wnid in ("n01440764", "n02102040", "n02979186", "n03000684", "n03028079", "n03394916", "n03417042",
                     "n03425413", "n03445777", "n03888257"):  # fmt: skip
            folder = tmp_path / "imagenette2" / part / wnid
            folder.mkdir(parents=True)
            for index in range(3):
                Image.new("RGB", (30, 30)).save(folder / f"{index}.JPEG", "JPEG")
    broken = tmp_path / "imagenette2" / "val" / "n02102040" / "1.JPEG"
    broken.write_bytes(broken.read_bytes()[:30])
    splits = load_splits(settings(tmp_path, "Imagenette", max_corrupt=1))
    assert sum(len(labels) for _, labels in batches(splits.test, 8, shuffle_seed=None)) == 29
    assert list(splits.corrupt) == ["Imagenette test: image 4"]
    assert len(splits.classes) == 10


def test_names() -> None:
    for name, near in (("CIFAR11", "CIFAR10"), ("cifar10", "CIFAR10"), ("fashionmnist", "FashionMNIST")):
        with pytest.raises(UsageError, match=f"a training and a test part, got '{name}'; did you mean '{near}'"):
            load_splits(settings(Path(__file__).parent, name))


@pytest.mark.parametrize("name", ["EMNIST", "Places365", "HMDB51", "LFWPairs", "FakeData", "CocoDetection"])
def test_sets_of_another_form_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"a label for each image, .* got '{name}'; "):
        load_splits(settings(tmp_path, name))


@pytest.mark.parametrize("name", SETS)
def test_every_set_is_opened_in_a_way_that_it_understands(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"torchvision's {name} \(") as caught:
        load_splits(settings(tmp_path, name))
    cause = caught.value.__cause__
    assert not isinstance(cause, TypeError | ValueError | AttributeError), cause


@pytest.mark.parametrize("name", SETS)
def test_a_set_has_both_parts(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A part that a set does not know is refused before its files are looked for."""
    second = SETS[name][1]
    monkeypatch.setitem(SETS, name, (second, second))
    with pytest.raises(DataError) as caught:
        load_splits(settings(tmp_path, name))
    assert not isinstance(caught.value.__cause__, TypeError | ValueError | AttributeError)


def test_a_damaged_file_of_a_set_is_said(mnist: dict[str, Array], tmp_path: Path) -> None:
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:999])
    with pytest.raises(DataError, match=r"MNIST \(train=True, .* cannot be used: "):
        load_splits(settings(tmp_path, "MNIST"))
