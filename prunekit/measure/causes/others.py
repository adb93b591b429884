"""Operators that have no multiply-accumulates: pooling, activations, sums."""

from __future__ import annotations

from collections.abc import Iterable

from prunekit.measure.breakdown import OperatorRow, Side
from prunekit.measure.causes.cause import LEAST, Cause, Ran
from prunekit.measure.causes.layouts import COPIES
from prunekit.measure.causes.norms import NORMS
from prunekit.numbers import plural


def without_macs(rows: Iterable[OperatorRow], macs_ratio: float, pruned_ms: float) -> Cause | None:
    """Operators that the ratio of multiply-accumulates does not count, and that shrink less; norms and copies have
    causes of their own.
    """
    found = Ran.those(rows, _counts_nothing)
    if found.excess_ms < LEAST * pruned_ms:
        return None
    before = sum(row.dense.ms for row in found.rows if row.dense is not None)
    slowest = "; ".join(
        f"{row.operator} in {row.module or '(root)'} {side.ms:.3g} ms"
        for row, side in zip(found.rows[:2], found.sides, strict=False)
    )
    return Cause(
        name="operators without multiply-accumulates",
        ms=found.excess_ms,
        evidence=(
            f"{plural(found.calls, 'operator')} ({found.kinds}) take {found.ms:.3g} ms of {pruned_ms:.3g} ms, dense "
            f"{before:.3g} ms: {before / found.ms:.2f}× faster where multiply-accumulates say {macs_ratio:.2f}×; the "
            f"slowest: {slowest}"
        ),
        fix=(
            "a graph runtime does them with the layer before (torch.compile, ONNX Runtime, OpenVINO); they shrink with "
            "the channels of the layers that they follow (prune.ratios)"
        ),
        modules=found.modules,
    )


def _counts_nothing(row: OperatorRow, side: Side) -> bool:
    return side.macs == 0 and side.calls > 0 and row.operator not in NORMS | COPIES
