"""Criteria: how important a channel is. A new file with a `register_criterion` is found by itself."""
