"""Latency tables as plain data: what every layer takes by the widths that it has, and what a plan takes then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prunekit.channels.channel_map import ChannelMap, Keep
from prunekit.channels.labels import Labels


@dataclass(frozen=True, eq=False)
class Span:
    """Widths at which a term counts, as kernels are chosen by them.

    Attributes:
        factor: labels of the width, in the numbering of the trace.
        low, high: it lies within where it is at least the first, and below the second.
    """

    factor: Labels
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class LatencyTerm:
    """Milliseconds that grow with a product of widths.

    Attributes:
        ms: for a product of 1.
        factors: labels of each width, in the numbering of the trace; a width is the number of those that are kept.
        steps: of each factor: its width counts as the next multiple of this, as kernels work in blocks.
        spans: in all of which widths must lie for it to count; else it is 0.
    """

    ms: float
    factors: tuple[Labels, ...]
    steps: tuple[int, ...]
    spans: tuple[Span, ...] = ()

    def at(self, kept: Keep) -> float:
        """Return milliseconds with the labels in `kept`, in the numbering of the trace."""
        if not all(span.low <= np.count_nonzero(kept[span.factor]) < span.high for span in self.spans):
            return 0.0
        value = self.ms
        for factor, step in zip(self.factors, self.steps, strict=True):
            value *= round_up(np.count_nonzero(kept[factor]), step)
        return value


def round_up(width: Any, step: Any) -> Any:
    """Return a width, or an array of them, rounded up to the next multiple of a step."""
    return -(-width // step) * step


@dataclass(frozen=True, eq=False)
class LayerLatency:
    """What the code of one module takes, without that of modules inside it.

    Attributes:
        module: its path; empty for the model's own code.
        constant: milliseconds, whatever the widths.
        terms: what comes to it.
        error: median relative error on the networks that it was fitted to; None where it takes no time.
    """

    module: str
    constant: float
    terms: tuple[LatencyTerm, ...]
    error: float | None = None

    def at(self, kept: Keep) -> float:
        """Return milliseconds with the labels in `kept`, in the numbering of the trace."""
        return self.constant + sum(term.at(kept) for term in self.terms)


@dataclass(frozen=True, eq=False)
class LatencyTable:
    """A model's latency under any plan, on one runtime, device, batch, number of threads, dtype and memory format.

    Attributes:
        setting: these, by their names.
        layers: modules in the order in which they run.
        outside: milliseconds that belong to no layer, whatever the widths.
        factor: what the sum of the layers is multiplied with.
        dense_ms: the dense model's, measured.
    """

    setting: Mapping[str, Any]
    layers: tuple[LayerLatency, ...]
    outside: float
    factor: float
    dense_ms: float

    def at(self, channel_map: ChannelMap, keep: Keep | None = None) -> float:
        """Milliseconds of a forward pass of the batch with the labels in `keep`, bool (n_labels,); dense without.

        Args:
            channel_map: made from the trace that the table is for.
        """
        final = channel_map.traced.final
        kept = np.ones(final.size, dtype=bool) if keep is None else keep[final]
        return self.outside + self.factor * sum(layer.at(kept) for layer in self.layers)

    @property
    def terms(self) -> Iterator[LatencyTerm]:
        """All that depends on widths, scaled to the whole; and what does not, as a term without factors."""
        for layer in self.layers:
            for term in layer.terms:
                yield replace(term, ms=self.factor * term.ms)
        yield LatencyTerm(self.outside + self.factor * sum(layer.constant for layer in self.layers), (), ())
