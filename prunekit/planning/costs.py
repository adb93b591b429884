"""What a choice of widths costs: sums of products of widths, exact at any counts, many choices at once.

What a resource is made of: sums of products of widths, each of which may count in steps, and within spans alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunekit.channels.channel_map import ChannelMap
from prunekit.channels.labels import Labels
from prunekit.planning.candidates import GroupPart
from prunekit.planning.latency_table import Span, round_up

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
        """Return the same term with its constant multiplied."""
        return replace(self, constant=factor * self.constant)

    @property
    def counted(self) -> Iterator[tuple[Labels, Counting]]:
        """Every width that it is a product of, and how it counts; within a span a width is 1, else 0."""
        for factor, step in zip(self.factors, self.steps or (1,) * len(self.factors), strict=True):
            yield factor, (step, 0.0, np.inf, False)
        for span in self.spans:
            yield span.factor, (1, span.low, span.high, True)


def entries(channel_map: ChannelMap, name: str) -> Term:
    """Count the entries of a tensor of the model."""
    axes = list(zip(channel_map.shapes[name], channel_map.labels[name], strict=True))
    whole = np.prod([size for size, labels in axes if labels is None], dtype=np.float64)
    return Term(float(whole), tuple(labels for _, labels in axes if labels is not None))


def counted(width: Any, step: Any, low: Any, high: Any, as_one: Any) -> Any:
    """Return what a width, or each of an array of them, is multiplied as."""
    within = (low <= width) & (width < high)
    return np.where(within, np.where(as_one, 1.0, round_up(width, step)), 0.0)


@dataclass(frozen=True, eq=False)
class _Lookup:
    """How many labels of a factor are kept, by the counts of one part, or of two where labels are joint.

    Attributes:
        parts: the second is the same as the first where there is one.
        table: (size,) of kept labels; (sizes of both) where there are two.
    """

    parts: tuple[int, int]
    table: Labels


@dataclass(frozen=True, eq=False)
class _Width:
    """A factor's width: what of it no part decides, tables of the rest, and how it counts."""

    fixed: int
    lookups: list[_Lookup]
    counting: Counting


@dataclass(frozen=True, eq=False)
class CostModel:
    """Costs of choices of counts, for several resources at once.

    A cost is a sum of products of widths, each rounded up to its step, and a width a sum of table entries, one for each
    part that it depends on: so neighbors' widths multiply, and labels that lie on an axis several times, or are joint,
    count as often as they do. A product that counts only within a span of a width has a factor more, which is 0 or 1.

    Attributes:
        tables: (entries,) all lookups' tables in a row.
        at: (lookups,) where each one's begins.
        first, second: (lookups,) the parts whose counts it takes.
        stride: (lookups,) of the first part's count; 0 where there is one part.
        starts: (widths,) the first lookup of each width.
        fixed: (widths,) what of each width no part decides.
        counting: (4, widths) the numbers of each one's `Counting`.
        factors: (terms, most factors) widths, one beyond the last where a term has fewer.
        constants: (terms, resources)
        base: (resources,) what depends on no part.
    """

    tables: Labels
    at: Labels
    first: Labels
    second: Labels
    stride: Labels
    starts: Labels
    fixed: Labels
    counting: Numbers
    factors: Labels
    constants: Numbers
    base: Numbers

    def of(self, resources: Labels) -> CostModel:
        """Return the same for some of the resources alone."""
        return replace(self, constants=self.constants[:, resources], base=self.base[resources])

    @property
    def turning(self) -> bool:
        """Whether a span decides on a product, so that costs may fall as widths grow."""
        return bool(self.counting[3].any())

    def turns(self, sizes: Sequence[int]) -> list[set[int]]:
        """Of each part, whose sizes are given, the counts from which on a span begins or ends, and so costs may fall.

        Of spans of widths that a single part decides; where several do, none.
        """
        found: list[set[int]] = [set() for _ in sizes]
        several = np.diff(np.append(self.starts, self.first.size))
        for width in np.flatnonzero((self.counting[3] > 0) & (several == 1)):
            lookup = self.starts[width]
            part = self.first[lookup]
            if self.stride[lookup] == 0:
                kept = self.fixed[width] + self.tables[self.at[lookup] :][: sizes[part] + 1]
                firsts = np.searchsorted(kept, self.counting[1:3, width])
                found[part] |= {int(count) for count in firsts if 0 < count <= sizes[part]}
        return found

    def __call__(self, counts: Labels) -> Numbers:
        """Whole numbers, (..., resources), of counts (..., parts)."""
        flat = counts.reshape(-1, counts.shape[-1])
        if not self.starts.size:
            return np.broadcast_to(np.rint(self.base), (*counts.shape[:-1], self.base.size))
        kept = self.tables[self.at + flat[:, self.first] * self.stride + flat[:, self.second]]
        widths = self.fixed + np.add.reduceat(kept, self.starts, axis=1)
        widths = counted(widths, *self.counting) if self.turning else round_up(widths, self.counting[0])
        widths = np.concatenate([widths, np.ones_like(widths[:, :1])], axis=1)
        products = widths[:, self.factors].prod(axis=2)
        result: Numbers = np.rint(products @ self.constants + self.base)
        return result.reshape(*counts.shape[:-1], self.base.size)


