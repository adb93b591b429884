"""Compact models: removed channels are taken out for good, and the folder that such a model is saved in."""
