"""Latency profiles: what each layer takes by its widths, measured in whole networks and fitted."""
