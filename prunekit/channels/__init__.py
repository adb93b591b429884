"""The engine: channel labels, the channel map, the trial of a plan, and narrow copies of a model."""
