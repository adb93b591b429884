"""BatchNorms that run as operators of their own."""

from __future__ import annotations

from collections.abc import Iterable

from prunekit.measure.breakdown import OperatorRow
from prunekit.measure.causes.cause import LEAST, Cause, plural, spent

NORMS = frozenset(
    {"native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "miopen_batch_norm"}
    | {"batch_norm_with_update", "_native_batch_norm_legit"}
)


def unfused_norms(rows: Iterable[OperatorRow], pruned_ms: float) -> Cause | None:
    """BatchNorm takes time that would be none inside the layer before it; all of it is counted."""
    found = [row for row in rows if row.operator in NORMS and row.pruned is not None]
    ms = spent(found)
    if ms < LEAST * pruned_ms:
        return None
    calls = sum(row.pruned.calls for row in found if row.pruned is not None)
    return Cause(
        name="un-fused BatchNorm",
        ms=ms,
        evidence=f"{plural(calls, 'operator')} for BatchNorm: {ms:.3g} ms, {100 * ms / pruned_ms:.0f} % of the time",
        fix=(
            "fold them into the convolutions before them: torch.nn.utils.fusion.fuse_conv_bn_eval, or a runtime that "
            "does so: ONNX Runtime, OpenVINO"
        ),
        modules=tuple(row.module for row in found),
    )
