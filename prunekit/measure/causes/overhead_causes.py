"""Causes around operators: dispatch, threads, the batch, masks still attached, subnormal numbers, computed zeros."""

from __future__ import annotations

from collections.abc import Mapping

from prunekit.compaction.zero_patterns import SOME, ModelZeros
from prunekit.measure.causes.breakdown import Breakdown
from prunekit.measure.causes.cause import LEAST, Cause, first_names
from prunekit.measure.latency.timing import Contention, Estimate, PairedTiming
from prunekit.measure.zero_support import users
from prunekit.utils.display import plural

MUCH = 0.15
"""Smallest share of the pruned model's time."""


def launch_bound(found: Breakdown, cuda: bool) -> Cause | None:
    """Return the time of Python, dispatch and the start of kernels, which pruning channels does not shorten.

    Outside of operators only the time of both models is counted, as they run the same Python.
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
            "CUDA graphs (torch.compile(mode='reduce-overhead')), a larger batch, or fewer layers (prune.depth: true)"
            if cuda
            else "a larger batch, fewer layers (prune.depth: true takes out whole blocks), or a runtime without Python "
            "between operators: torch.compile, ONNX Runtime, OpenVINO"
        ),
    )


def _starts(found: Breakdown, *, pruned: bool) -> float:
    figures = [row.pruned if pruned else row.dense for row in found.rows]
    return sum(min(one.ms, one.calls * found.floor_ms) for one in figures if one is not None)


def too_many_threads(contention: Contention, fewer: Mapping[int, PairedTiming]) -> Cause | None:
    """Return the time that fewer threads would save."""
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
            f"{found.gain.factor}; {contention}{void}"
        ),
        fix=f"torch.set_num_threads({count}) or OMP_NUM_THREADS={count}, or stop what else keeps the cores busy; then "
        f"explain again with {plural(count, 'thread')}",
    )


def small_batch(now: Estimate, pruned_ms: float, larger: PairedTiming, batch: int, larger_batch: int) -> Cause | None:
    """Return the time that the speedup at a larger batch would save."""
    saved = pruned_ms * (1 - now.median / larger.gain.median)
    if larger.gain.low <= now.high or saved < LEAST * pruned_ms:
        return None
    each = pruned_ms / batch, larger.other_ms / larger_batch
    return Cause(
        name="batch too small",
        ms=saved,
        evidence=(
            f"batch {larger_batch}: {larger.gain.median:.2f}× faster than dense [{larger.gain.low:.2f}, "
            f"{larger.gain.high:.2f}], batch {batch}: {now.factor}; a sample takes "
            f"{each[1]:.3g} ms there and {each[0]:.3g} ms here"
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
    """Return the time of masks and of channels that are zero, in a model that is not compact."""
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
            f"({first_names(zero_channels)}): {zeros_ms:.3g} ms, by running the slowest of these layers without them"
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
    """Return the time of subnormal numbers: weights or activations below the smallest number of full precision.

    It is a cause of 0 ms if they make no difference here, as other processors are slowed by them many times over.
    """
    found = sorted(weights, key=lambda path: -weights[path]), sorted(activations, key=lambda path: -activations[path])
    if flushed is None or not (weights or activations):
        return None
    saved = flushed.saved_ms if flushed.saved_ms >= LEAST * flushed.now_ms else 0.0
    here = "" if saved else ", no difference on this processor; others are slowed by them many times over"
    counts = [
        f"{plural(sum(part.values()), f'subnormal {what}')} ({first_names(paths)})"
        for part, paths, what in ((weights, found[0], "weight"), (activations, found[1], "activation"))
        if part
    ]
    return Cause(
        name="subnormal numbers",
        ms=saved,
        evidence=(f"{' and '.join(counts)}; taken as 0 the model runs in {flushed}{here}"),
        fix="prunekit.flush_subnormals(model, example) for weights, torch.set_flush_denormal(True) for activations",
        modules=tuple(dict.fromkeys((*found[0], *found[1]))),
    )


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
