"""Operators that only copy, and the memory format of images."""

from __future__ import annotations

from collections.abc import Iterable

from prunekit.measure.beside import Beside
from prunekit.measure.breakdown import OperatorRow
from prunekit.measure.causes.cause import LEAST, Cause, Ran, some
from prunekit.numbers import plural

COPIES = frozenset({"clone", "contiguous", "_to_copy", "copy_", "_reshape_copy", "permute_copy", "transpose_copy"})


def copying(rows: Iterable[OperatorRow], pruned_ms: float) -> Cause | None:
    """Operators that bring tensors into another order and compute nothing."""
    found = Ran.those(rows, lambda row, side: row.operator in COPIES)
    if found.ms < LEAST * pruned_ms:
        return None
    return Cause(
        name="layout conversions",
        ms=found.ms,
        evidence=(
            f"{plural(found.calls, 'operator')} ({found.kinds}) only copy: {found.ms:.3g} ms for "
            f"{found.bytes / 1e6:.3g} MB, at {some(found.modules)}"
        ),
        fix=(
            "take away .contiguous(), .permute() and type conversions in the forward of these modules, or let a graph "
            "runtime do so: ONNX Runtime, OpenVINO, torch.compile"
        ),
        modules=found.modules,
    )


def other_layout(channels_last: Beside | None) -> Cause | None:
    """Convolutions that are faster with channels last.

    Args:
        channels_last: the pruned model as it is, and with weights and images in that format; None where neither is
            four-dimensional.
    """
    if channels_last is None or channels_last.saved_ms < LEAST * channels_last.now_ms:
        return None
    gain = channels_last.gain
    return Cause(
        name="memory format",
        ms=channels_last.saved_ms,
        evidence=(
            f"with channels last {channels_last.other_ms:.3g} ms in place of {channels_last.now_ms:.3g} ms: "
            f"{gain.median:.2f}× [{gain.low:.2f}, {gain.high:.2f}], measured alternately"
        ),
        fix="prunekit.channels_last(model, example), deploy.channels_last in a recipe, and images in that format too",
    )
