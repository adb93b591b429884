"""Settings of calibration and of the repair after pruning."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from prunekit.known_names import PositiveInt
from prunekit.settings.validation import Checked

FEWEST_IMAGES = 8
"""The fewest images with some to fit on and some to validate on."""
IMAGES = 1024
"""Samples that are taken from a loader or a data set, unless another number is asked for."""
Fit = Literal["bias", "batchnorm", "moments", "channel", "patch"]


@dataclass(frozen=True)
class CalibrationSettings(Checked):
    """Activation statistics and BatchNorm recalibration: how they are made, from how many training images.

    Example:
        >>> import prunekit as pk
        >>> settings = pk.CalibrationSettings(images=1024)
        >>> job = pk.JobSettings("mine", pk.ModelSettings("resnet18"), calibration=settings)
        >>> job.calibration.images
        1024
        >>> pk.CalibrationSettings(images=0)
        Traceback (most recent call last):
        prunekit.errors.SettingsError: CalibrationSettings: images: expected a whole number of at least 1, got 0
    """

    images: PositiveInt = 512
    """Number of training images."""


@dataclass(frozen=True)
class RepairSettings(Checked):
    """Repair: how each layer's kept weights are fitted to what the dense layer computes on calibration images.

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
    """What is fitted in each layer. `bias`: its bias, to the dense mean of each output channel. `moments`: a factor and
    a bias for each output channel, to the dense mean and variance. `batchnorm`: the same, to the BatchNorm's
    statistics, which are those of augmented training data. `channel`: for each removed input channel, a combination of
    kept ones. `patch`: every kept weight."""
    sequential: bool = True
    """Fits a layer on outputs of repaired layers, to correct their errors; else on dense outputs."""
    ridge: Annotated[float, Gt(0)] = 1e-3
    """Pull of weights toward their present values, as a share of the inputs' mean square."""
    rows: Annotated[int, Ge(64)] = 32768
    """Positions sampled from each layer's output."""
    rectified_steps: Annotated[int, Ge(0)] = 3
    """Further fits in which outputs behind a ReLU's zeros need not agree."""
    joint_steps: Annotated[int, Ge(0)] = 2
    """Gauss-Newton steps that fit a layer together with the rectified layer before it, where possible. Needs `patch`
    and `sequential`."""
    held_out: Annotated[float, Gt(0), Lt(1)] = 0.125
    """Share of the images that only validate the repair."""
    memory_bytes: Annotated[int, Ge(2**20)] = 2**31
    """Memory besides the model, two copies of it and the images. Beyond it, activations are computed again, fewer
    positions sampled, or layers fitted channel by channel."""
