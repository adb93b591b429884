"""How much to calibrate on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from prunekit.settings.checked import Checked

PositiveInt = Annotated[int, Ge(1)]
Moments = Literal["none", "full"]
MOMENTS_LIMIT_MIB = 4096


@dataclass(frozen=True)
class CalibrationSettings(Checked):
    """How many training images the activation statistics and the BatchNorm recalibration see, and how they are made.

    Example:
        >>> import prunekit as pk
        >>> settings = pk.CalibrationSettings(images=1024, moments="full")
        >>> job = pk.JobSettings("mine", pk.ModelSettings("resnet18"), calibration=settings)
        >>> job.calibration.images
        1024
        >>> pk.CalibrationSettings(images=0)
        Traceback (most recent call last):
        prunekit.errors.SettingsError: CalibrationSettings: images: expected a whole number of at least 1, got 0
    """

    images: PositiveInt = 512
    """How many training images are looked at."""
    fused: bool | None = None
    """Whether activations are measured by compiled kernels; null: where that pays off."""
    moments: Moments = "none"
    """`full` also takes the Gram matrix of every layer's input channels; `none` does so only where the criterion needs
    it."""
    moments_ignore: tuple[str, ...] = ()
    """Globs over module paths whose Gram matrices are left out."""
    moments_limit_mib: PositiveInt = MOMENTS_LIMIT_MIB
    """Memory that the Gram matrices may take together, in MiB."""
    moments_positions: PositiveInt | None = None
    """The most places or tokens of each image that a Gram matrix is taken over, drawn at random; null: all of them."""
