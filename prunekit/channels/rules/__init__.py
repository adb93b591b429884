"""Rules by operator family; importing this package fills the table."""

from prunekit.channels.rules import compute, norms, parts, pointwise, shape
from prunekit.channels.rules.compute import COUNTED, whole_groups
from prunekit.channels.rules.registry import RULES, Call, Rule, rule

__all__ = [
    "COUNTED",
    "RULES",
    "Call",
    "Rule",
    "compute",
    "norms",
    "parts",
    "pointwise",
    "rule",
    "shape",
    "whole_groups",
]
