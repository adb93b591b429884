"""The choice of blocks that go, together with the widths of what stays.

A block that goes is one more way to spend a budget: it costs the error that it leaves, and saves all of its time. At
prices p of the limits, block b with parts i in b, which have their best counts k at these prices, goes if

    p (cost with b - cost without b)  >  sum_(i in b) kept_i(k_i) - (all scores of b - error of b)
    ───────────── saved ────────────     ─────────────────────── lost by its absence ───────────────

Lagrange multipliers choose blocks and widths at once (Everett 1963). Each price on the way of the bisection gives a set
of blocks:

    prices ──> sets of blocks ──> the best `TRIED` sets ──> widths of the others solved as usual ──> the best set
                                                            ──> changed by one or two blocks while that keeps more

1. At least `min_blocks` of each stage stay, in every set that is looked at.
2. A block that goes loses its error, which is that of its last layer's inputs, not the scores of all of its channels.
3. Blocks go only if that keeps more than the best widths with all blocks, unless no widths meet the budgets.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, takewhile

import numpy as np

from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.planning.budgets.budget import Budgets
from prunekit.planning.budgets.cost_model import GroupPart, Numbers
from prunekit.planning.candidates import UNBOUNDED, PlanBounds, Scores, labels_matching
from prunekit.planning.width_search import BISECTIONS, CHEAPEST, DEAREST, KeptScores, at_price, blends
from prunekit.settings.pruning import PruneSettings, facts_of

TRIED = 3
"""For how many of the best sets of blocks all widths are solved again."""
CLOSE = 6
"""How many of the blocks whose choice is closest are changed to improve a set."""
SWEEPS = 3
"""How often a set of blocks is improved at most."""
LEFT = 0.5
"""Share of a block's error that counts: the layers behind it, which repair fits to the dense stream, make up for more
of it than of many small errors. Of 0.25, 0.5 and 1, 0.5 kept the most of ResNet-56 at 2.6 and 3.3 times its speed."""
COMPARING = frozenset({"global", "per_mac"})
"""Scopes that compare the scores of different groups."""
Solve = Callable[[list[GroupPart]], Labels | None]
"""Counts of parts within the budgets; None if there are none."""


@dataclass(frozen=True, eq=False)
class Block:
    """A branch that may go."""

    name: str  # of the branch
    stage: str  # its neighbors have the same; of each stage some may have to stay
    parts: tuple[int, ...]  # indices of its parts
    error: float  # what is lost if it goes, in units of the scores


def blocks_of(
    channel_map: ChannelMap,
    parts: Sequence[GroupPart],
    scores: Scores,
    settings: PruneSettings,
    bounds: PlanBounds = UNBOUNDED,
) -> list[Block]:
    """Return the blocks that a plan may remove; none unless `settings.blocks_may_go`.

    The error of a block is that of removing all channels that its last layer reads, as earlier layers then compute
    nothing that is read, times `LEFT`.
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
            if any(parts[index].together > 1 for index in own):  # as wide as other layers, which then would go too
                continue
            found.append(Block(branch.name, stage_of(branch.name), own, float(LEFT * finite[branch.last].sum())))
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
    """Return the parts with no channel left in those of some blocks."""
    closed = {index for block in gone for index in block.parts}
    none = np.zeros(1, dtype=np.int64)
    return [replace(part, counts=none) if index in closed else part for index, part in enumerate(parts)]


def all_that_may_go(
    parts: Sequence[GroupPart], blocks: Sequence[Block], settings: PruneSettings, budgets: Budgets | None = None
) -> list[Block]:
    """Return as many blocks of each stage as may go together, those that save the most of the budgets."""
    saved = np.zeros(len(blocks))  # by each at its narrowest, as a share of the budgets
    if budgets is not None and blocks:
        narrowest = np.array([part.counts[0] for part in parts])
        less = budgets.limited(narrowest) - budgets.limited(_one_gone_each(narrowest, blocks))
        saved = (less / budgets.limits).sum(axis=-1)
    return _first_that_may_go(blocks, np.argsort(-saved, kind="stable"), settings)


def _first_that_may_go(blocks: Sequence[Block], order: Labels, settings: PruneSettings) -> list[Block]:
    """Return blocks in an order of their indices, without those that have to stay as the last of their stage."""
    left, found = Counter(block.stage for block in blocks), list[Block]()
    for index in order:
        block = blocks[index]
        if left[block.stage] > settings.min_blocks:
            left[block.stage] -= 1
            found.append(block)
    return found


def _one_gone_each(counts: Labels, blocks: Sequence[Block]) -> Labels:
    """Return the counts (blocks, parts) with one of the blocks gone in each row."""
    trials = np.repeat(counts[None], len(blocks), axis=0)
    for row, block in zip(trials, blocks, strict=True):
        row[list(block.parts)] = 0
    return trials


@dataclass(frozen=True, eq=False)
class BlockChoice:
    """Blocks that go, the counts of all parts, what is kept of the scores, and the blocks whose choice is closest."""

    value: float
    gone: tuple[Block, ...]
    counts: Labels
    close: tuple[Block, ...] = ()


