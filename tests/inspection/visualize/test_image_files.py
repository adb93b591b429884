from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from prunekit.errors import DataError
from prunekit.inspection.visualize.image_grids import as_picture, colored, stretched, write_png
from prunekit.models.preprocessing import Preprocessing

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 140, 3), dtype=np.uint8))


def test_an_input_shows_the_image_that_it_was_made_of() -> None:
    preprocessing = Preprocessing(90, 140, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    assert np.array_equal(as_picture(preprocessing(PHOTO)[0], preprocessing), np.asarray(PHOTO))
    gray = Preprocessing(90, 140, mean=(0.4,), std=(0.2,))
    off = as_picture(gray(PHOTO)[0], gray)[..., 1].astype(int) - np.asarray(PHOTO.convert("L"))
    assert abs(off).max() <= 1  # Pillow rounds first


def test_any_values_become_an_image() -> None:
    pixels = stretched(torch.tensor([[[-2.0, 0.0], [0.0, 2.0]]]))
    assert pixels[..., 0].tolist() == [[0, 128], [128, 255]]
    assert stretched(torch.rand(5, 4, 6)).shape == (4, 6, 3)
    assert stretched(torch.ones(3, 2, 2)).max() == 0


def test_a_turned_photograph_is_turned_back(tmp_path: Path) -> None:
    turned, exif = PHOTO.transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees, counterclockwise
    turned.save(tmp_path / "turned.png", exif=exif)
    preprocessing = Preprocessing(90, 140)
    assert torch.equal(preprocessing(tmp_path / "turned.png"), preprocessing(PHOTO))


def test_an_unreadable_image_is_named_with_the_reason(tmp_path: Path) -> None:
    PHOTO.save(tmp_path / "whole.png")
    contents = {
        "broken.png": ((tmp_path / "whole.png").read_bytes()[:500], "but OSError: image file is truncated"),
        "empty.png": (b"", "such as a PNG or JPEG file, but it is empty"),
        "text.png": (b"hello", "but it is of no format that Pillow reads"),
    }
    for name, (content, reason) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: expected an image.*{reason}"):
            Preprocessing(8, 8)(tmp_path / name)
    with pytest.raises(DataError, match=r"none.png: expected an image file, and there is none"):
        Preprocessing(8, 8)(tmp_path / "none.png")
    with pytest.raises(DataError, match="expected an image file, and it is a folder"):
        Preprocessing(8, 8)(tmp_path)


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
