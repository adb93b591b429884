"""Widths that all blocks of a decoder share: which a configuration can say, and which of them a budget buys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.channels.trace import traced_map
from prunekit.channels.tracing.channel_map import ChannelGroup, ChannelMap, Keep
from prunekit.channels.trial.trial import run_trial
from prunekit.compaction.compact_model import compact
from prunekit.errors import ModelError, PlanError, raised_as
from prunekit.hooks.model_copy import named_tensors
from prunekit.models.hugging_face import Changes, ConfigSearch
from prunekit.planning.plan import Plan
from prunekit.pruning.blocks.decoder import WHOLE, Decoder, without_weights
from prunekit.pruning.library_layout import is_close, kept_counts
from prunekit.utils.display import count

MULTIPLES = (16, 8, 4, 2, 1)
"""Widths become multiples of the first of these that is at most a sixteenth of them, as kernels are faster then."""
Widths = Mapping[str, int]
"""Channels that groups keep, by the group's name."""


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """The channel map of a block, and the groups whose widths a configuration of the decoder's class can say."""

    decoder: Decoder
    search: ConfigSearch
    channel_map: ChannelMap
    names: tuple[str, ...] = ()  # of these groups

    @classmethod
    def of(cls, decoder: Decoder, short: Tensor) -> BlockLayout:
        """Trace the first block on a few hidden states, (2, T, D), and try it with all free groups at about half."""
        block = decoder.block(0)
        alone = f"{decoder.path}.0: expected a block that takes any number of windows: "
        with raised_as(ModelError, alone, WHOLE), torch.no_grad():
            if not is_close(block(short), torch.cat([block(short[:1]), block(short[1:])])):
                raise ValueError("two together give something else than one by one")
        chart, half = traced_map(block, [(short,)], None), dict[str, int]()
        layout = cls(decoder, ConfigSearch(decoder.model, decoder.config), chart)
        for group in chart.groups:
            allowed = layout._allowed(group)
            one = {group.name: allowed[(len(allowed) - 1) // 2]}
            if len(allowed) > 1 and next(layout._fitting(Plan(chart, kept_by(chart, one))), None) is not None:
                half |= one
        if not half:
            raise PlanError(f"{type(decoder.model).__name__}: its configuration says no width of its blocks{WHOLE}")
        settled = run_trial(block, chart, lambda chart: kept_by(chart, half), [(short,)])
        return replace(layout, channel_map=settled.channel_map, names=tuple(half))

    @property
    def groups(self) -> list[ChannelGroup]:
        """The free groups."""
        return [group for group in self.channel_map.groups if group.name in self.names]

    def changes(self, block: nn.Module, plan: Plan, short: Tensor) -> Changes | None:
        """Return entries of a configuration whose blocks compute what the compact first block does; None without."""
        for changes in self._fitting(plan):
            if self.agrees(self.built(changes), 0, compact(block, plan), short):
                return changes
        return None

    def built(self, changes: Changes) -> Any:
        """Return the decoder that the class builds of another configuration, without values."""
        return without_weights(lambda: self.search.cls(self.search.made(changes)))

    def agrees(self, built: Any, index: int, small: nn.Module, short: Tensor) -> bool:
        """Return whether a block of what the class builds computes what a compact one does."""
        plain = self.decoder.block(index, built, dict(named_tensors(small)))
        with torch.no_grad():
            return is_close(small(short), plain(short))

    def _fitting(self, plan: Plan) -> Iterator[Changes]:
        wanted = dict(self.search.dense)
        for index in range(self.decoder.count):
            names = self.decoder.names(index)
            wanted |= {names[own]: shape for own, shape in plan.narrow_shapes.items() if own in names}
        yield from self.search.fitting(wanted, kept_counts(plan.channel_map, plan.keep))

    def within(self, budget: float, errors: Sequence[Mapping[str, Any]]) -> list[Widths]:
        """Return widths within a number of parameters of the decoder, those first at which blocks lose least.

        `errors` has of each block and group the error after each removal, over the variance of the stream.
        """
        *others, widest = sorted(self.groups, key=lambda group: group.labels.size)
        totals = {name: np.concatenate([[0.0], np.sum([one[name] for one in errors], axis=0)]) for name in errors[0]}
        found: list[tuple[float, dict[str, int]]] = []
        for counts in product(*map(self._allowed, others)):
            widths = self._widest(dict(zip((group.name for group in others), counts, strict=True)), widest, budget)
            if self.parameters(widths) <= budget:
                lost = (totals[group.name][group.labels.size - widths[group.name]] for group in self.groups)
                found.append((float(sum(lost)), dict(widths)))
        return [widths for _, widths in sorted(found, key=lambda one: one[0])]

    def _widest(self, widths: Widths, group: ChannelGroup, budget: float) -> Widths:
        """Return widths with that of one more group: the largest within the budget, or else the least of all."""
        every = [{**widths, group.name: width} for width in reversed(self._allowed(group))]
        return next((one for one in every if self.parameters(one) <= budget), every[-1])

    def most_gone(self, budget: float) -> dict[str, int]:
        """Return how many channels of each group may go at most: of the widest none need where others go instead.

        Raises:
            PlanError: the narrowest blocks have too many parameters.
        """
        narrowest = self.parameters({group.name: self._allowed(group)[0] for group in self.groups})
        if narrowest > budget:
            dense = self.decoder.parameters
            raise PlanError(
                f"params: expected at least {np.ceil(1000 * narrowest / dense) / 1000}: {count(narrowest)} of "
                f"{count(dense)} parameters are embeddings, and what no configuration makes narrower"
            )
        *others, widest = sorted(self.groups, key=lambda group: group.labels.size)
        least = {group.name: self._allowed(group)[0] for group in others} | dict(self._widest({}, widest, budget))
        return {group.name: group.labels.size - least[group.name] for group in self.groups}

    def parameters(self, widths: Widths) -> int:
        """Return the number of parameters of the whole decoder at some widths."""
        chart = self.channel_map
        whole, left = (chart.parameters_kept(kept_by(chart, one), chart.shapes) for one in ({}, widths))
        return self.decoder.parameters - self.decoder.count * (whole - left)

    def _allowed(self, group: ChannelGroup) -> list[int]:
        """Return the widths that a group may have, the whole one last."""
        index, size = self.channel_map.groups.index(group), group.labels.size
        wide = next(one for one in MULTIPLES if one == 1 or (size % one == 0 and 16 * one <= size))
        step = int(np.lcm(wide, self.channel_map.steps[index]))
        return [one for one in range(step, size, step) if one >= self.channel_map.least[index]] + [size]


def kept_by(chart: ChannelMap, widths: Widths, orders: Mapping[str, Any] | None = None) -> Keep:
    """Return what stays if groups keep as many channels: the last ones of an order of removal, or else the first."""
    keep = np.ones(chart.n_labels, dtype=bool)
    for group in chart.groups:
        size = group.labels.size
        if gone := size - widths.get(group.name, size):
            order = np.arange(size)[::-1] if orders is None else orders[group.name]
            keep[group.labels[order[:gone]]] = False
    return chart.completed(keep)
