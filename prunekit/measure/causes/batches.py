"""A batch that is too small for the pruned model to be as much faster as it could be."""

from __future__ import annotations

from prunekit.measure.beside import Beside
from prunekit.measure.causes.cause import LEAST, Cause
from prunekit.measure.evidence import Estimate


def small_batch(now: Estimate, pruned_ms: float, larger: Beside, batch: int, larger_batch: int) -> Cause | None:
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
