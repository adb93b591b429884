"""Training and fine-tuning on one device, deterministic from a seed; BatchNorm recalibration."""

from prunekit.training.history import EpochRow, History
from prunekit.training.loop import fit
from prunekit.training.recalibrate import recalibrate_batchnorm
from prunekit.training.settings import TrainSettings

__all__ = ["EpochRow", "History", "TrainSettings", "fit", "recalibrate_batchnorm"]
