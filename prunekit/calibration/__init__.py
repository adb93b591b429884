"""Calibration: what activations look like, channel by channel, on a few hundred images."""

from prunekit.calibration.collect import Collectors, collect, few_samples
from prunekit.calibration.collector import StatsCollector, first_tensor
from prunekit.calibration.consumers import Consumer
from prunekit.calibration.gradients import TaylorTerms, collect_gradients
from prunekit.calibration.layer_stats import LayerStats, StatsKey, combine
from prunekit.calibration.moments import InputMoments, MomentsCollector
from prunekit.calibration.passes import ReadHooks, find_consumers
from prunekit.calibration.patch_stats import CalibrationWarning
from prunekit.calibration.ranks import MapRanks, RankCollector
from prunekit.calibration.sketch import MagnitudeSketch
from prunekit.calibration.stats import ChannelStats, NonFinite
from prunekit.settings.calibration import CalibrationSettings

__all__ = [
    "CalibrationSettings",
    "CalibrationWarning",
    "ChannelStats",
    "Collectors",
    "Consumer",
    "InputMoments",
    "LayerStats",
    "MagnitudeSketch",
    "MapRanks",
    "MomentsCollector",
    "NonFinite",
    "RankCollector",
    "ReadHooks",
    "StatsCollector",
    "StatsKey",
    "TaylorTerms",
    "collect",
    "collect_gradients",
    "combine",
    "few_samples",
    "find_consumers",
    "first_tensor",
]
