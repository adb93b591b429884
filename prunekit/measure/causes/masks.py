"""Masks that still run, and channels that are zero and still there."""

from __future__ import annotations

from collections.abc import Mapping

from prunekit.measure.beside import Beside
from prunekit.measure.causes.cause import LEAST, Cause, some
from prunekit.numbers import plural


def masks_attached(
    hooks: int,
    zero_channels: Mapping[str, tuple[int, int]],
    bare: Beside | None,
    zeros_ms: float,
    pruned_ms: float,
) -> Cause | None:
    """A model that is masked and not compact.

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
