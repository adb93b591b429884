"""What a resource is made of: sums of products of widths, each of which may count in steps, and within spans alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prunekit.channels import ChannelMap
from prunekit.channels.labels import Labels
from prunekit.channels.memory import memory_table
from prunekit.errors import PlanError
from prunekit.planning.latency import LatencyTable, Span
from prunekit.planning.select import Part

Numbers = NDArray[np.float64]
Counting = tuple[int, float, float, bool]
"""Of a width: the step that it is rounded up to, and where it counts: from the first to below the second; whether it
then counts as 1, not by its size."""


@dataclass(frozen=True, eq=False)
class Term:
    """A constant times the widths of its factors: how many labels of each are kept.

    Attributes:
        steps: of each factor: its width counts as the next multiple of this; none: as it is.
        spans: in all of which widths must lie for it to count.
    """

    constant: float
    factors: tuple[Labels, ...]
    steps: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()

    @property
    def counted(self) -> Iterator[tuple[Labels, Counting]]:
        """Every width that it is a product of, and how it counts; within a span a width is 1, else 0."""
        for factor, step in zip(self.factors, self.steps or (1,) * len(self.factors), strict=True):
            yield factor, (step, 0.0, np.inf, False)
        for span in self.spans:
            yield span.factor, (1, span.low, span.high, True)


def terms_of(channel_map: ChannelMap, parts: Iterable[Part], resource: str) -> list[Term]:
    """A resource as a sum of products: `macs`, `params`, `bytes` of all tensors, or `channels` of the parts."""
    match resource:
        case "macs":
            return [Term(term.constant, term.factors) for term in channel_map.mac_terms]
        case "params":
            return [_entries(channel_map, name) for name, how in channel_map.stored.items() if how.parameter]
        case "bytes":
            sized = ((how.element_bytes, _entries(channel_map, name)) for name, how in channel_map.stored.items())
            return [Term(size * term.constant, term.factors) for size, term in sized]
        case "channels":
            return [Term(part.channels, (part.labels,)) for part in parts]
    raise ValueError(resource)


def memory_terms(channel_map: ChannelMap, batch: int, dtype: str) -> list[list[Term]]:
    """The bytes alive at each moment of a forward pass that may be its peak.

    Raises:
        ModelError: the model does not run on that batch and dtype.
        PlanError: the map was read from a file.
    """
    if channel_map.source is None:
        raise PlanError("budget memory_mb: expected a map of a traced model, got one read from a file; trace it again")
    table, final = memory_table(channel_map.traced.trace, batch, dtype), channel_map.traced.final
    products = [tuple(final[factor] for factor in factors) for factors in table.factors]
    return [[Term(float(row[index]), products[index]) for index in np.flatnonzero(row)] for row in table.bytes]


def latency_terms(channel_map: ChannelMap, table: LatencyTable) -> list[Term]:
    """A latency in nanoseconds."""
    final = channel_map.traced.final
    return [
        Term(
            1e6 * one.ms,
            tuple(final[factor] for factor in one.factors),
            one.steps,
            tuple(replace(span, factor=final[span.factor]) for span in one.spans),
        )
        for one in table.terms
    ]


def _entries(channel_map: ChannelMap, name: str) -> Term:
    """The number of entries of a tensor."""
    axes = list(zip(channel_map.shapes[name], channel_map.labels[name], strict=True))
    whole = np.prod([size for size, labels in axes if labels is None], dtype=np.float64)
    return Term(float(whole), tuple(labels for _, labels in axes if labels is not None))
