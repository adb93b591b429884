"""CIFAR-10 and trained weights, where there are any: $PRUNEKIT_SHARED_DATA, or shared/data beside the repository."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

ROOT = Path(os.environ.get("PRUNEKIT_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
WEIGHTS = {"resnet20": ROOT / "weights" / "resnet20-12fca82f.th", "resnet56": ROOT / "weights" / "resnet56-4bfd9763.th"}
there = all(path.exists() for path in (ROOT / "cifar10" / "test_00.webp", *WEIGHTS.values()))
needs_cifar = pytest.mark.skipif(not there, reason=f"no CIFAR-10 and weights in {ROOT}; set PRUNEKIT_SHARED_DATA")

Array = np.ndarray[Any, Any]


def images(split: str, count: int) -> tuple[Array, Array]:
    """The first images (N, 32, 32, 3) uint8 and labels (N,) of a split, from sheets of 40 by 25."""
    paths = [ROOT / "cifar10" / f"{split}_{index:02d}.webp" for index in range(-(-count // 1000))]
    sheets = [Image.open(path).convert("RGB") for path in paths]
    pixels = [
        np.asarray(sheet).reshape(40, 32, 25, 32, 3).transpose(0, 2, 1, 3, 4).reshape(1000, 32, 32, 3)
        for sheet in sheets
    ]
    return np.concatenate(pixels)[:count], np.load(ROOT / "cifar10" / f"{split}_labels.npy")[:count]


def write_npz(path: Path, train: int, test: int) -> Path:
    """An archive of the first training and test images."""
    arrays = {}
    for name, count in (("train", train), ("test", test)):
        arrays[f"x_{name}"], arrays[f"y_{name}"] = images(name, count)
    np.savez(path, **arrays)
    return path
