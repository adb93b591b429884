"""Time that goes by between operators and before they begin to compute.

More threads than cores that are free, or than the model has work for.

A batch that is too small for the pruned model to be as much faster as it could be.

Masks that still run, and channels that are zero and still there.

Subnormal numbers, on which CPUs take a slow path.
"""

from __future__ import annotations

from collections.abc import Mapping

from prunekit.measure.causes.breakdown import Breakdown
from prunekit.measure.causes.cause import LEAST, Cause, some
from prunekit.measure.latency.timing import Contention, Estimate, PairedTiming
from prunekit.utils.display import plural

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


def too_many_threads(contention: Contention, fewer: Mapping[int, PairedTiming]) -> Cause | None:
    """The pruned model is faster with fewer threads.

    Args:
        contention: while it was timed with those that it has.
        fewer: thread count -> the model with the threads it has, and with that count.
    """
    better = {count: found for count, found in fewer.items() if found.saved_ms >= LEAST * found.now_ms}
    if not better:
        return None
    count, found = max(better.items(), key=lambda item: item[1].saved_ms)
    waited = contention.oversubscribed
    void = "; what else is measured with these threads is void, and no other cause was looked for" if waited else ""
    return Cause(
        name="threads oversubscribed" if waited else "more threads than it has work for",
        ms=found.saved_ms,
        evidence=(
            f"{found.now_ms:.3g} ms with {plural(contention.threads, 'thread')}, {found.other_ms:.3g} ms with {count}: "
            f"{found.gain.median:.2f}× [{found.gain.low:.2f}, {found.gain.high:.2f}]; {contention}"
            f"{void}"
        ),
        fix=f"torch.set_num_threads({count}) or OMP_NUM_THREADS={count}, or stop what else keeps the cores busy; then "
        f"explain again with {plural(count, 'thread')}",
    )


def small_batch(now: Estimate, pruned_ms: float, larger: PairedTiming, batch: int, larger_batch: int) -> Cause | None:
    """The pruned model is more times faster than the dense one at a larger batch.

    Args:
        now: speedup at the batch that was asked for.
        pruned_ms: of a forward pass of it.
        larger: the dense model beside the pruned one at `larger_batch`; the gain is the speedup.
    """
    saved = pruned_ms * (1 - now.median / larger.gain.median)
    if larger.gain.low <= now.high or saved < LEAST * pruned_ms:
        return None
    each = pruned_ms / batch, larger.other_ms / larger_batch
    return Cause(
        name="batch too small",
        ms=saved,
        evidence=(
            f"batch {larger_batch}: {larger.gain.median:.2f}× faster than dense [{larger.gain.low:.2f}, "
            f"{larger.gain.high:.2f}], batch {batch}: {now.median:.2f}× [{now.low:.2f}, {now.high:.2f}]; a sample "
            f"takes {each[1]:.3g} ms there and {each[0]:.3g} ms here"
        ),
        fix=f"run {larger_batch} samples at a time where latency allows it; where it does not, a graph runtime",
    )


def masks_attached(
    hooks: int,
    zero_channels: Mapping[str, tuple[int, int]],
    bare: PairedTiming | None,
    zeros_ms: float,
    pruned_ms: float,
) -> Cause | None:
    """Return a model that is masked and not compact.

    Args:
        hooks: of prunekit or torch.nn.utils.prune on the model.
        zero_channels: module path -> output channels whose weights are all 0, and all of them.
        bare: the model as it is, and a copy without these hooks; None without hooks.
        zeros_ms: what layers take for channels that are all 0, measured by running them without.
    """
    saved = 0.0 if bare is None else bare.saved_ms
    if not hooks and zeros_ms < LEAST * pruned_ms:
        return None
    parts = []
    if hooks:
        effect = "which was not measured" if bare is None else f"without them {bare.other_ms:.3g} ms"
        parts.append(f"{plural(hooks, 'hook')} of masks run with every forward pass: {effect}, of {pruned_ms:.3g} ms")
    if zero_channels:
        gone, total = (sum(pair[axis] for pair in zero_channels.values()) for axis in (0, 1))
        parts.append(
            f"{gone:,} of {total:,} output channels hold nothing but zeros and are computed all the same "
            f"({some(list(zero_channels))}): {zeros_ms:.3g} ms, by running the slowest of these layers without them"
        )
    return Cause(
        name="masks still attached",
        ms=saved + zeros_ms,
        evidence="; ".join(parts),
        fix="prunekit.compact(model, plan) takes the channels out; save and run what it returns",
        modules=tuple(zero_channels),
    )


def subnormal_numbers(
    weights: Mapping[str, int], activations: Mapping[str, int], flushed: PairedTiming | None
) -> Cause | None:
    """Return weights or activations below the smallest number of full precision, and the time without them.

    Where that is no different the cause is there with 0 ms: other processors are slowed by them many times over.

    Args:
        weights, activations: how many, by module path.
        flushed: the model as it is, and with such numbers taken as 0 by the CPU; None where that cannot be set.
    """
    found = sorted(weights, key=lambda path: -weights[path]), sorted(activations, key=lambda path: -activations[path])
    if flushed is None or not (weights or activations):
        return None
    saved = flushed.saved_ms if flushed.saved_ms >= LEAST * flushed.now_ms else 0.0
    here = "" if saved else ", no difference on this processor; others are slowed by them many times over"
    counts = [
        f"{plural(sum(part.values()), f'subnormal {what}')} ({some(paths)})"
        for part, paths, what in ((weights, found[0], "weight"), (activations, found[1], "activation"))
        if part
    ]
    gain = flushed.gain
    return Cause(
        name="subnormal numbers",
        ms=saved,
        evidence=(
            f"{' and '.join(counts)}; taken as 0 the model runs in {flushed.other_ms:.3g} ms in place of "
            f"{flushed.now_ms:.3g} ms: {gain.median:.2f}× [{gain.low:.2f}, {gain.high:.2f}]{here}"
        ),
        fix="prunekit.flush_subnormals(model, example) for weights, torch.set_flush_denormal(True) for activations",
        modules=tuple(dict.fromkeys((*found[0], *found[1]))),
    )
