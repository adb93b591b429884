"""Where images come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

PositiveInt = Annotated[int, Ge(1)]
Count = Annotated[int, Ge(0)]


@dataclass(frozen=True)
class DataSettings:
    """Which images, how they are split, and how large they are fed."""

    source: Literal["digits", "imagefolder", "npz"] = "digits"
    root: Path | None = None
    """Folder (imagefolder: `train/` and `test/`, or classes alone, which are split) or file (npz)."""
    image_size: PositiveInt = 32
    batch: PositiveInt = 64
    workers: Count = 0
    test_share: Annotated[float, Gt(0), Lt(1)] = 0.3
    validation_share: Annotated[float, Gt(0), Lt(1)] = 0.1
    split_seed: Count = 0
