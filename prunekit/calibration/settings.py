"""How much to calibrate on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

PositiveInt = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class CalibrationSettings:
    """How many training images the activation statistics and the BatchNorm recalibration see, and how they are made.

    Attributes:
        images: how many training images.
        fused: whether activations are measured by compiled kernels: true, false, or null: once that pays off.
    """

    images: PositiveInt = 512
    fused: bool | None = None
