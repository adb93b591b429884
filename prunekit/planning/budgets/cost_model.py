"""Costs of a choice of widths: sums of products of widths, exact and vectorized over choices.

A `Term` is one such product. In it a width may count in steps, and a product only within spans of widths.
`cost_model` compiles the terms of all budgets into a `CostModel`, which maps counts to costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.channel_map import ChannelMap

Numbers = NDArray[np.float64]
Counting = tuple[int, float, float, bool]
"""How a width counts: the step that it is rounded up to, the range in which it counts (the end excluded), and whether
it counts as 1 there instead of by its size."""


@dataclass(frozen=True, eq=False)
class GroupPart:
    """Labels of one channel group that are planned together."""

    labels: Labels  # from the most to the least important, so that keeping k means `labels[:k]`
    counts: Labels  # numbers of labels that may be kept, ascending; the last keeps all
    channels: int  # how many channels one label stands for; more than 1 where whole convolution groups are coupled
    # how many labels are kept or removed at once, one or more of each of several groups of equal widths
    together: int = 1

    def at_most(self, wanted: float) -> int:
        """Return the largest allowed count of at most `wanted`; the smallest count if there is none."""
        index = int(np.searchsorted(self.counts, wanted + 1e-9, side="right")) - 1
        return int(self.counts[max(index, 0)])


@dataclass(frozen=True, eq=False)
class Span:
    """A range of widths in which a term counts, because kernels are chosen by widths."""

    factor: Labels  # labels of the width, in the same numbering as those of the term
    # low, high: the range; `high` is not in it
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Term:
    """A constant times the widths of its factors: how many labels of each are kept.

    Attributes:
        constant: factor of the product of the widths.
        factors: arrays of labels, such as those of a layer's inputs and outputs; empty: the term is constant.
        steps: for each factor, the step that its width is rounded up to; empty: widths are not rounded.
        spans: the term is 0 unless the widths lie in all of them.

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
    def widths(self) -> Iterator[tuple[Labels, Counting]]:
        """The factors and the spans, and how each counts: a span as 1 or 0."""
        for factor, step in zip(self.factors, self.steps or (1,) * len(self.factors), strict=True):
            yield factor, (step, 0.0, np.inf, False)
        for span in self.spans:
            yield span.factor, (1, span.low, span.high, True)


def entries(channel_map: ChannelMap, name: str) -> Term:
    """Count the entries of a tensor of the model."""
    axes = list(zip(channel_map.shapes[name], channel_map.labels[name], strict=True))
    whole = np.prod([size for size, labels in axes if labels is None], dtype=np.float64)
    factors = tuple(labels for _, labels in axes if labels is not None)
    lost = any(branch.loses(name) for branch in channel_map.branches.found)
    present = presence(channel_map, name.rpartition(".")[0], factors) if lost else ()
    return Term(float(whole), factors, spans=present)


def presence(channel_map: ChannelMap, module: str, factors: Sequence[Labels]) -> tuple[Span, ...]:
    """Return the condition that a module is there, as a span of widths; none if it stays, or if a factor tells."""
    labels = channel_map.present_with(module) if channel_map.branches.found else None
    if labels is None or any(np.isin(factor, labels).all() for factor in factors):
        return ()
    return (Span(labels, 1, np.inf),)


