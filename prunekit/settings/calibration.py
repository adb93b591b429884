"""How much to calibrate on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

PositiveInt = Annotated[int, Ge(1)]
Moments = Literal["none", "full"]
MOMENTS_LIMIT_MIB = 4096


@dataclass(frozen=True)
class CalibrationSettings:
    """How many training images the activation statistics and the BatchNorm recalibration see, and how they are made.

    Attributes:
        images: how many training images.
        fused: whether activations are measured by compiled kernels: true, false, or null: once that pays off.
        moments: `full`: also the Gram matrix of every layer's input channels; `none`: where the criterion needs it.
        moments_ignore: globs over module paths whose Gram matrix is left out.
        moments_limit_mib: memory that the Gram matrices may take together, in MiB.
        moments_positions: places or tokens of each image that a Gram matrix is taken over, at most, drawn at
            random; null: all of them.
    """

    images: PositiveInt = 512
    fused: bool | None = None
    moments: Moments = "none"
    moments_ignore: tuple[str, ...] = ()
    moments_limit_mib: PositiveInt = MOMENTS_LIMIT_MIB
    moments_positions: PositiveInt | None = None
