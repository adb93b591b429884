"""Rules by operator family; importing this package fills the table."""

from prunekit.channels.rules import compute, convolution, lookup, made, norms, parts, pointwise, shape, vision
from prunekit.channels.rules.compute import COUNTED
from prunekit.channels.rules.convolution import whole_groups
from prunekit.channels.rules.made import MADE
from prunekit.channels.rules.registry import RULES, Call, Rule, register_rule, rule_of

__all__ = [
    "COUNTED",
    "MADE",
    "RULES",
    "Call",
    "Rule",
    "compute",
    "convolution",
    "lookup",
    "made",
    "norms",
    "parts",
    "pointwise",
    "register_rule",
    "rule_of",
    "shape",
    "vision",
    "whole_groups",
]
