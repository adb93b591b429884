"""Latency tables: the time of each layer as a function of its widths, and of a model under any plan."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.planning.budgets.cost_model import Span, round_up


@dataclass(frozen=True, eq=False)
class LatencyTerm:
    """A time that grows with a product of widths."""

    ms: float  # milliseconds for a product of 1
    # labels of each width, in the numbering of the trace; a width is the number of those that are kept
    factors: tuple[Labels, ...]
    steps: tuple[int, ...]  # for each factor, the step that its width is rounded up to, as kernels work in blocks
    spans: tuple[Span, ...] = ()  # the term is 0 unless the widths lie in all of them

    def at(self, kept: Keep) -> float:
        """Return milliseconds with the labels in `kept`, in the numbering of the trace."""
        if not all(span.low <= np.count_nonzero(kept[span.factor]) < span.high for span in self.spans):
            return 0.0
        value = self.ms
        for factor, step in zip(self.factors, self.steps, strict=True):
            value *= round_up(np.count_nonzero(kept[factor]), step)
        return value


@dataclass(frozen=True, eq=False)
class LayerLatency:
    """The time that one module takes, without the modules inside it."""

    module: str  # its path; empty for the model's own code
    constant: float  # milliseconds that do not depend on widths
    terms: tuple[LatencyTerm, ...]  # times that do
    error: float | None = None  # median relative error on the networks that it was fitted to; None if it takes no time

    def at(self, kept: Keep) -> float:
        """Return milliseconds with the labels in `kept`, in the numbering of the trace."""
        return self.constant + sum(term.at(kept) for term in self.terms)


@dataclass(frozen=True, eq=False)
class LatencyTable:
    """A model's latency under any plan, on one runtime, device, batch, number of threads, dtype and memory format."""

    setting: Mapping[str, Any]  # runtime, device and the others, by name
    layers: tuple[LayerLatency, ...]  # modules in the order in which they run
    outside: float  # milliseconds that belong to no layer and do not depend on widths
    factor: float  # of the sum of the layers
    dense_ms: float  # measured milliseconds of the dense model

    def at(self, channel_map: ChannelMap, keep: Keep | None = None) -> float:
        """Return the milliseconds of a forward pass of the batch."""
        final = channel_map.traced.final
        kept = np.ones(final.size, dtype=bool) if keep is None else keep[final]
        there = [layer for layer in self.layers if keep is None or channel_map.is_present(layer.module, keep)]
        return self.outside + self.factor * sum(layer.at(kept) for layer in there)

    @property
    def terms(self) -> Iterator[tuple[str, LatencyTerm]]:
        """The terms of all layers in milliseconds of the whole model, with the module, and one for the rest."""
        for layer in self.layers:
            for term in (*layer.terms, LatencyTerm(layer.constant, (), ())):
                yield layer.module, replace(term, ms=self.factor * term.ms)
        yield "", LatencyTerm(self.outside, (), ())
