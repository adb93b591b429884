"""Preprocessing is what a job evaluates with: every source, the sizes and modes of images, and the weights of zoos."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.models import get_model_weights

from prunekit.data.sources import load_splits
from prunekit.data.user_data import load_own
from prunekit.errors import ArtifactError, DataError, SettingsError
from prunekit.models.preprocessing import AttachedPreprocessing, Preprocessing
from prunekit.models.zoo import published, timm_preprocessing, torchvision_weights
from prunekit.settings.inputs import DataSettings, ModelSettings

SIZE = 24


def rgb(height: int, width: int, seed: int = 0) -> Image.Image:
    """An image with both smooth and sharp parts, so that other resizing shows."""
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    return Image.fromarray(coarse.repeat(4, 0).repeat(4, 1)[:height, :width])


def gray16(height: int, width: int) -> Image.Image:
    """Gray of 16 bits, with values beyond 8."""
    return Image.fromarray(np.linspace(0, 65535, height * width).reshape(height, width).astype(np.uint16))


def rotated(path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: to be turned by 90 degrees
    rgb(40, 60).save(path, exif=exif, quality=95)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "exact.png": lambda path: rgb(SIZE, SIZE).save(path),
    "large.png": lambda path: rgb(70, 90).save(path),
    "tall.jpg": lambda path: rgb(61, 37).save(path),
    "small.png": lambda path: rgb(11, 17).save(path),
    "one_pixel.png": lambda path: rgb(1, 1).save(path),
    "gray.png": lambda path: rgb(50, 40).convert("L").save(path),
    "gray16.png": lambda path: gray16(40, 50).save(path),
    "gray16.tif": lambda path: gray16(SIZE, SIZE).save(path),
    "transparent.png": lambda path: rgb(40, 40).convert("RGBA").save(path),
    "palette.gif": lambda path: rgb(44, 40).convert("P").save(path),
    "cmyk.jpg": lambda path: rgb(40, 44).convert("CMYK").save(path),
    "bilevel.bmp": lambda path: rgb(40, 44).convert("1").save(path),
    "rotated.jpg": rotated,
}


@pytest.mark.parametrize("name", WRITERS)
def test_an_image_file_becomes_what_a_job_evaluates(name: str, tmp_path: Path) -> None:
    for part, label in (("train", "a"), ("train", "b"), ("test", "a"), ("test", "b")):
        for index in range(3):
            path = tmp_path / part / label / f"{index}_{name}"
            path.parent.mkdir(parents=True, exist_ok=True)
            WRITERS[name](path)
    stats = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)}
    splits = load_splits(DataSettings("imagefolder", root=tmp_path, image_size=SIZE, augment="flip", **stats))  # type: ignore[arg-type]
    images, _ = splits.test.fetch(torch.arange(len(splits.test)))
    feed = splits.preprocessing
    assert feed is not None
    paths = sorted((tmp_path / "test" / "a").iterdir()) + sorted((tmp_path / "test" / "b").iterdir())
    assert torch.equal(feed(paths), images)
    assert images.shape == (6, 3, SIZE, SIZE)
    assert torch.equal(Preprocessing.from_dict(feed.as_dict(), "x")(paths), images)


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 3), (40, 52), (52, 40, 3), (24, 24, 1)])
def test_arrays_become_what_a_job_evaluates(shape: tuple[int, ...], tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, *shape), dtype=np.uint8)
    labels = np.arange(12) % 2
    np.savez(tmp_path / "images.npz", x_train=pixels, y_train=labels, x_test=pixels[::-1], y_test=labels)
    splits = load_splits(DataSettings("npz", root=tmp_path / "images.npz", image_size=SIZE))
    images, _ = splits.test.fetch(torch.arange(12))
    assert splits.preprocessing is not None
    plain = [image.squeeze() for image in pixels[::-1]]
    assert torch.allclose(splits.preprocessing(plain), images, atol=1e-6)
    Image.fromarray(plain[0]).save(tmp_path / "first.png")
    assert torch.allclose(splits.preprocessing(tmp_path / "first.png"), images[:1], atol=1e-6)


def test_digits_become_what_a_job_evaluates() -> None:
    splits = load_splits(DataSettings("digits", image_size=20))
    chosen = torch.arange(5)
    images, _ = splits.test.fetch(chosen)
    feed, subset = splits.preprocessing, splits.test
    assert feed is not None
    pixels = subset.dataset.pixels[subset.indices[chosen]][:, 0].numpy()  # type: ignore[attr-defined]  # 0..16
    assert torch.allclose(replace(feed, white=16.0)(list(pixels)), images, atol=1e-6)
    files = [np.round(one * (255 / 16)).astype(np.uint8) for one in pixels]  # as an image file has them
    assert torch.allclose(feed(files), images, atol=0.5 / 255 / 0.5 + 1e-6)


def test_images_of_torchvision_become_what_a_job_evaluates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Photos:
        """Stands for a data set of torchvision: pairs of a Pillow image and a label."""

        targets = [0, 1] * 6

        def __init__(self, root: str, train: bool = True) -> None: ...

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            return rgb(20 + 3 * index, 44 - index, index), index % 2

    monkeypatch.setattr("torchvision.datasets.CIFAR10", Photos)
    splits = load_splits(DataSettings("torchvision", root=tmp_path, name="CIFAR10", image_size=SIZE))
    images, _ = splits.test.fetch(torch.arange(12))
    assert splits.preprocessing is not None
    assert torch.equal(splits.preprocessing([Photos("")[index][0] for index in range(12)]), images)


def test_inputs_of_a_users_own_have_none_and_pixels_have(tmp_path: Path) -> None:
    for kind, expected in (("torch.rand(3, 8, 8)", False), ("torch.zeros(3, 8, 8, dtype=torch.uint8)", True)):
        path = tmp_path / f"{'pixels' if expected else 'inputs'}.py"
        items = f"[({kind}, index % 2) for index in range(8)]"
        path.write_text(f"import torch\ndef images():\n    return {items}, {items}\n", encoding="utf-8")
        splits = load_own(f"{path}:images", DataSettings("own", image_size=8))
        assert (splits.preprocessing is not None) == expected


@pytest.mark.parametrize("model", ["resnet34", "vgg16", "swin_v2_t", "inception_v3", "efficientnet_b3"])
@pytest.mark.parametrize("shape", [(300, 413), (260, 201)])
def test_weights_of_torchvision_are_fed_by_their_own_transform(model: str, shape: tuple[int, int]) -> None:
    for weights in get_model_weights(model):
        feed, classes = torchvision_weights(weights)
        assert classes == tuple(weights.meta["categories"] or ())
        image = rgb(*shape)
        assert feed is not None
        torch.testing.assert_close(feed(image)[0], weights.transforms()(image), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "mixer_b16_224", "edgenext_xx_small"])
def test_models_of_timm_are_fed_by_their_own_configuration(name: str) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model(name).eval()
    config = timm.data.resolve_data_config({}, model=model)
    theirs, ours = timm.data.create_transform(**config), timm_preprocessing(model)
    assert ours is not None
    image = rgb(300, 413)
    torch.testing.assert_close(ours(image)[0], theirs(image), rtol=1e-5, atol=1e-5)


# What is refused


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"height": 0, "width": 4}, "height"),
        ({"height": 4, "width": 4, "mean": (0.5, 0.5), "std": (1.0, 1.0)}, "one number each, or three"),
        ({"height": 4, "width": 4, "mean": (0.5,)}, "got 1 and 3"),
        ({"height": 4, "width": 4, "interpolation": "best"}, "interpolation"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        Preprocessing(**wrong)
    with pytest.raises(ArtifactError, match=f"prunekit.json: preprocessing: .*{told}"):
        Preprocessing.from_dict(
            {name: list(v) if isinstance(v, tuple) else v for name, v in wrong.items()}, "prunekit.json"
        )


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    feed = Preprocessing(8, 8)
    (tmp_path / "note.png").write_text("no image")
    for given, told in (
        (tmp_path / "gone.png", r"gone\.png: expected an image file, and there is none"),
        (tmp_path / "note.png", r"note\.png: expected an image, .*, but it is of no format that Pillow reads"),
        (np.zeros((8, 8, 3)), r"expected uint8 pixels .* got float64 \(8, 8, 3\)"),
        ([], "at least one image"),
    ):
        with pytest.raises(DataError, match=told):
            feed(given)  # type: ignore[arg-type]


def test_one_channel_and_blue_first() -> None:
    image = rgb(8, 8)
    plain = Preprocessing(8, 8, mean=(0.0,), std=(1.0,))(image)
    assert torch.allclose(plain[0, 0] * 255, torch.from_numpy(np.array(image.convert("L"))).float(), atol=0.51)
    blue = Preprocessing(8, 8, channel_order="bgr", mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0))(image)
    red = Preprocessing(8, 8, mean=(0.3, 0.2, 0.1), std=(1.0, 1.0, 1.0))(image)
    assert torch.equal(blue.flip(1), red)


def test_an_attached_one_is_plain_data_in_a_pickle() -> None:
    plain = Preprocessing(8, 8)
    attached = AttachedPreprocessing(**vars(plain))
    assert attached == plain
    assert plain == attached
    assert hash(attached) == hash(plain)
    assert b"prunekit" not in pickle.dumps(attached)
    assert Preprocessing.from_dict(pickle.loads(pickle.dumps(attached)), "a pickle") == plain
    assert pickle.loads(pickle.dumps(plain)) == plain


def test_what_a_zoo_publishes_of_a_model() -> None:
    known = ModelSettings("resnet34", weights="IMAGENET1K_V1")
    feed, classes = published(known, nn.Identity())
    assert feed == Preprocessing(224, 224, 256)
    assert (len(classes), classes[0]) == (1000, "tench")
    for unknown in (
        ModelSettings("resnet34"),
        ModelSettings("resnet34", weights="mine.pt"),
        ModelSettings("resnet8", "cifar"),
    ):
        assert published(unknown, nn.Identity()) == (None, ())
    assert timm_preprocessing(nn.Identity()) is None


@pytest.mark.parametrize(
    "asked",
    [
        {"height": 10**5, "width": 10**5},
        {"height": 1, "width": 10**12},
        {"height": 8 * 10**6, "width": 8},
        {"height": 8, "width": 8, "shorter_side": 10**6},
        {"height": 8, "width": 8, "mean": [math.inf], "std": [1.0]},
    ],
)
def test_a_file_cannot_ask_for_all_memory(asked: dict[str, Any]) -> None:
    with pytest.raises(
        ArtifactError, match=r"x: preprocessing: .*expected (at most 134,217,728 pixels|a number, got inf)"
    ):
        Preprocessing.from_dict(asked, "x")


def test_a_narrow_image_is_not_enlarged_beyond_memory() -> None:
    """Its longer side grows with the shorter one, which may be a single pixel."""
    feed = Preprocessing(height=2000, width=2000, shorter_side=2000)
    with pytest.raises(DataError, match="an image of 1 x 60,000 pixels"):
        feed(np.zeros((60_000, 1, 3), np.uint8))
