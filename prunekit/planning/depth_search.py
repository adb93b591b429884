"""The choice of blocks that go, together with the widths of what stays.

A block that goes is one more way to spend a budget: it costs the error that it leaves, and saves all of its time. Which
of them go is searched greedily, by error per saving, and for each set the widths of the others are solved as usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np

from prunekit.channels.channel_map import ChannelMap
from prunekit.channels.labels import Labels
from prunekit.planning.budgets.limits import Budgets
from prunekit.planning.candidates import UNBOUNDED, GroupPart, PlanBounds, Scores, labels_matching
from prunekit.planning.width_search import KeptScores
from prunekit.settings.prune import PruneSettings, facts_of

TRIED = 3
"""How many of the cheapest blocks are tried, each with all widths solved again, before the best of them goes."""
PATIENCE = 3
"""After so many blocks that went and kept less, the search ends."""
Solve = Callable[[list[GroupPart]], Labels | None]
"""Counts of parts within the budgets; None if there are none."""


@dataclass(frozen=True, eq=False)
class Block:
    """A branch that may go.

    Attributes:
        name: of the branch.
        stage: its neighbors have the same; of each stage some may have to stay.
        parts: indices of its parts.
        error: what is lost if it goes, in units of the scores.
    """

    name: str
    stage: str
    parts: tuple[int, ...]
    error: float


def blocks_of(
    channel_map: ChannelMap,
    parts: Sequence[GroupPart],
    scores: Scores,
    settings: PruneSettings,
    bounds: PlanBounds = UNBOUNDED,
) -> list[Block]:
    """Return the blocks that a plan may remove; none unless `settings.blocks_may_go`.

    The error of a block is that of removing all channels that its last layer reads: earlier layers then compute
    nothing that is read.
    """
    if not settings.blocks_may_go or not channel_map.branches.found:
        return []
    stays = labels_matching(channel_map, settings.ignore, "ignore")
    stays |= labels_matching(channel_map, list(settings.ratios), "ratios")
    stays |= False if bounds.least is None else bounds.least
    stays[0] = False
    owner = np.full(channel_map.n_labels, -1)
    for index, part in enumerate(parts):
        owner[part.labels] = index
    finite = np.where(np.isfinite(scores), scores, 0.0)
    found = []
    for branch in channel_map.branches.found:
        if not stays[branch.labels].any() and (owner[branch.labels] >= 0).all():
            own = tuple(np.unique(owner[branch.labels]).tolist())
            found.append(Block(branch.name, stage_of(branch.name), own, float(finite[branch.last].sum())))
    return found


def stage_of(name: str) -> str:
    """Return the path around the blocks of a stage: that before the last part of a name that ends with a number.

    Example:
        >>> stage_of("layer3.1"), stage_of("encoder.layers.encoder_layer_0.mlp")
        ('layer3', 'encoder.layers')
    """
    parts = name.partition("#")[0].split(".")
    unnumbered = list(takewhile(lambda part: not part[-1:].isdigit(), reversed(parts)))
    return ".".join(parts[: -len(unnumbered) - 1])


def without_blocks(parts: Sequence[GroupPart], gone: Sequence[Block]) -> list[GroupPart]:
    """Return the parts, those of some blocks with no channel."""
    closed = {index for block in gone for index in block.parts}
    none = np.zeros(1, dtype=np.int64)
    return [replace(part, counts=none) if index in closed else part for index, part in enumerate(parts)]


def all_that_may_go(blocks: Sequence[Block], settings: PruneSettings) -> list[Block]:
    """Return as many blocks of each stage as may go together, those with the least error."""
    left = Counter(block.stage for block in blocks)
    found = []
    for block in sorted(blocks, key=lambda one: one.error):
        if left[block.stage] > settings.min_blocks:
            left[block.stage] -= 1
            found.append(block)
    return found


def chosen_blocks(
    parts: list[GroupPart],
    blocks: list[Block],
    worth: KeptScores,
    budgets: Budgets,
    settings: PruneSettings,
    solve: Solve,
) -> tuple[list[Block], Labels | None]:
    """Return the blocks that go, and counts of all parts: those that keep most of the scores within the budgets.

    Args:
        parts: that a plan may prune.
        blocks: that may go.
        worth: what counts keep.
        budgets: that are to be met.
        settings: how few blocks stay, and whether blocks go where they need not.
        solve: chooses widths.
    """
    search = _BlockSearch(parts, blocks, worth, budgets, settings, solve)
    counts = solve(parts)
    timed = any(facts_of(name).measured for name in settings.budget.given)
    if not blocks or (counts is not None and settings.depth == "auto" and not timed):
        return [], counts
    return search.run(counts)


class _BlockSearch:
    def __init__(
        self,
        parts: list[GroupPart],
        blocks: list[Block],
        worth: KeptScores,
        budgets: Budgets,
        settings: PruneSettings,
        solve: Solve,
    ) -> None:
        self.parts, self.blocks, self.worth = parts, blocks, worth
        self.budgets, self.settings, self.solve = budgets, settings, solve
        own = {block: float(sum(worth.kept[index][-1] for index in block.parts)) for block in blocks}
        self.spared = {block: own[block] - min(block.error, own[block]) for block in blocks}

    def value(self, gone: Sequence[Block], counts: Labels) -> float:
        """Return what is kept of the scores: a block that goes loses its error, not the scores of all its groups."""
        return self.worth(counts) + sum(self.spared[block] for block in gone)

    def run(self, counts: Labels | None) -> tuple[list[Block], Labels | None]:
        """Return the best blocks and counts, from those without any block gone."""
        best: tuple[float, list[Block], Labels] | None = None
        if counts is not None:
            best = self.value([], counts), [], counts
        gone, now, worse = list[Block](), counts, 0
        while worse < PATIENCE and (candidates := self._candidates(gone, now)):
            tried = [(block, self.solve(without_blocks(self.parts, [*gone, block]))) for block in candidates]
            fitting = [(self.value([*gone, block], found), block, found) for block, found in tried if found is not None]
            if fitting:
                value, block, now = max(fitting, key=lambda one: one[0])
            else:
                block, now = candidates[0], None
            gone = [*gone, block]
            if now is not None and (best is None or value > best[0]):
                best, worse = (value, gone, now), 0
            elif best is not None:
                worse += 1
        return self._restored(best) if best is not None else ([], None)

    def _restored(self, best: tuple[float, list[Block], Labels]) -> tuple[list[Block], Labels]:
        """Return the best choice after putting back blocks, or exchanging them, as long as that keeps more."""
        value, gone, counts = best
        for block in list(gone):
            others = [one for one in gone if one is not block]
            swaps = [[]] if not others else [[], *([one] for one in self._candidates(others, counts) if one is not block)]
            for more in swaps:
                found = self.solve(without_blocks(self.parts, [*others, *more]))
                if found is not None and (now := self.value([*others, *more], found)) > value:
                    value, gone, counts = now, [*others, *more], found
                    break
        return gone, counts

    def _candidates(self, gone: Sequence[Block], counts: Labels | None) -> list[Block]:
        """Return the blocks that may go next, those with the least error for what they save first."""
        left = Counter(block.stage for block in self.blocks if block not in gone)
        able = [block for block in self.blocks if block not in gone and left[block.stage] > self.settings.min_blocks]
        if not able:
            return []
        narrowest = np.array([part.counts[0] for part in without_blocks(self.parts, gone)])
        now = narrowest if counts is None else counts
        trials = np.repeat(now[None], len(able), axis=0)
        for row, block in zip(trials, able, strict=True):
            row[list(block.parts)] = 0
        saved = ((self.budgets.left(now) - self.budgets.left(trials)) / self.budgets.asked).max(axis=1)
        kept = np.array([sum(self.worth.kept[index][now[index]] for index in block.parts) for block in able])
        lost = np.maximum(kept - np.array([self.spared[block] for block in able]), 0.0)
        price = lost / np.maximum(saved, 1e-12)
        return [able[index] for index in np.argsort(price, kind="stable")[:TRIED]]
