"""Latency profiles: the time of each layer by its widths, measured in whole networks and fitted."""
