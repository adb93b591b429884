"""Operators that only copy, and the memory format of images."""

from __future__ import annotations

from collections.abc import Iterable

from prunekit.measure.beside import Beside
from prunekit.measure.breakdown import OperatorRow
from prunekit.measure.causes.cause import LEAST, Cause, plural, some, spent

COPIES = frozenset({"clone", "contiguous", "_to_copy", "copy_", "_reshape_copy", "permute_copy", "transpose_copy"})


def copying(rows: Iterable[OperatorRow], pruned_ms: float) -> Cause | None:
    """Operators that bring tensors into another order and compute nothing."""
    found = [row for row in rows if row.operator in COPIES and row.pruned is not None]
    ms = spent(found)
    if ms < LEAST * pruned_ms:
        return None
    moved = sum(row.pruned.bytes for row in found if row.pruned is not None)
    calls = sum(row.pruned.calls for row in found if row.pruned is not None)
    kinds, where = some([row.operator for row in found]), some([row.module for row in found])
    return Cause(
        name="layout conversions",
        ms=ms,
        evidence=(f"{plural(calls, 'operator')} ({kinds}) only copy: {ms:.3g} ms for {moved / 1e6:.3g} MB, at {where}"),
        fix=(
            "take away .contiguous(), .permute() and type conversions in the forward of these modules, or let a graph "
            "runtime do so: ONNX Runtime, OpenVINO, torch.compile"
        ),
        modules=tuple(dict.fromkeys(row.module for row in found)),
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
        fix="prunekit.channels_last(model, example), and the images in that format too",
    )
