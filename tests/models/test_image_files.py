"""Image files as inputs: orientation, and errors that name the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from prunekit.errors import DataError
from prunekit.models.preprocessing import Preprocessing

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 140, 3), dtype=np.uint8))


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
