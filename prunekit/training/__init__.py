"""Training and fine-tuning on one device, deterministic from a seed; BatchNorm recalibration."""

from prunekit.training.history import EpochRow, History
from prunekit.training.loop import check_fits, fit
from prunekit.training.recalibrate import recalibrate_batchnorm
from prunekit.training.settings import TrainSettings

__all__ = ["EpochRow", "History", "TrainSettings", "check_fits", "fit", "recalibrate_batchnorm"]
