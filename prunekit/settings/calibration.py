"""How much to calibrate on.

What is repaired after pruning, and from how much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from prunekit.settings.validation import Checked

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


FEWEST_IMAGES = 8
"""To fit on some and judge by others."""

Fit = Literal["bias", "batchnorm", "moments", "channel", "patch"]


@dataclass(frozen=True)
class RepairSettings(Checked):
    """How each layer's kept weights are fitted to what the dense layer computes on calibration images.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> settings = pk.RepairSettings(fit="channel", ridge=1e-2)
        >>> repaired = pk.prune(model, calibration=torch.randn(64, 8), macs=0.5, repair=settings)
        >>> print(repaired.repair)
        Repair: error of the output on held-out samples ... 1 of 2 layers refitted
        <BLANKLINE>
          layer  fit      error before ... after  note
          0      –              0.00 % ...
          2      channel ...
    """

    fit: Fit = "patch"
    """What is fitted of each layer: its bias, to the dense mean of each output channel; a factor and a bias for each
    output channel, to the dense mean and variance (moments), or to the statistics that the BatchNorm behind it has
    (batchnorm: what taking those anew does, statistics of augmented training data included, which the dense network's
    own values on these images need not have); what stands in for each removed input channel (channel); or every kept
    weight (patch)."""
    sequential: bool = True
    """Whether each layer reads what the repaired layers before it give, and corrects their errors; or what the dense
    ones give."""
    ridge: Annotated[float, Gt(0)] = 1e-3
    """How strongly weights are pulled toward what they are, as a share of the mean square of the inputs."""
    rows: Annotated[int, Ge(64)] = 32768
    """Positions sampled of each layer's output, over all images."""
    rectified_steps: Annotated[int, Ge(0)] = 3
    """Further fits in which what a ReLU makes zero of anyhow need not agree."""
    joint_steps: Annotated[int, Ge(0)] = 2
    """Further Gauss-Newton steps in which a layer and the rectified one before it, which nothing else reads, are fitted
    together to what the second gives, where positions are many for their weights; with `patch` and `sequential`."""
    held_out: Annotated[float, Gt(0), Lt(1)] = 0.125
    """Share of the images that only judge."""
    memory_bytes: Annotated[int, Ge(2**20)] = 2**31
    """What may be held beside the model, two copies of it and the images. Where what is live of all images between two
    layers takes more than its share, it is computed again; where a layer's sampled positions do, fewer are sampled; and
    where its Gram matrix does, it is fitted by channels."""
