"""Zeros of single weights as a cause: the runtime multiplies by them as by any other number."""

from __future__ import annotations

from collections.abc import Mapping

from prunekit.compaction.zero_patterns import SOME, ModelZeros
from prunekit.measure.causes.cause import Cause
from prunekit.measure.latency.timing import PairedTiming
from prunekit.measure.zero_support import users

USED = 0.1
"""Share of the time that zeros must save over other numbers for the runtime to count as using them."""


def unused_zeros(zeros: ModelZeros, layer_ms: Mapping[str, float], filled: PairedTiming) -> Cause | None:
    """Return the time in which layers multiply by zeros; None if there are few, or if they are skipped."""
    if zeros.single_share < SOME or filled.saved_ms >= USED * filled.now_ms:
        return None
    by_module = {name.rpartition(".")[0]: one for name, one in zeros.layers.items()}
    spent = {path: ms * by_module[path].single_share for path, ms in layer_ms.items() if path in by_module}
    slowest = sorted((path for path in spent if spent[path]), key=lambda path: -spent[path])
    return Cause(
        name="zeros that are computed",
        ms=sum(spent.values()),
        evidence=(
            f"{zeros}; with random numbers in their place the model runs in {filled.now_ms:.3g} ms, with the zeros in "
            f"{filled.other_ms:.3g} ms: {filled.gain.factor}, so they are multiplied by as any other number"
        ),
        fix=users(zeros),
        modules=tuple(slowest),
    )
