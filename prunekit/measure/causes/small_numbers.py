"""Subnormal numbers, on which CPUs take a slow path."""

from __future__ import annotations

from collections.abc import Mapping

from prunekit.measure.beside import Beside
from prunekit.measure.causes.cause import LEAST, Cause, some
from prunekit.numbers import plural


def subnormal_numbers(
    weights: Mapping[str, int], activations: Mapping[str, int], flushed: Beside | None
) -> Cause | None:
    """Weights or activations below the smallest number of full precision, and the time without them.

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