def round_up(width: Any, step: Any) -> Any:
    """Return a width, or an array of them, rounded up to the next multiple of a step."""
    return -(-width // step) * step


def _counted(width: Any, step: Any, low: Any, high: Any, as_one: Any) -> Any:
    """Return the factor that a width stands for, or each of an array of them; see `Counting`."""
    within = (low <= width) & (width < high)
    return np.where(within, np.where(as_one, 1.0, round_up(width, step)), 0.0)


_Lookup = tuple[tuple[int, ...], Labels]
"""Indices of parts, and how many labels of a factor are kept by their counts: (size + 1,) for one part, and as many
axes as there are parts if labels are joint."""


@dataclass(frozen=True, eq=False)
class _Width:
    """A factor's width: the number of labels that always stay, tables for the others, and how it counts."""

    fixed: int
    lookups: list[_Lookup]
    counting: Counting


@dataclass(frozen=True, eq=False)
class CostModel:
    """Costs of choices of counts, for several resources at once.

    A cost is a sum of products of widths, each rounded up to its step. A width is a sum of table entries, one for each
    part that it depends on, so labels that occur several times on an axis, or are joint, are counted as often. A span
    of widths is one more factor, which is 0 or 1.
    """

    tables: Labels  # (entries,) the tables of all lookups, concatenated
    at: Labels  # (lookups,) where each table begins
    parts: Labels  # (most, lookups) the parts whose counts index a table; any where a table has fewer
    strides: Labels  # (most, lookups) of their counts; 0 where a table has fewer
    starts: Labels  # (widths,) the first lookup of each width
    fixed: Labels  # (widths,) the number of labels of each width that always stay
    counting: Numbers  # (4, widths) the numbers of each width's `Counting`
    factors: Labels  # (terms, most factors) indices of widths, one beyond the last as padding
    constants: Numbers  # (terms, resources)
    base: Numbers  # (resources,) what depends on no part
    together: Labels  # (parts,) counts are multiples of these, and tables are indexed by how often

    def of(self, resources: Labels) -> CostModel:
        """Return the costs of some of the resources."""
        return replace(self, constants=self.constants[:, resources], base=self.base[resources])

    @property
    def non_monotonic(self) -> bool:
        """True if terms have spans that end, so that costs may fall as widths grow."""
        return bool((self.counting[3] * np.isfinite(self.counting[2])).any())

    def breakpoints(self, sizes: Sequence[int]) -> list[set[int]]:
        """Return the counts of each part at which a span begins or ends, if it depends on no other part."""
        found: list[set[int]] = [set() for _ in sizes]
        several = np.diff(np.append(self.starts, self.at.size))
        for width in np.flatnonzero((self.counting[3] > 0) & (self.counting[1] > 1) & (several == 1)):
            lookup = self.starts[width]
            part = self.parts[0, lookup]
            if not self.strides[1:, lookup].any():
                steps = sizes[part] // self.together[part]
                kept = self.fixed[width] + self.tables[self.at[lookup] :][: steps + 1]
                firsts = np.searchsorted(kept, self.counting[1:3, width])
                found[part] |= {int(count * self.together[part]) for count in firsts if 0 < count <= steps}
        return found

    def __call__(self, counts: Labels) -> Numbers:
        """Return the costs (..., resources) of counts (..., parts), as whole numbers."""
        flat = counts.reshape(-1, counts.shape[-1]) // self.together
        if not self.starts.size:
            return np.broadcast_to(np.rint(self.base), (*counts.shape[:-1], self.base.size))
        places = self.at + sum(flat[:, part] * stride for part, stride in zip(self.parts, self.strides, strict=True))
        kept = self.tables[places]
        widths = self.fixed + np.add.reduceat(kept, self.starts, axis=1)
        spans = self.counting[3].any()
        widths = _counted(widths, *self.counting) if spans else round_up(widths, self.counting[0])
        widths = np.concatenate([widths, np.ones_like(widths[:, :1])], axis=1)
        products = widths[:, self.factors].prod(axis=2)
        result: Numbers = np.rint(products @ self.constants + self.base)
        return result.reshape(*counts.shape[:-1], self.base.size)


def cost_model(channel_map: ChannelMap, parts: list[GroupPart], resources: list[list[Term]]) -> CostModel:
    """Compile terms of several resources into tables over the parts' counts."""
    owner = np.full(channel_map.n_labels, -1)  # index of the part that decides on a label, -1 for those that stay
    # a label is kept if its part keeps more labels than this, in multiples of those kept at once
    rank = np.zeros(channel_map.n_labels, dtype=np.int64)
    for index, part in enumerate(parts):
        owner[part.labels], rank[part.labels] = index, np.arange(part.labels.size) // part.together
    sizes = [part.labels.size // part.together for part in parts]
    number: dict[tuple[bytes, Counting], int] = {}
    found: list[_Width] = []
    rows: dict[tuple[int, ...], Numbers] = {}
    for resource, terms in enumerate(resources):
        for term in terms:
            constant, free = term.constant, []
            for factor, counting in term.widths:
                index = number.setdefault((factor.tobytes(), counting), len(found))
                if index == len(found):
                    found.append(_Width(*_tables(channel_map, owner, rank, sizes, factor), counting))
                width = found[index]
                constant *= 1 if width.lookups else float(_counted(width.fixed, *counting))
                free += [index] if width.lookups else []
            row = rows.setdefault(tuple(sorted(free)), np.zeros(len(resources)))
            row[resource] += constant
    return _compiled(found, rows, len(resources), np.array([part.together for part in parts], dtype=np.int64))


def _compiled(
    found: list[_Width], rows: Mapping[tuple[int, ...], Numbers], resources: int, together: Labels
) -> CostModel:
    used = sorted({index for row in rows for index in row})
    place = {index: position for position, index in enumerate(used)}
    lookups = [lookup for index in used for lookup in found[index].lookups]
    most = max((len(row) for row in rows), default=0)
    terms = {row: constants for row, constants in rows.items() if row}
    factors = np.full((len(terms), most), len(used), dtype=np.int64)
    for i, row in enumerate(terms):
        factors[i, : len(row)] = [place[index] for index in row]
    sizes = [table.size for _, table in lookups]
    several = max((table.ndim for _, table in lookups), default=1)
    parts, strides = (np.zeros((several, len(lookups)), dtype=np.int64) for _ in range(2))
    for i, (owners, table) in enumerate(lookups):
        parts[: table.ndim, i] = owners
        strides[: table.ndim, i] = np.array(table.strides) // table.itemsize
    return CostModel(
        tables=np.concatenate([table.reshape(-1) for _, table in lookups] or [np.zeros(0, dtype=np.int64)]),
        at=np.cumsum([0, *sizes[:-1]]) if sizes else np.zeros(0, dtype=np.int64),
        parts=parts,
        strides=strides,
        starts=np.cumsum([0, *(len(found[index].lookups) for index in used)], dtype=np.int64)[:-1],
        fixed=np.array([found[index].fixed for index in used], dtype=np.int64),
        counting=np.array([found[index].counting for index in used], dtype=np.float64).reshape(-1, 4).T,
        factors=factors,
        constants=np.array(list(terms.values())).reshape(len(terms), resources),
        base=rows.get((), np.zeros(resources)),
        together=together,
    )


def _tables(
    channel_map: ChannelMap, owner: Labels, rank: Labels, sizes: list[int], factor: Labels
) -> tuple[int, list[_Lookup]]:
    """Return how many labels of a factor always stay, and tables of the others."""
    deciding = np.stack(channel_map.deciding(factor.reshape(-1)), axis=1)
    stays = (owner[deciding] < 0).all(axis=1)
    deciding, found = deciding[~stays], list[_Lookup]()
    owners = owner[deciding]  # -1 such as for 0, where fewer labels decide
    for every in np.unique(owners, axis=0):
        kinds = np.flatnonzero(every >= 0)
        parts = tuple(every[kinds].tolist())
        here = deciding[(owners == every).all(axis=1)][:, kinds]
        table = np.zeros([sizes[part] + 1 for part in parts], dtype=np.int64)
        np.add.at(table, tuple(rank[here].T + 1), 1)
        for axis in range(len(parts)):
            table = np.cumsum(table, axis=axis)
        found.append((parts, np.ascontiguousarray(table)))
    return int(np.count_nonzero(stays)), found
