"""How much to calibrate on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

PositiveInt = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class CalibrationSettings:
    """How many training images the activation statistics and the BatchNorm recalibration see."""

    images: PositiveInt = 512
