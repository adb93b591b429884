"""What can be had at all: the least that any plan leaves of each budget, and what is said where that is too much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from prunekit.channels import ChannelMap
from prunekit.channels.labels import Labels
from prunekit.errors import PlanError
from prunekit.planning.budgets import Budgets, asked_for, budgets_of, in_words
from prunekit.planning.latency import LatencyTable
from prunekit.planning.select import Part, Scores, free_parts
from prunekit.planning.settings import LATENCIES, SHARES, PruneSettings
from prunekit.planning.terms import Numbers

LIMITS = ("exclude", "ratios", "min_channels", "round_to")
SWEEPS = 4
"""Over all parts, where the narrowest plan may not be the fastest."""
NOTHING_FREE = "no channel is free: all are locked or excluded; `prunekit inspect` lists the reasons"


def least_left(
    channel_map: ChannelMap, settings: PruneSettings, latency: LatencyTable | None = None
) -> dict[str, float]:
    """The least that any plan leaves of each budget that is given, in the units of `Budgets`.

    Raises:
        PlanError: nothing is free, or a glob matches no module.
    """
    parts = free_parts(channel_map, np.zeros(channel_map.n_labels), settings)
    if not parts:
        raise PlanError(NOTHING_FREE)
    budgets = budgets_of(channel_map, parts, settings, latency)
    return dict(zip(budgets.names, least_of(parts, budgets).tolist(), strict=True))


def require_met_untimed(channel_map: ChannelMap, settings: PruneSettings) -> None:
    """Checks that every budget can be met that needs no latency table.

    Raises:
        PlanError: one cannot; or nothing is free, or a glob matches no module.
    """
    wanted = replace(settings, budget=replace(settings.budget, **dict.fromkeys(LATENCIES)))
    if asked_for(wanted.budget):
        scores = np.zeros(channel_map.n_labels)
        parts = free_parts(channel_map, scores, wanted)
        check_met(channel_map, scores, parts, budgets_of(channel_map, parts, wanted), wanted)


def check_met(
    channel_map: ChannelMap,
    scores: Scores,
    parts: list[Part],
    budgets: Budgets,
    settings: PruneSettings,
    latency: LatencyTable | None = None,
) -> None:
    """Checks that every budget can be met.

    Raises:
        PlanError: one cannot; of each budget that is out of reach the best that can be had, and what stands in its
            way.
    """
    least = least_of(parts, budgets)
    missed = [index for index in range(least.size) if least[index] > budgets.asked[index]]
    if not missed:
        return
    texts = []
    for index in missed:
        name, asked = budgets.names[index], float(budgets.asked[index])
        without = "".join(_in_the_way(channel_map, scores, settings, index, asked, latency))
        most, no_less = ("at least", "no more") if name == "speedup" else ("at most", "no less")
        of_dense = " of the dense model" if name in SHARES else " (predicted)" if name in LATENCIES else ""
        texts.append(
            f"budget {name}: {most} {in_words(name, asked)} was asked for, but locks, exclusions, ratios, "
            f"min_channels and round_to leave {no_less} than {in_words(name, float(least[index]))}{of_dense}{without}"
        )
    raise PlanError(f"{'; '.join(texts)}; raise the budget or relax these")


def _in_the_way(
    channel_map: ChannelMap,
    scores: Scores,
    settings: PruneSettings,
    index: int,
    asked: float,
    latency: LatencyTable | None,
) -> Iterator[str]:
    """The limits of which each alone makes a budget impossible, with what could be had without it."""
    for limit in LIMITS:
        without: dict[str, Any] = {limit: getattr(PruneSettings(), limit)}
        relaxed = replace(settings, **without)
        if relaxed != settings:
            parts = free_parts(channel_map, scores, relaxed)
            budgets = budgets_of(channel_map, parts, relaxed, latency)
            least = float(least_of(parts, budgets)[index])
            if least <= asked:
                yield f" (it contradicts {limit}, without which {in_words(budgets.names[index], least)} can be had)"


def least_of(parts: list[Part], budgets: Budgets) -> Numbers:
    """The least of each budget that any plan leaves: (budgets,)."""
    return np.array([budgets.left(counts)[index] for index, counts in enumerate(cheapest(parts, budgets))])


def cheapest(parts: list[Part], budgets: Budgets) -> list[Labels]:
    """For each budget the counts that leave the least of it.

    The narrowest, unless another kernel takes less time for a wider part: then what no part alone makes less.
    """
    found = []
    for index in range(len(budgets.names)):
        counts = np.array([part.counts[0] for part in parts])
        for _ in range(SWEEPS if any(budgets.turns) else 0):
            before = counts.copy()
            for number, part in enumerate(parts):
                trials = np.repeat(counts[None], part.counts.size, axis=0)
                trials[:, number] = part.counts
                counts = trials[int(np.argmin(budgets.left(trials)[:, index]))]
            if np.array_equal(before, counts):
                break
        found.append(counts)
    return found
