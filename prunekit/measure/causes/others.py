"""Operators that have no multiply-accumulates: pooling, activations, sums."""

from __future__ import annotations

from collections.abc import Iterable

from prunekit.measure.breakdown import OperatorRow
from prunekit.measure.causes.cause import LEAST, Cause, excess, plural, some, spent
from prunekit.measure.causes.layouts import COPIES
from prunekit.measure.causes.norms import NORMS


def without_macs(rows: Iterable[OperatorRow], macs_ratio: float, pruned_ms: float) -> Cause | None:
    """Operators that the ratio of multiply-accumulates does not count, and that shrink less; norms and copies have
    causes of their own.
    """
    found = [
        row
        for row in rows
        if row.pruned is not None and row.pruned.macs == 0 and row.operator not in NORMS | COPIES and row.pruned.calls
    ]
    ms, after = excess(found), spent(found)
    if ms < LEAST * pruned_ms:
        return None
    before = sum(row.dense.ms for row in found if row.dense is not None)
    calls = sum(row.pruned.calls for row in found if row.pruned is not None)
    slowest = "; ".join(f"{row.operator} in {row.module or '(root)'} {_ms(row):.3g} ms" for row in found[:2])
    return Cause(
        name="operators without multiply-accumulates",
        ms=ms,
        evidence=(
            f"{plural(calls, 'operator')} ({some([row.operator for row in found])}) take {after:.3g} ms of "
            f"{pruned_ms:.3g} ms, dense {before:.3g} ms: {before / after:.2f}× faster where multiply-accumulates say "
            f"{macs_ratio:.2f}×; the slowest: {slowest}"
        ),
        fix=(
            "a graph runtime does them with the layer before (torch.compile, ONNX Runtime, OpenVINO); they shrink with "
            "the channels of the layers that they follow (prune.ratios)"
        ),
        modules=tuple(dict.fromkeys(row.module for row in found)),
    )


def _ms(row: OperatorRow) -> float:
    return row.pruned.ms if row.pruned is not None else 0.0
