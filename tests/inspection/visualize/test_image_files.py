from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms._presets import ImageClassification

from prunekit.data.datasets import ImageTransform
from prunekit.errors import DataError, UsageError
from prunekit.inspection.visualize.image_files import Preprocessing, colored, read_image, write_png

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 140, 3), dtype=np.uint8))


def test_files_are_prepared_as_the_data_and_torchvision_do(tmp_path: Path) -> None:
    PHOTO.save(tmp_path / "photo.png")
    found = read_image(tmp_path / "photo.png", Preprocessing((3, 56, 56)))
    assert torch.equal(found, ImageTransform(56).image(PHOTO, None, 0))
    torch.testing.assert_close(found, ImageClassification(crop_size=56, resize_size=64)(PHOTO))


def test_an_input_shows_the_image_that_it_was_made_of(tmp_path: Path) -> None:
    preprocessing = Preprocessing((3, 90, 140), (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    assert np.array_equal(preprocessing.to_image(preprocessing(PHOTO)), np.asarray(PHOTO))
    gray = Preprocessing((1, 90, 140))
    assert np.array_equal(gray.to_image(gray(PHOTO))[..., 1], np.asarray(PHOTO.convert("L")))
    assert Preprocessing((3, 40, 20))(PHOTO).shape == (3, 40, 20)
    with pytest.raises(UsageError, match="takes images of 1 or 3 channels, but it takes 4 x 8 x 8"):
        Preprocessing((4, 8, 8))


def test_a_turned_photograph_is_turned_back(tmp_path: Path) -> None:
    turned, exif = PHOTO.transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees, counterclockwise
    turned.save(tmp_path / "turned.png", exif=exif)
    preprocessing = Preprocessing((3, 90, 140))
    assert torch.equal(read_image(tmp_path / "turned.png", preprocessing), preprocessing(PHOTO))


def test_an_unreadable_image_is_named_with_the_reason(tmp_path: Path) -> None:
    PHOTO.save(tmp_path / "whole.png")
    contents = {
        "broken.png": ((tmp_path / "whole.png").read_bytes()[:500], "that can be read, but image file is truncated"),
        "empty.png": (b"", "such as a PNG or JPEG file, but it is empty"),
        "text.png": (b"hello", "but it is of no format that Pillow reads"),
    }
    for name, (content, reason) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: expected an image.*{reason}"):
            read_image(tmp_path / name, Preprocessing((3, 8, 8)))
    with pytest.raises(DataError, match=r"none.png: expected an image file, and there is none"):
        read_image(tmp_path / "none.png", Preprocessing((3, 8, 8)))
    with pytest.raises(DataError, match="but it is a folder"):
        read_image(tmp_path, Preprocessing((3, 8, 8)))


def test_equal_steps_in_value_are_equal_steps_in_lightness() -> None:
    pixels = colored(np.linspace(2, 5, 256), 2, 5) / 255
    linear = np.where(pixels <= 0.04045, pixels / 12.92, ((pixels + 0.055) / 1.055) ** 2.4)
    lightness = 116 * np.cbrt(linear @ (0.2126, 0.7152, 0.0722)) - 16  # CIE 1976
    steps = np.diff(lightness[::15])
    assert steps.min() > 0.8 * steps.mean()
    assert steps.max() < 1.2 * steps.mean()


def test_what_is_no_number_is_in_no_color_of_the_scale(tmp_path: Path) -> None:
    found = colored(np.array([0.0, np.nan, np.inf, 1.0]), 0, 1)
    assert found[1].tolist() == found[2].tolist() == [214, 39, 40]
    assert not (colored(np.linspace(0, 1, 1000), 0, 1) == (214, 39, 40)).all(-1).any()
    path = write_png(tmp_path / "new" / "colors.png", found[None])
    with Image.open(path) as image:
        assert np.array_equal(np.asarray(image), found[None])
    assert [file.name for file in path.parent.iterdir()] == ["colors.png"]
