"""Latency profiles: what each layer of a network takes at which widths, measured in whole networks."""

from prunekit.measure.profile.cache import cache_folder
from prunekit.measure.profile.fit import Sample, fit
from prunekit.measure.profile.layer_times import LayerTimes
from prunekit.measure.profile.networks import Network, has_layer_clock, kept_times, time_networks
from prunekit.measure.profile.sampling import sampled

__all__ = [
    "LayerTimes",
    "Network",
    "Sample",
    "cache_folder",
    "fit",
    "has_layer_clock",
    "kept_times",
    "sampled",
    "time_networks",
]
