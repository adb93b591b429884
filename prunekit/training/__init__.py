"""Training and fine-tuning on one device, deterministic from a seed; BatchNorm recalibration."""

from prunekit.training.carrying import carry_average, carry_over
from prunekit.training.checks import check_fits
from prunekit.training.clamping import check_clamps
from prunekit.training.history import ClampRow, EpochRow, History
from prunekit.training.loop import fit
from prunekit.training.parts import Part, Training, Within
from prunekit.training.recalibrate import recalibrate_batchnorm
from prunekit.training.replicas import share_corrupt
from prunekit.training.settings import TrainSettings

__all__ = [
    "ClampRow",
    "EpochRow",
    "History",
    "Part",
    "TrainSettings",
    "Training",
    "Within",
    "carry_average",
    "carry_over",
    "check_clamps",
    "check_fits",
    "fit",
    "recalibrate_batchnorm",
    "share_corrupt",
]
