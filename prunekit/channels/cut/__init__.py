"""Narrow and shorter copies of a model: cut tensors, stand-ins for branches, and norms over what is kept."""
