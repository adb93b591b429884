"""Changes that make a finished model quicker to run and leave what it computes: each on a copy, each verified."""

from prunekit.deploy.folding import Folded, fold_batchnorm
from prunekit.deploy.layout import channels_last
from prunekit.deploy.subnormals import count_subnormals, flush_subnormals, flush_subnormals_in_place, without_subnormals

__all__ = [
    "Folded",
    "channels_last",
    "count_subnormals",
    "flush_subnormals",
    "flush_subnormals_in_place",
    "fold_batchnorm",
    "without_subnormals",
]
