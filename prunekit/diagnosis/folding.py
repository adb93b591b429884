"""Root causes first: what another finding is likely to have caused is told with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from prunekit.diagnosis.findings import Finding

AFTER: dict[str, frozenset[str]] = {
    "input_normalisation": frozenset(
        {"dead_relu", "saturated_sigmoid", "constant_channels", "batchnorm_variance", "exploding_gradient",
         "vanishing_gradient", "learning_rate"}
    ),
    "non_finite": frozenset({"exploding_gradient", "vanishing_gradient", "constant_channels", "learning_rate"}),
    "batchnorm_variance": frozenset(
        {"batchnorm_variance", "dead_relu", "constant_channels", "exploding_gradient", "learning_rate"}
    ),
    "constant_channels": frozenset({"constant_channels", "dead_relu", "batchnorm_variance", "saturated_sigmoid"}),
    "dead_relu": frozenset({"dead_relu", "constant_channels", "batchnorm_variance", "saturated_sigmoid"}),
    "saturated_sigmoid": frozenset({"saturated_sigmoid", "dead_relu", "constant_channels", "batchnorm_variance"}),
    "exploding_gradient": frozenset({"learning_rate"}),
}  # fmt: skip
"""What a fault causes in modules that run later."""
ANYWHERE: dict[str, frozenset[str]] = {
    "constant_channels": frozenset({"vanishing_gradient"}),
    "dead_relu": frozenset({"vanishing_gradient"}),
    "saturated_sigmoid": frozenset({"vanishing_gradient"}),
}
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
    return later or finding.kind in ANYWHERE.get(root.kind, ())
