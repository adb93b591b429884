"""Watching a running model: statistics per channel, Gram matrices of what layers read, gradients, errors."""
