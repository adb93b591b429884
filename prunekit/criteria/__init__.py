"""Criteria: how important a channel is. A file with a `register_criterion` in this folder is found by itself."""

from prunekit.criteria.registry import Criterion, Evidence, Need, Scores, get_criterion, register_criterion
from prunekit.criteria.scoring import normalize, score
from prunekit.criteria.slices import LabelMean, mean_over_slices

__all__ = [
    "Criterion",
    "Evidence",
    "LabelMean",
    "Need",
    "Scores",
    "get_criterion",
    "mean_over_slices",
    "normalize",
    "register_criterion",
    "score",
]
