"""Time that goes by between operators and before they begin to compute."""

from __future__ import annotations

from prunekit.measure.breakdown import Breakdown
from prunekit.measure.causes.cause import Cause
from prunekit.numbers import plural

MUCH = 0.15
"""Share of the pruned model's time."""


def launch_bound(found: Breakdown, cuda: bool) -> Cause | None:
    """Python, dispatch and the start of kernels, which pruning channels does not shorten.

    Outside of operators only what both models have is counted: they run the same Python.
    """
    outside = min(found.dense_outside_ms, found.pruned_outside_ms)
    starts = [_starts(found, pruned=False), _starts(found, pruned=True)]
    dense, pruned = outside + starts[0], outside + starts[1]
    ms = pruned - dense / found.macs_ratio
    if pruned < MUCH * found.pruned_ms or ms <= 0:
        return None
    calls = sum(row.pruned.calls for row in found.rows if row.pruned is not None)
    gaps = "gaps between kernels" if cuda else "Python between operators"
    return Cause(
        name="launch-bound",
        ms=ms,
        evidence=(
            f"{100 * pruned / found.pruned_ms:.0f} % of the time is none that channels could shorten: "
            f"{outside:.3g} ms of {gaps}, and {starts[1]:.3g} ms in which {plural(calls, 'operator')} "
            f"start ({1000 * found.floor_ms:.2g} us each, measured on one number); dense {dense:.3g} ms"
        ),
        fix=(
            "CUDA graphs (torch.compile(mode='reduce-overhead')), a larger batch"
            if cuda
            else "a larger batch, or a runtime without Python between operators: torch.compile, ONNX Runtime, OpenVINO"
        ),
    )


def _starts(found: Breakdown, *, pruned: bool) -> float:
    sides = [row.pruned if pruned else row.dense for row in found.rows]
    return sum(min(side.ms, side.calls * found.floor_ms) for side in sides if side is not None)
