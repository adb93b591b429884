"""BatchNorms that run as operators of their own."""

from __future__ import annotations

from collections.abc import Iterable

from prunekit.measure.beside import Beside
from prunekit.measure.breakdown import OperatorRow
from prunekit.measure.causes.cause import LEAST, Cause, Ran
from prunekit.numbers import plural

NORMS = frozenset(
    {"native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "miopen_batch_norm"}
    | {"batch_norm_with_update", "_native_batch_norm_legit"}
)


def unfused_norms(rows: Iterable[OperatorRow], pruned_ms: float, folded: Beside | None) -> Cause | None:
    """BatchNorm takes time that would be none inside the layer before it.

    Args:
        folded: the pruned model as it is, and with its norms folded; None where that was not done: then all of their
            time counts.
    """
    found = Ran.those(rows, lambda row, side: row.operator in NORMS)
    if found.ms < LEAST * pruned_ms or (folded is not None and folded.saved_ms < LEAST * folded.now_ms):
        return None
    return Cause(
        name="un-fused BatchNorm",
        ms=found.ms if folded is None else folded.saved_ms,
        evidence=(
            f"{plural(found.calls, 'operator')} for BatchNorm: {found.ms:.3g} ms, "
            f"{100 * found.ms / pruned_ms:.0f} % of the time{_effect(folded)}"
        ),
        fix=(
            "prunekit.fold_batchnorm(model, example), deploy.fold_batchnorm in a recipe: they go into the layers "
            "before them; or a runtime that does so: ONNX Runtime, OpenVINO"
        ),
        modules=found.modules,
    )


def _effect(folded: Beside | None) -> str:
    if folded is None:
        return ""
    gain = folded.gain
    return (
        f"; folded, the model runs in {folded.other_ms:.3g} ms in place of {folded.now_ms:.3g} ms: "
        f"{gain.median:.2f}× [{gain.low:.2f}, {gain.high:.2f}]"
    )
