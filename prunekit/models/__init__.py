"""Models: built by a zoo's constructor or the user's own factory, with weights from a name or a file."""

from prunekit.models.checks import is_frozen, require_trainable
from prunekit.models.factory import load_factory, load_with_example
from prunekit.models.optional import OPTIONAL_ZOOS, image_shape
from prunekit.models.outputs import auxiliary, logits
from prunekit.models.weights import load_weights
from prunekit.models.window_attention import (
    SizedRelativeAttention,
    SizedWindowAttention,
    SizedWindowAttention3d,
    SizedWindowAttentionV2,
)
from prunekit.models.zoo import ZOOS, build_model, is_weights_file, missing_weights, zoo_names
from prunekit.settings.model import ModelSettings

__all__ = [
    "OPTIONAL_ZOOS",
    "ZOOS",
    "ModelSettings",
    "SizedRelativeAttention",
    "SizedWindowAttention",
    "SizedWindowAttention3d",
    "SizedWindowAttentionV2",
    "auxiliary",
    "build_model",
    "image_shape",
    "is_frozen",
    "is_weights_file",
    "load_factory",
    "load_weights",
    "load_with_example",
    "logits",
    "missing_weights",
    "require_trainable",
    "zoo_names",
]
