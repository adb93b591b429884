"""Measuring: accuracy, size, MACs and latency, each with its unit and its uncertainty."""

from prunekit.measure.accuracy import Accuracy, accuracy, wilson_interval
from prunekit.measure.latency import LatencyReport, compare_latency, measure_latency
from prunekit.measure.settings import LatencySettings
from prunekit.measure.size import count_bytes, count_macs, count_parameters, size_bytes

__all__ = [
    "Accuracy",
    "LatencyReport",
    "LatencySettings",
    "accuracy",
    "compare_latency",
    "count_bytes",
    "count_macs",
    "count_parameters",
    "measure_latency",
    "size_bytes",
    "wilson_interval",
]
