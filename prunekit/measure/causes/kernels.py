"""Layers that multiply slower at their widths than at the dense ones: another kernel, or one with too little to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prunekit.measure.causes.cause import Cause, worth_naming
from prunekit.measure.causes.widths import text
from prunekit.measure.evidence import Estimate
from prunekit.measure.layers import Widths
from prunekit.numbers import plural

CLEARLY = 0.9
"""Share of the dense layer's speed below which one is slower, its whole interval."""


@dataclass(frozen=True)
class KernelTimes:
    """A layer of the pruned model run alone, at its widths and at those of the dense model.

    Attributes:
        module: its path.
        row_ms: what it takes in the model.
        now, dense: (input, output) channels.
        more_macs: multiply-accumulates at the dense widths over those now.
        now_ms, dense_ms: medians.
        dense_over_now: paired ratio of times.
    """

    module: str
    row_ms: float
    now: Widths
    dense: Widths
    more_macs: float
    now_ms: float
    dense_ms: float
    dense_over_now: Estimate

    @property
    def slower(self) -> bool:
        """Whether it surely does fewer multiply-accumulates in a second than at the dense widths."""
        return self.dense_over_now.high < CLEARLY * self.more_macs

    @property
    def saved_ms(self) -> float:
        """In the model, if it did as many in a second."""
        return self.row_ms * max(0.0, 1 - self.dense_over_now.median / self.more_macs)


def slower_kernels(times: Iterable[KernelTimes], pruned_ms: float) -> Cause | None:
    """Layers that do fewer multiply-accumulates in a second than at the dense model's widths."""
    layers = worth_naming((layer for layer in times if layer.slower), pruned_ms)
    if not layers:
        return None
    return Cause(
        name="slower kernels at these widths",
        ms=sum(layer.saved_ms for layer in layers),
        evidence=(
            f"fewer multiply-accumulates in a second than at the dense model's widths, each alone, in "
            f"{plural(len(layers), 'layer')}: {_shown(layers)}"
        ),
        fix=(
            "name the time and not the multiply-accumulates: prune.budget.speedup with this prune.target; such plans "
            "know what each layer takes at which widths, and where the library chooses another kernel"
        ),
        modules=tuple(layer.module for layer in layers),
    )


def _shown(layers: Sequence[KernelTimes]) -> str:
    return "; ".join(
        f"{layer.module} {text(layer.now)} {layer.now_ms:.3g} ms, {text(layer.dense)} {layer.dense_ms:.3g} ms for "
        f"{layer.more_macs:.3g} times as many"
        for layer in layers[:3]
    )
