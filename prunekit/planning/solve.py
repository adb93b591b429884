"""From scores and a budget to a plan: uniform over the groups or ranked globally, by channels or by MACs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, get_args

import numpy as np
import torch

from prunekit.channels import ChannelMap
from prunekit.channels.labels import Labels
from prunekit.channels.map import Keep
from prunekit.errors import NonFiniteError, PlanError, UsageError
from prunekit.planning.curves import per_mac
from prunekit.planning.plan import Plan
from prunekit.planning.select import Part, Scores, free_parts
from prunekit.planning.settings import PruneSettings, Scope

GRID = 4096
"""Steps of the uniform share that the search may choose from."""

ROUNDS = 3
"""How often a budget is spent per MAC: what a channel costs depends on its neighbours' widths in the plan before."""

Ladder = Callable[[int], Labels]
"""Step -> number of labels kept of each part; never fewer at a higher step."""


def make_plan(channel_map: ChannelMap, scores: Scores, settings: PruneSettings, *, seed: int = 0) -> Plan:
    """Chooses the labels to keep so that the budget is met and the kept scores are the highest.

    Args:
        channel_map: of the model.
        scores: one importance for each label, float (n_labels,); comparable between groups but for scope `uniform`.
        settings: budget, scope, rounding, exclusions and ratios.
        seed: noted in the plan; the solver itself draws nothing.

    Raises:
        PlanError: the budget cannot be met (the least possible is named), nothing would be removed, or a glob
            matches no module.
        NonFiniteError: a score is NaN.
        UsageError: a setting is out of range.
    """
    _check(settings)
    _check_scores(channel_map, scores)
    keep: Keep | None = None
    for _ in range(ROUNDS if settings.scope == "per_mac" else 1):
        ranked = per_mac(channel_map, scores, keep) if settings.scope == "per_mac" else scores
        keep = _chosen(channel_map, ranked, settings)
    assert keep is not None
    origin = {"prune": asdict(settings), "seed": seed, "prunekit": version("prunekit"), "torch": torch.__version__}
    return Plan(channel_map, keep, _plain(origin))


def _chosen(channel_map: ChannelMap, scores: Scores, settings: PruneSettings) -> Keep:
    parts = free_parts(channel_map, scores, settings)
    if not parts:
        raise PlanError("no channel is free: all are locked or excluded; `prunekit inspect` lists the reasons")
    ladder, top = _uniform(parts) if settings.scope == "uniform" else _global(parts, scores)
    cost, target, name = _cost(channel_map, parts, settings)
    least = cost(ladder(0))
    if least > target:
        raise PlanError(
            f"budget {name}: at most {target:.4g} was asked for, but locks, exclusions, ratios, min_channels and "
            f"round_to leave no less than {least:.4g} of the dense model; raise the budget or relax these"
        )
    low, high = 0, top
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(ladder(middle)) <= target else (low, middle - 1)
    counts = _fill(parts, ladder(low), lambda candidate: cost(candidate) <= target)
    keep = _keep(channel_map, parts, counts)
    if keep.all():
        raise PlanError(
            f"the plan removes nothing: budget {name} {target:.4g} leaves the whole model, or "
            f"round_to {settings.round_to} and min_channels {settings.min_channels} allow no smaller width"
        )
    return keep


def _check(settings: PruneSettings) -> None:
    budget = settings.budget
    if (budget.macs is None) == (budget.channels is None):
        raise UsageError("budget: expected exactly one of macs and channels, each the share that may be left")
    shares = {"macs": budget.macs, "channels": budget.channels} | {
        f"ratios[{k!r}]": v for k, v in settings.ratios.items()
    }
    problems = [
        f"{name}: expected a share above 0 and at most 1, got {share!r}"
        for name, share in shares.items()
        if share is not None and not (isinstance(share, (int, float)) and 0 < share <= 1)
    ]
    problems += [
        f"{name}: expected a whole number of at least 1, got {value!r}"
        for name, value in (("round_to", settings.round_to), ("min_channels", settings.min_channels))
        if not isinstance(value, int) or value < 1
    ]
    if settings.scope not in get_args(Scope):
        problems.append(f"scope: expected one of {', '.join(get_args(Scope))}, got {settings.scope!r}")
    if problems:
        raise UsageError("; ".join(problems))


def _check_scores(channel_map: ChannelMap, scores: Scores) -> None:
    if np.shape(scores) != (channel_map.n_labels,):
        raise PlanError(f"scores: expected one for each label, shape ({channel_map.n_labels},), got {np.shape(scores)}")
    bad = [group.name for group in channel_map.groups if np.isnan(scores[group.labels]).any()]
    if bad:
        raise NonFiniteError(f"scores: NaN in {', '.join(bad[:5])}; are the weights, or the statistics, finite there?")


def _plain(value: Any) -> Any:
    """Tuples as lists and version objects as text, so that a plan reads back equal to what was written."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value


def _keep(channel_map: ChannelMap, parts: list[Part], counts: Labels) -> Keep:
    keep = np.ones(channel_map.n_labels, dtype=bool)
    for part, count in zip(parts, counts, strict=True):
        keep[part.labels[count:]] = False
    return channel_map.completed(keep)


def _uniform(parts: list[Part]) -> tuple[Ladder, int]:
    """The same share of every part."""

    def ladder(step: int) -> Labels:
        return np.array([part.at_most(part.labels.size * step / GRID) for part in parts])

    return ladder, GRID


def _global(parts: list[Part], scores: Scores) -> tuple[Ladder, int]:
    """The highest scores of all parts together."""
    owner = np.concatenate([np.full(part.labels.size, index) for index, part in enumerate(parts)])
    ranked = owner[np.argsort(-np.concatenate([scores[part.labels] for part in parts]), kind="stable")]

    def ladder(step: int) -> Labels:
        wanted = np.bincount(ranked[:step], minlength=len(parts))
        return np.array([part.at_most(count) for part, count in zip(parts, wanted, strict=True)])

    return ladder, int(ranked.size)


def _cost(
    channel_map: ChannelMap, parts: list[Part], settings: PruneSettings
) -> tuple[Callable[[Labels], float], float, str]:
    """What a choice of counts costs as a share of the dense model, and how much it may."""
    budget = settings.budget
    if budget.macs is not None:
        dense = channel_map.macs()
        return lambda counts: channel_map.macs(_keep(channel_map, parts, counts)) / dense, budget.macs, "macs"
    sizes = np.array([part.labels.size for part in parts])
    weight = np.array([part.channels for part in parts])
    assert budget.channels is not None
    if settings.scope != "uniform":
        return lambda counts: float((weight * counts).sum() / (weight * sizes).sum()), budget.channels, "channels"
    free = np.array([len(part.counts) > 1 for part in parts])
    floor = np.array([part.at_most(0) for part in parts]) / sizes

    def worst(counts: Labels) -> float:
        above = (counts / sizes)[free & (counts / sizes > floor)]
        return float(above.max()) if above.size else 0.0

    return worst, budget.channels, "channels"


def _fill(parts: list[Part], counts: Labels, fits: Callable[[Labels], bool]) -> Labels:
    """Spends what rounding left over: one more step for each part that still fits, the most pruned part first."""
    share = [count / part.labels.size for part, count in zip(parts, counts, strict=True)]
    for index in np.argsort(share, kind="stable"):
        part = parts[index]
        if counts[index] < part.counts[-1]:
            candidate = counts.copy()
            candidate[index] = part.at_least(int(counts[index]) + 1)
            if fits(candidate):
                counts = candidate
    return counts
