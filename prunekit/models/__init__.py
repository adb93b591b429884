"""Models: built by a zoo's constructor or the user's own factory, with weights from a name or a file."""

from prunekit.models.checks import is_frozen, require_trainable
from prunekit.models.factory import load_factory
from prunekit.models.outputs import auxiliary, logits
from prunekit.models.settings import ModelSettings
from prunekit.models.weights import load_weights
from prunekit.models.zoo import build_model, zoo_names

__all__ = [
    "ModelSettings",
    "auxiliary",
    "build_model",
    "is_frozen",
    "load_factory",
    "load_weights",
    "logits",
    "require_trainable",
    "zoo_names",
]
