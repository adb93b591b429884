"""Causes in operators: copies, memory format, memory bandwidth, norms, and operators that multiply nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prunekit.measure.causes.breakdown import OperatorFigures, OperatorRow
from prunekit.measure.causes.cause import LEAST, Cause, OperatorGroup, first_names
from prunekit.measure.latency.timing import PairedTiming
from prunekit.utils.display import plural

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
    """Return the time of BatchNorms that could be folded into the layer before them.

    Args:
        folded: the pruned model as it is, and with its norms folded; None if that was not done: then all of their time
            counts.
    """
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
    found = OperatorGroup.select(rows, _has_no_macs)
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


def _has_no_macs(row: OperatorRow, side: OperatorFigures) -> bool:
    return side.macs == 0 and side.calls > 0 and row.operator not in NORMS | COPIES
