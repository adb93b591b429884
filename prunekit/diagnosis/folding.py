"""Root causes first: what another finding is likely to have caused is told with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from prunekit.diagnosis.findings import Finding

_UNITS = frozenset({"dead_relu", "saturated_sigmoid", "constant_channels", "batchnorm_variance"})
_SIZES = frozenset({"exploding_gradient", "vanishing_gradient", "learning_rate"})
AFTER: dict[str, frozenset[str]] = {
    "input_normalization": _UNITS | _SIZES,
    "non_finite": _UNITS | _SIZES,
    "batchnorm_variance": _UNITS | {"exploding_gradient", "learning_rate"},
    "constant_channels": _UNITS,
    "dead_relu": _UNITS,
    "saturated_sigmoid": _UNITS,
    "exploding_gradient": frozenset({"learning_rate"}),
}
"""What a fault causes in modules that run later."""
BEFORE = dict.fromkeys(_UNITS, frozenset({"vanishing_gradient"}))
"""What it causes on the way back, in modules that ran before."""
LAST = ("vanishing_gradient", "exploding_gradient", "learning_rate")
"""Consequences of the others more often than their cause."""


def folded(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings that no other explains, in order of execution, each with those that it explains."""
    roots: list[Finding] = []
    below: list[list[Finding]] = []
    for finding in sorted(findings, key=lambda each: (each.kind in LAST, each.order)):
        cause = next((index for index, root in enumerate(roots) if _explains(root, finding)), None)
        if cause is None:
            roots.append(finding)
            below.append([])
        else:
            below[cause].append(finding)
    whole = (replace(root, consequences=tuple(rest)) for root, rest in zip(roots, below, strict=True))
    return tuple(sorted(whole, key=lambda each: each.order))


def _explains(root: Finding, finding: Finding) -> bool:
    later = root.order <= finding.order and finding.kind in AFTER.get(root.kind, ())
    return later or finding.kind in BEFORE.get(root.kind, ())
