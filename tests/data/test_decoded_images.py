"""Images of more than 8 bits: scaled, not cut off, wherever they are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from prunekit.data.datasets import CorruptImages, FolderImages, ImageTransform, pixels
from prunekit.errors import DataError
from prunekit.models.preprocessing import Preprocessing

GRAY = np.arange(256, dtype=np.uint8).reshape(16, 16)


@pytest.mark.parametrize("kind", ["png", "tiff", "pgm"])
def test_sixteen_bits_are_the_same_image_as_eight(tmp_path: Path, kind: str) -> None:
    Image.fromarray(GRAY).save(tmp_path / "eight.png")
    Image.fromarray(GRAY.astype(np.uint16) * 257).save(tmp_path / f"sixteen.{kind}")
    eight, sixteen = (tmp_path / name for name in ("eight.png", f"sixteen.{kind}"))

    images, _ = FolderImages((eight, sixteen), torch.zeros(2).long(), ImageTransform(16)).fetch(torch.arange(2))
    assert torch.equal(*images)
    shown = Preprocessing(16, 16)
    assert torch.equal(shown(eight), shown(sixteen))
    with Image.open(sixteen) as image:
        found = pixels(image, "image 0")
    assert isinstance(found, Image.Image)
    assert np.array_equal(np.asarray(found)[..., 1], GRAY)


def test_numbers_without_a_white_are_refused_by_name(tmp_path: Path) -> None:
    Image.fromarray(GRAY.astype(np.float32)).save(tmp_path / "real.tiff")
    Image.fromarray(GRAY.astype(np.int32) * 1000).save(tmp_path / "wide.tiff")
    for name, reason in (("real.tiff", "floating-point numbers"), ("wide.tiff", "from 0 to 255000")):
        with pytest.raises(DataError, match=rf"{name}: .*{reason}; expected 8 or 16 bits"):
            Preprocessing(16, 16)(tmp_path / name)
        files = FolderImages((tmp_path / name,), torch.zeros(1).long(), ImageTransform(16), CorruptImages(0))
        with pytest.raises(DataError, match=rf"{name}: .*{reason}"):
            files.fetch(torch.arange(1))
