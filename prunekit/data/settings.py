"""Where images come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt, MaxLen, MinLen

PositiveInt = Annotated[int, Ge(1)]
Count = Annotated[int, Ge(0)]
Augment = Literal["none", "shift", "flip", "crop_flip", "resized_crop_flip"]
Mean = Annotated[tuple[float, ...], MinLen(3), MaxLen(3)]
Std = Annotated[tuple[Annotated[float, Gt(0)], ...], MinLen(3), MaxLen(3)]


@dataclass(frozen=True)
class DataSettings:
    """Which images, how they are split, and how they are fed."""

    source: Literal["digits", "imagefolder", "npz", "torchvision", "own"] = "digits"
    """`own`: what `--data file.py:factory` returns."""
    root: Path | None = None
    """Folder (imagefolder: `train/` and `test/` or `val/`, or classes alone, which are split; torchvision: where its
    files are) or file (npz)."""
    name: str | None = None
    """A data set of torchvision, such as `CIFAR10`; its files are fetched only with `download`."""
    download: bool = False
    image_size: PositiveInt = 32
    """Height and width of an input. An image file of another size is resized to 8/7 of it by its shorter side and its
    centre taken; the digits and the arrays of an npz are resized to it as a whole."""
    mean: Mean | None = None
    """Of a pixel in 0..1, per channel, subtracted; None: ImageNet's, 0.5 for the digits. `std`, likewise, divides."""
    std: Std | None = None
    augment: Augment = "none"
    """For training images only: `shift` by up to a tenth, `flip`, `crop_flip` (padded by 4 pixels, as for CIFAR), or
    `resized_crop_flip` (as for ImageNet)."""
    max_corrupt: Count = 0
    """Images that cannot be read are skipped and counted up to this many; one more is an error."""
    batch: PositiveInt = 64
    """Images in a batch; of all processes together, where several train."""
    workers: Count = 0
    test_share: Annotated[float, Gt(0), Lt(1)] = 0.3
    validation_share: Annotated[float, Gt(0), Lt(1)] = 0.1
    split_seed: Count = 0
    origin: str | None = None
    """Where the data of this recipe can be had; shown when it is missing."""