def chosen_blocks(
    parts: list[GroupPart],
    blocks: list[Block],
    worth: KeptScores,
    budgets: Budgets,
    settings: PruneSettings,
    solve: Solve,
) -> Labels | None:
    """Return counts of all parts, none for blocks that go: those that keep most of the scores within the budgets.

    Blocks go where that keeps more, if `settings.depth` is True, or if a budget is one of time and the scope compares
    scores of different groups; else only where no widths are within the budgets.
    """
    counts = solve(parts)
    timed = any(facts_of(name).measured for name in settings.budget.given)
    wherever = settings.depth is True or (timed and settings.scope in COMPARING)
    if not blocks or (counts is not None and not wherever):
        return counts
    search = _BlockSearch(parts, blocks, worth, budgets, settings)
    tried = {one.gone: one for one in sorted(search.along_prices(), key=lambda one: one.value)}
    best = sorted(tried.values(), key=lambda one: one.value, reverse=True)[:TRIED]
    solved = [search.solved(one.gone, one.close, solve) for one in best]
    found = [one for one in solved if one is not None]
    found += [] if counts is None else [search.choice((), counts, best[0].close if best else ())]
    if settings.scope == "per_mac" or not found:  # in other scopes widths don't follow from prices
        found += best
    return search.improved(max(found, key=lambda one: one.value), solve).counts if found else None


class _BlockSearch:
    """Blocks at their best widths for prices of budgets; one goes if they keep less for the cost than its absence."""

    def __init__(
        self, parts: list[GroupPart], blocks: list[Block], worth: KeptScores, budgets: Budgets, settings: PruneSettings
    ) -> None:
        self.parts, self.blocks, self.worth, self.budgets, self.settings = parts, blocks, worth, budgets, settings
        own = [float(sum(worth.kept[index][-1] for index in block.parts)) for block in blocks]
        self.spared = np.array([all_of - min(block.error, all_of) for block, all_of in zip(blocks, own, strict=True)])

    def choice(self, gone: tuple[Block, ...], counts: Labels, close: tuple[Block, ...] = ()) -> BlockChoice:
        """Return a choice with its value: a block that goes loses its error, not the scores of all of its groups."""
        spared = sum(float(self.spared[index]) for index, block in enumerate(self.blocks) if block in gone)
        return BlockChoice(self.worth(counts) + spared, gone, counts, close)

    def solved(self, gone: tuple[Block, ...], close: tuple[Block, ...], solve: Solve) -> BlockChoice | None:
        """Return the choice without some blocks, with the best widths of the rest; None if no widths fit."""
        counts = solve(without_blocks(self.parts, gone))
        return None if counts is None else self.choice(gone, counts, close)

    def improved(self, best: BlockChoice, solve: Solve) -> BlockChoice:
        """Return a choice that no change of one or two of its closest blocks improves, or the last of some sweeps."""
        pairs = combinations(best.close[: CLOSE // 2], 2)
        changes = [{block} for block in best.close[:CLOSE]] + [set(pair) for pair in pairs]
        tried = {best.gone}
        for _ in range(SWEEPS):
            before = best
            for change in changes:
                gone = tuple(block for block in self.blocks if (block in best.gone) != (block in change))
                if gone not in tried and self._allowed(gone):
                    tried.add(gone)
                    other = self.solved(gone, best.close, solve)
                    best = other if other is not None and other.value > best.value else best
            if best is before:
                break
        return best

    def _allowed(self, gone: tuple[Block, ...]) -> bool:
        """Return whether enough blocks of each stage stay."""
        left = Counter(block.stage for block in self.blocks if block not in gone)
        return all(left[block.stage] >= self.settings.min_blocks for block in gone)

    def along_prices(self) -> Iterator[BlockChoice]:
        """Yield choices within the budgets, with some blocks gone, for prices of each budget and of blends of them."""
        several = np.bincount(self.budgets.owner, minlength=self.budgets.asked.size)
        for weights in blends(self.budgets.asked.size):
            direction = weights[self.budgets.owner] / several[self.budgets.owner] / self.budgets.limits
            low, high = CHEAPEST, DEAREST
            for _ in range(BISECTIONS):
                middle = (low + high) / 2
                found = self._at(self.worth.total * np.exp(middle) * direction)
                if self.budgets.fits(found.counts):
                    high = middle
                    if found.gone:
                        yield found
                else:
                    low = middle

    def _at(self, price: Numbers) -> BlockChoice:
        """Return the blocks that go at a price, and the counts of the others."""
        widest = np.array([part.counts[-1] for part in self.parts])
        counts = at_price(self.parts, self.worth, self.budgets, price, widest)
        saved = (self.budgets.limited(counts) - self.budgets.limited(_one_gone_each(counts, self.blocks))) @ price
        kept = np.array([sum(self.worth.kept[index][counts[index]] for index in block.parts) for block in self.blocks])
        gain = saved - (kept - self.spared)
        order = np.argsort(-gain, kind="stable")
        gone = _first_that_may_go(self.blocks, order[gain[order] > 0], self.settings)
        parts = without_blocks(self.parts, gone)
        start = np.array([part.at_most(count) for part, count in zip(parts, counts, strict=True)])
        ordered = tuple(block for block in self.blocks if block in gone)
        close = tuple(self.blocks[index] for index in np.argsort(np.abs(gain), kind="stable"))
        return self.choice(ordered, at_price(parts, self.worth, self.budgets, price, start), close)
