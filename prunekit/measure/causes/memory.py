"""Operators whose time is that of moving their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prunekit.measure.breakdown import OperatorRow, Side
from prunekit.measure.causes.cause import LEAST, Cause, Ran

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
    rows = tuple(rows)
    best = max((_rate(row.pruned) for row in rows if row.pruned is not None), default=0.0)

    def copied_ms(side: Side) -> float:
        return copy_ms(side.bytes / side.calls) * side.calls

    def bound(_: OperatorRow, side: Side) -> bool:
        long = side.ms > 3 * floor_ms * side.calls > 0
        return long and copied_ms(side) >= NEAR * side.ms and _rate(side) < FAR * best

    found = Ran.those(rows, bound)
    if found.excess_ms < LEAST * pruned_ms:
        return None
    ideal, macs = sum(map(copied_ms, found.sides)), batch * sum(side.macs or 0 for side in found.sides)
    return Cause(
        name="memory-bound operators",
        ms=found.excess_ms,
        evidence=(
            f"{len(found.rows)} of them ({found.kinds}) take {found.ms:.3g} ms, {100 * found.ms / pruned_ms:.0f} % of "
            f"the time, to move {found.bytes / 1e6:.3g} MB at {found.bytes / found.ms / 1e6:.3g} GB/s; copies of the "
            f"same sizes take {ideal:.3g} ms. They do {macs / max(1, found.bytes):.2g} multiply-accumulates a byte, so "
            "fewer of those save little"
        ),
        fix=(
            "have them done with the layer before: fold BatchNorm, or torch.compile, ONNX Runtime or OpenVINO; where "
            "the bytes are weights, a larger batch shares them"
        ),
        modules=found.modules,
    )


def _rate(side: Side) -> float:
    """Multiply-accumulates of a sample in a millisecond."""
    return (side.macs or 0) / side.ms if side.ms else 0.0
