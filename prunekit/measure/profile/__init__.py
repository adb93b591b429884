"""Latency profiles: what each layer of a network takes at which widths, measured in whole networks."""

from prunekit.measure.profile.cache import cache_folder
from prunekit.measure.profile.layer_times import LayerTimes
from prunekit.measure.profile.networks import has_layer_clock, time_networks

__all__ = ["LayerTimes", "cache_folder", "has_layer_clock", "time_networks"]
