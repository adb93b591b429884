"""Budgets: what each of them counts, whether a choice of widths meets them all, and what is said if none can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from prunekit.channels import ChannelMap
from prunekit.channels.labels import Labels
from prunekit.errors import PlanError
from prunekit.planning.costs import Numbers, cost_model, terms_of
from prunekit.planning.select import Part, Scores, free_parts
from prunekit.planning.settings import SHARES, BudgetSettings, PruneSettings

COUNTED = {"channels": "channels", "macs": "macs", "params": "params", "size_mb": "bytes"}
"""What each budget counts."""
MB = 1e6
LIMITS = ("exclude", "ratios", "min_channels", "round_to")


@dataclass(frozen=True, eq=False)
class Budgets:
    """What a plan may cost, in the units of the budgets: shares of the dense model, and megabytes.

    Attributes:
        names: of the budgets that were asked for.
        asked: (budgets,) the most of each that may be left.
        dense: (budgets,) what the dense model has of each; 1 where it is a share.
        left: counts of the parts (..., parts) -> what they leave, (..., budgets).
    """

    names: tuple[str, ...]
    asked: Numbers
    dense: Numbers
    left: Callable[[Labels], Numbers]

    def fits(self, counts: Labels) -> Any:
        """Whether counts (..., parts) meet every budget: bool (...)."""
        return (self.left(counts) <= self.asked).all(axis=-1)

    def found(self, counts: Labels) -> dict[str, Any]:
        """For a plan's provenance: of each budget what was asked for and what is left, and the one that binds."""
        left = self.left(counts)
        each = {
            name: {"asked": float(asked), "left": float(value), "dense": float(dense)}
            for name, asked, value, dense in zip(self.names, self.asked, left, self.dense, strict=True)
        }
        return {"budgets": each, "binding": self.names[int(np.argmax(left / self.asked))]}


def asked_for(budget: BudgetSettings) -> dict[str, float]:
    """The budgets that are given."""
    return {name: value for name, value in asdict(budget).items() if value is not None}


def in_words(name: str, value: float) -> str:
    """A figure of a budget with its unit."""
    return f"{value:.4g}" if name in SHARES else f"{value:.4g} MB"


def budgets_of(channel_map: ChannelMap, parts: list[Part], settings: PruneSettings) -> Budgets:
    """The budgets of a job as functions of the parts' counts."""
    asked = asked_for(settings.budget)
    model = cost_model(channel_map, parts, [terms_of(channel_map, parts, COUNTED[name]) for name in asked])
    dense = model(np.array([part.labels.size for part in parts]))
    scale = np.array([whole if name in SHARES else MB for name, whole in zip(asked, dense, strict=True)])
    each_group = [index for index, name in enumerate(asked) if name == "channels" and settings.scope == "uniform"]
    worst = _worst(parts)

    def left(counts: Labels) -> Numbers:
        result: Numbers = model(counts) / np.maximum(scale, 1)
        for index in each_group:
            result[..., index] = worst(counts)
        return result

    return Budgets(tuple(asked), np.array(list(asked.values())), dense / np.maximum(scale, 1), left)


def _worst(parts: list[Part]) -> Callable[[Labels], Numbers]:
    """The largest share that a part keeps, of those that are not at their smallest: a share is asked of every group."""
    sizes = np.array([part.labels.size for part in parts])
    free = np.array([len(part.counts) > 1 for part in parts])
    floor = np.array([part.at_most(0) for part in parts]) / sizes

    def worst(counts: Labels) -> Numbers:
        share = counts / sizes
        most: Numbers = np.where(free & (share > floor), share, 0.0).max(axis=-1)
        return most

    return worst


def check_met(
    channel_map: ChannelMap, scores: Scores, parts: list[Part], budgets: Budgets, settings: PruneSettings
) -> None:
    """Checks that the narrowest plan meets every budget.

    Raises:
        PlanError: it does not; of each budget that is out of reach the best that can be had, and what stands in its
            way.
    """
    least = budgets.left(_fewest(parts))
    missed = [index for index in range(least.size) if least[index] > budgets.asked[index]]
    if not missed:
        return
    texts = []
    for index in missed:
        name, asked = budgets.names[index], float(budgets.asked[index])
        of_dense = " of the dense model" if name in SHARES else ""
        without = "".join(_in_the_way(channel_map, scores, settings, index, asked))
        texts.append(
            f"budget {name}: at most {in_words(name, asked)} was asked for, but locks, exclusions, ratios, "
            f"min_channels and round_to leave no less than {in_words(name, float(least[index]))}{of_dense}{without}"
        )
    raise PlanError(f"{'; '.join(texts)}; raise the budget or relax these")


def _in_the_way(
    channel_map: ChannelMap, scores: Scores, settings: PruneSettings, index: int, asked: float
) -> Iterator[str]:
    """The limits of which each alone makes a budget impossible, with what could be had without it."""
    for limit in LIMITS:
        without: dict[str, Any] = {limit: getattr(PruneSettings(), limit)}
        relaxed = replace(settings, **without)
        if relaxed != settings:
            parts = free_parts(channel_map, scores, relaxed)
            budgets = budgets_of(channel_map, parts, relaxed)
            least = float(budgets.left(_fewest(parts))[index])
            if least <= asked:
                yield f" (it contradicts {limit}, without which {in_words(budgets.names[index], least)} can be had)"


def _fewest(parts: list[Part]) -> Labels:
    return np.array([part.counts[0] for part in parts])
