"""Operators whose time is that of moving their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prunekit.measure.breakdown import OperatorRow
from prunekit.measure.causes.cause import LEAST, Cause, excess, some, spent

NEAR = 0.5
"""Share of the speed of a copy from which an operator counts as limited by memory."""
FAR = 0.25
"""Share of the best layer's multiply-accumulates in a second below which it is not limited by arithmetic."""


def memory_bound(
    rows: Iterable[OperatorRow], copy_ms: Callable[[float], float], floor_ms: float, pruned_ms: float, batch: int
) -> Cause | None:
    """Operators that move bytes at the speed of a copy while they multiply far slower than the best layer.

    Args:
        copy_ms: time that a copy takes which moves as many bytes, reads and writes together.
        floor_ms: time of an operator that does nothing; what is near it says nothing about memory.
    """
    done = [(row, row.pruned) for row in rows if row.pruned is not None]
    best = max((_rate(side.macs, side.ms) for _, side in done), default=0.0)
    found = [
        row
        for row, side in done
        if side.ms > 3 * floor_ms * side.calls > 0
        and copy_ms(side.bytes / side.calls) * side.calls >= NEAR * side.ms
        and _rate(side.macs, side.ms) < FAR * best
    ]
    ms = excess(found)
    if ms < LEAST * pruned_ms:
        return None
    total, moved = spent(found), sum(row.pruned.bytes for row in found if row.pruned is not None)
    macs = batch * sum(row.pruned.macs or 0 for row in found if row.pruned is not None)
    ideal = sum(copy_ms(row.pruned.bytes / row.pruned.calls) * row.pruned.calls for row in found if row.pruned)
    names = some([row.operator for row in found])
    return Cause(
        name="memory-bound operators",
        ms=ms,
        evidence=(
            f"{len(found)} of them ({names}) take {total:.3g} ms, {100 * total / pruned_ms:.0f} % of the time, to move "
            f"{moved / 1e6:.3g} MB at {moved / total / 1e6:.3g} GB/s; copies of the same sizes take {ideal:.3g} ms. "
            f"They do {macs / max(1, moved):.2g} multiply-accumulates a byte, so fewer of those save little"
        ),
        fix=(
            "have them done with the layer before: fold BatchNorm, or torch.compile, ONNX Runtime or OpenVINO; where "
            "the bytes are weights, a larger batch shares them"
        ),
        modules=tuple(dict.fromkeys(row.module for row in found)),
    )


def _rate(macs: float | None, ms: float) -> float:
    return (macs or 0) / ms if ms else 0.0