def cost_model(channel_map: ChannelMap, parts: list[GroupPart], resources: list[list[Term]]) -> CostModel:
    """Compile terms of several resources into tables over the parts' counts."""
    reading = _Reading.of(channel_map, parts)
    number: dict[tuple[bytes, Counting], int] = {}
    found: list[_Width] = []
    rows: dict[tuple[int, ...], Numbers] = {}
    for resource, terms in enumerate(resources):
        for term in terms:
            constant, free = term.constant, []
            for factor, counting in term.counted:
                index = number.setdefault((factor.tobytes(), counting), len(found))
                if index == len(found):
                    found.append(_Width(*reading.width(factor), counting))
                width = found[index]
                constant *= 1 if width.lookups else float(counted(width.fixed, *counting))
                free += [index] if width.lookups else []
            row = rows.setdefault(tuple(sorted(free)), np.zeros(len(resources)))
            row[resource] += constant
    return _compiled(found, rows, len(resources))


def _compiled(found: list[_Width], rows: Mapping[tuple[int, ...], Numbers], resources: int) -> CostModel:
    used = sorted({index for row in rows for index in row})
    place = {index: position for position, index in enumerate(used)}
    lookups = [lookup for index in used for lookup in found[index].lookups]
    most = max((len(row) for row in rows), default=0)
    terms = {row: constants for row, constants in rows.items() if row}
    factors = np.full((len(terms), most), len(used), dtype=np.int64)
    for i, row in enumerate(terms):
        factors[i, : len(row)] = [place[index] for index in row]
    sizes = [lookup.table.size for lookup in lookups]
    return CostModel(
        tables=np.concatenate([lookup.table.reshape(-1) for lookup in lookups] or [np.zeros(0, dtype=np.int64)]),
        at=np.cumsum([0, *sizes[:-1]]) if sizes else np.zeros(0, dtype=np.int64),
        first=np.array([lookup.parts[0] for lookup in lookups], dtype=np.int64),
        second=np.array([lookup.parts[1] for lookup in lookups], dtype=np.int64),
        stride=np.array([lookup.table.shape[1] if lookup.table.ndim > 1 else 0 for lookup in lookups], dtype=np.int64),
        starts=np.cumsum([0, *(len(found[index].lookups) for index in used)], dtype=np.int64)[:-1],
        fixed=np.array([found[index].fixed for index in used], dtype=np.int64),
        counting=np.array([found[index].counting for index in used], dtype=np.float64).reshape(-1, 4).T,
        factors=factors,
        constants=np.array(list(terms.values())).reshape(len(terms), resources),
        base=rows.get((), np.zeros(resources)),
    )


@dataclass(frozen=True, eq=False)
class _Reading:
    """Which part decides on each label, and at what count.

    Attributes:
        owner: (n_labels,) index of its part, -1 for labels that stay.
        rank: (n_labels,) it is kept where its part keeps more than that.
        sizes: of the parts.
    """

    channel_map: ChannelMap
    owner: Labels
    rank: Labels
    sizes: list[int]

    @classmethod
    def of(cls, channel_map: ChannelMap, parts: list[GroupPart]) -> _Reading:
        owner, rank = np.full(channel_map.n_labels, -1), np.zeros(channel_map.n_labels, dtype=np.int64)
        for index, part in enumerate(parts):
            owner[part.labels], rank[part.labels] = index, np.arange(part.labels.size)
        return cls(channel_map, owner, rank, [part.labels.size for part in parts])

    def width(self, factor: Labels) -> tuple[int, list[_Lookup]]:
        """Return how many labels of a factor always stay, and the tables of those that parts decide on."""
        deciding = self.channel_map.deciding(factor.reshape(-1))
        one, other = deciding[0], deciding[-1]
        alone = self.owner[other] < 0  # such as 0, where one label decides
        one, other = np.where(self.owner[one] < 0, other, one), np.where(alone, one, other)
        stays = self.owner[one] < 0
        pairs = np.stack([one, other], axis=1)[~stays]
        return int(np.count_nonzero(stays)), list(self._lookups(pairs))

    def _lookups(self, pairs: Labels) -> Iterator[_Lookup]:
        owners = self.owner[pairs]
        for first, second in np.unique(owners, axis=0):
            here = pairs[(owners == (first, second)).all(axis=1)]
            shape = (self.sizes[first] + 1,) if first == second else (self.sizes[first] + 1, self.sizes[second] + 1)
            table = np.zeros(shape, dtype=np.int64)
            np.add.at(table, tuple(self.rank[here].T[: len(shape)] + 1), 1)
            for axis in range(len(shape)):
                table = np.cumsum(table, axis=axis)
            yield _Lookup((int(first), int(second)), table)
