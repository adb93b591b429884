"""Capture of what layers read and return while a model runs."""
