"""Calibration: what activations look like, channel by channel, on a few hundred images."""

from prunekit.calibration.collector import StatsCollector, collect, first_tensor
from prunekit.calibration.gradients import TaylorTerms, collect_gradients
from prunekit.calibration.layer_stats import LayerStats, StatsKey, combine
from prunekit.calibration.settings import CalibrationSettings
from prunekit.calibration.sketch import MagnitudeSketch
from prunekit.calibration.stats import ChannelStats, NonFinite

__all__ = [
    "CalibrationSettings",
    "ChannelStats",
    "LayerStats",
    "MagnitudeSketch",
    "NonFinite",
    "StatsCollector",
    "StatsKey",
    "TaylorTerms",
    "collect",
    "collect_gradients",
    "combine",
    "first_tensor",
]
