"""Causes in operators and around them: copies, norms, dispatch, threads, the batch, masks, subnormals, zeros."""

from collections.abc import Callable, Iterable, Mapping

from prunekit.compaction.zero_patterns import SOME, ModelZeros, users
from prunekit.measure.causes.breakdown import Breakdown, OperatorFigures, OperatorRow
from prunekit.measure.causes.width_causes import LEAST, Cause, OperatorGroup, first_names
from prunekit.measure.latency.timing import Contention, Estimate, PairedTiming
from prunekit.utils.display import plural

MUCH = 0.15
"""Smallest share of the pruned model's time."""


def launch_bound(found: Breakdown, cuda: bool) -> Cause | None:
    """Return the time of Python, dispatch and the start of kernels, which pruning channels does not shorten.

    Outside of operators, the smaller time of the two models is counted, as both run the same Python.
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
    here, there = pruned_ms / batch, larger.other_ms / larger_batch
    return Cause(
        name="batch too small",
        ms=saved,
        evidence=(
            f"a sample takes {there:.3g} ms in a batch of {larger_batch} and {here:.3g} ms in one of {batch}; the "
            f"speedup over dense is {larger.gain.median / now.median:.2f} times as high there"
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


COPIES = frozenset({"clone", "contiguous", "_to_copy", "copy_", "_reshape_copy", "permute_copy", "transpose_copy"})


def layout_conversions(rows: Iterable[OperatorRow], pruned_ms: float) -> Cause | None:
    """Return the time of operators that only change the layout of tensors."""
    found = OperatorGroup.select(rows, lambda row, _: row.operator in COPIES)
    if found.ms < LEAST * pruned_ms:
        return None
    return Cause(
        name="layout conversions",
        ms=found.ms,
        evidence=(
            f"{plural(found.calls, 'operator')} ({found.kinds}) only copy: {found.ms:.3g} ms for "
            f"{found.bytes / 1e6:.3g} MB, at {first_names(found.modules)}"
        ),
        fix=(
            "take away .contiguous(), .permute() and type conversions in the forward of these modules, or let a graph "
            "runtime do so: ONNX Runtime, OpenVINO, torch.compile"
        ),
        modules=found.modules,
    )


def memory_format(channels_last: PairedTiming | None) -> Cause | None:
    """Return the time that channels last would save."""
    if channels_last is None or channels_last.saved_ms < LEAST * channels_last.now_ms:
        return None
    return Cause(
        name="memory format",
        ms=channels_last.saved_ms,
        evidence=f"with channels last {channels_last}, measured alternately",
        fix="prunekit.channels_last(model, example), deploy.channels_last in a recipe, and images in that format too",
    )


NEAR = 0.5
"""Smallest share of the speed of a copy at which an operator counts as limited by memory."""
FAR = 0.25
"""Largest share of the best layer's multiply-accumulates per second of an operator not limited by arithmetic."""


def memory_bound(
    rows: Iterable[OperatorRow], copy_ms: Callable[[float], float], floor_ms: float, pruned_ms: float, batch: int
) -> Cause | None:
    """Return the time of operators as fast as a copy of their bytes, which multiply far slower than the best layer."""
    rows = tuple(rows)
    best = max((_rate(row.pruned) for row in rows if row.pruned is not None), default=0.0)

    def copied_ms(side: OperatorFigures) -> float:
        return copy_ms(side.bytes / side.calls) * side.calls

    def bound(_: OperatorRow, side: OperatorFigures) -> bool:
        long = side.ms > 3 * floor_ms * side.calls > 0
        return long and copied_ms(side) >= NEAR * side.ms and _rate(side) < FAR * best

    found = OperatorGroup.select(rows, bound)
    if found.excess_ms < LEAST * pruned_ms:
        return None
    ideal, macs = sum(map(copied_ms, found.figures)), batch * sum(one.macs or 0 for one in found.figures)
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


def _rate(side: OperatorFigures) -> float:
    """Return the multiply-accumulates of a sample in a millisecond."""
    return (side.macs or 0) / side.ms if side.ms else 0.0


NORMS = frozenset(
    {"native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "miopen_batch_norm"}
    | {"batch_norm_with_update", "_native_batch_norm_legit"}
)


def unfused_norms(rows: Iterable[OperatorRow], pruned_ms: float, folded: PairedTiming | None) -> Cause | None:
    """Return the time of BatchNorms that could be folded into the layer before; all of it if `folded` was not timed."""
    found = OperatorGroup.select(rows, lambda row, _: row.operator in NORMS)
    if found.ms < LEAST * pruned_ms or (folded is not None and folded.saved_ms < LEAST * folded.now_ms):
        return None
    effect = "" if folded is None else f"; folded, the model runs in {folded}"
    return Cause(
        name="un-fused BatchNorm",
        ms=found.ms if folded is None else folded.saved_ms,
        evidence=(
            f"{plural(found.calls, 'operator')} for BatchNorm: {found.ms:.3g} ms, "
            f"{100 * found.ms / pruned_ms:.0f} % of the time{effect}"
        ),
        fix=(
            "prunekit.fold_batchnorm(model, example), deploy.fold_batchnorm in a recipe: they go into the layers "
            "before them; or a runtime that does so: ONNX Runtime, OpenVINO"
        ),
        modules=found.modules,
    )


def without_macs(rows: Iterable[OperatorRow], macs_ratio: float, pruned_ms: float) -> Cause | None:
    """Return the time of operators that have no multiply-accumulates, and shrink less than those that have.

    Norms and copies are causes of their own.
    """
    own = NORMS | COPIES
    found = OperatorGroup.select(rows, lambda row, one: one.macs == 0 and one.calls > 0 and row.operator not in own)
    if found.excess_ms < LEAST * pruned_ms:
        return None
    before = sum(row.dense.ms for row in found.rows if row.dense is not None)
    slowest = "; ".join(
        f"{row.operator} in {row.module or '(root)'} {one.ms:.3g} ms"
        for row, one in zip(found.rows[:2], found.figures, strict=False)
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
