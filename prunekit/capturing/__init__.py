"""Capturing what layers compute while a model runs, and intervening in it."""

import prunekit.models.window_attention  # noqa: F401  # so that torchvision's attention has its equivalents
from prunekit.capturing.capture import Capture, Captured, capture
from prunekit.capturing.correlations import CorrelationCollector, Products
from prunekit.capturing.hooks import LayerHooks, What, Where
from prunekit.capturing.intervene import Change, Intervention, intervene
from prunekit.capturing.layers import Layers, choose
from prunekit.capturing.reducers import Reducer
from prunekit.capturing.redundancy import Redundant, redundant
from prunekit.capturing.sizes import Size, size_of

__all__ = [
    "Capture",
    "Captured",
    "Change",
    "CorrelationCollector",
    "Intervention",
    "LayerHooks",
    "Layers",
    "Products",
    "Reducer",
    "Redundant",
    "Size",
    "What",
    "Where",
    "capture",
    "choose",
    "intervene",
    "redundant",
    "size_of",
]
