"""What a resource is made of: sums of products of widths, each of which may count in steps, and within spans alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prunekit.channels import ChannelMap
from prunekit.channels.labels import Labels
from prunekit.planning.latency import Span

Numbers = NDArray[np.float64]
Counting = tuple[int, float, float, bool]
"""Of a width: the step that it is rounded up to, and where it counts: from the first to below the second; whether it
then counts as 1, not by its size."""


@dataclass(frozen=True, eq=False)
class Term:
    """A constant times the widths of its factors: how many labels of each are kept.

    Attributes:
        constant: what the product of the widths is multiplied by.
        factors: arrays of labels, such as those of a layer's inputs and outputs; none: the term does not change.
        steps: of each factor: its width counts as the next multiple of this; none: as it is.
        spans: in all of which widths must lie for it to count.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> @pk.register_budget("hidden", about="Channels of all hidden layers.")
        ... def hidden(countable):
        ...     return [pk.Term(1.0, (group.labels,)) for group in countable.channel_map.groups]
        >>> pk.prune(model, x, hidden=10).model[0].out_features
        10
    """

    constant: float
    factors: tuple[Labels, ...]
    steps: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()

    def times(self, factor: float) -> Term:
        """Returns the same term with its constant multiplied."""
        return replace(self, constant=factor * self.constant)

    @property
    def counted(self) -> Iterator[tuple[Labels, Counting]]:
        """Every width that it is a product of, and how it counts; within a span a width is 1, else 0."""
        for factor, step in zip(self.factors, self.steps or (1,) * len(self.factors), strict=True):
            yield factor, (step, 0.0, np.inf, False)
        for span in self.spans:
            yield span.factor, (1, span.low, span.high, True)


def entries(channel_map: ChannelMap, name: str) -> Term:
    """Counts the entries of a tensor of the model."""
    axes = list(zip(channel_map.shapes[name], channel_map.labels[name], strict=True))
    whole = np.prod([size for size, labels in axes if labels is None], dtype=np.float64)
    return Term(float(whole), tuple(labels for _, labels in axes if labels is not None))
