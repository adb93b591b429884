"""The methods of `latency_frontier.py`: what each turns until a network is as fast as asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from latency_networks import Case as Timed
from oneshot_methods import Case, cut

from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.compaction.compact_model import compact
from prunekit.data.local_files import LabeledArrays
from prunekit.errors import PlanError
from prunekit.planning.candidates import Scores
from prunekit.planning.plan import Plan
from prunekit.planning.solver import make_plan
from prunekit.settings.pruning import BudgetSettings, PruneSettings

METHODS = "time-elimination,macs-elimination,time-l2,macs-l2,tp-l2"
SHARES, HALVINGS = 16, 8
LEAST = 0.02
"""Of MACs or channels."""


@dataclass(frozen=True, eq=False)
class Bench:
    """What all methods have in common: the network, its images, its profile, and the importance of its channels."""

    case: Case
    timed: Timed
    scores: dict[str, Scores]
    test: LabeledArrays

    def plan(self, criterion: str, settings: PruneSettings) -> Plan:
        """The plan of prunekit for some budgets."""
        chart, table = self.timed.channel_map, self.timed.profiled.table
        return make_plan(chart, self.scores[criterion], settings, latency=table)

    def speedup(self, plan: Plan) -> float:
        """Of a plan, predicted."""
        table = self.timed.profiled.table
        return table.at(plan.channel_map) / table.at(plan.channel_map, plan.keep)


Chooser = Callable[[Bench, PruneSettings], Plan]


def by_time(bench: Bench, settings: PruneSettings, criterion: str) -> Plan:
    """Budget: the time."""
    return bench.plan(criterion, settings)


def by_macs(bench: Bench, settings: PruneSettings, criterion: str) -> Plan:
    """Budget: the MACs with which the time is met."""
    return turned(bench, settings, lambda share: bench.plan(criterion, replace(settings, budget=macs_of(share))))


def by_torch_pruning(bench: Bench, settings: PruneSettings) -> Plan:
    """Torch-pruning's ratio of channels with which the time is met, as a plan."""

    def plan(share: float) -> Plan:
        model = cut(bench.case, "tp-l2", 1 - share, {})
        return plan_of(bench.timed.channel_map, bench.case.dense, model)

    return turned(bench, settings, plan)


def macs_of(share: float) -> BudgetSettings:
    """A budget of MACs."""
    return BudgetSettings(macs=share)


def turned(bench: Bench, settings: PruneSettings, plan: Callable[[float], Plan]) -> Plan:
    """The largest share whose plan is predicted to be as fast as the settings ask.

    Raises:
        PlanError: none is.
    """
    wanted, best, fastest = settings.budget.speedup, None, 1.0
    assert wanted is not None

    def met(share: float) -> Plan | None:
        nonlocal fastest
        try:
            made = plan(share)
        except PlanError:  # so little is out of reach
            return None
        speedup = bench.speedup(made)
        fastest = max(fastest, speedup)
        return made if speedup >= wanted else None

    low, *shares = np.linspace(1.0, LEAST, SHARES + 1).tolist()
    for share in shares:  # from above: where kernels change, some that are not fast enough may lie below others
        low, high = share, low
        best = met(low)
        if best is not None:
            break
    for _ in range(HALVINGS if best is not None else 0):
        middle = (low + high) / 2
        made = met(middle)
        best, low, high = (best, low, middle) if made is None else (made, middle, high)
    if best is None:
        raise PlanError(f"no share is predicted to be {wanted:.3g}x as fast; the fastest plan found is, {fastest:.3g}x")
    return best


def plan_of(channel_map: ChannelMap, dense: torch.nn.Module, pruned: torch.nn.Module) -> Plan:
    """What another tool kept, found by the filters that are as they were.

    Raises:
        PlanError: a layer's filters cannot be told, or the sizes are not those of the plan.
    """
    left, keep_of = dict(pruned.named_parameters()), np.ones(channel_map.n_labels, dtype=bool)
    for name, value in dense.named_parameters():
        labels = channel_map.labels[name][0]
        if labels is None or value.dim() != 4 or left[name].shape[1:] != value.shape[1:]:
            continue
        same = (value.flatten(1)[:, None] == left[name].flatten(1)[None]).all(-1)
        if int(same.any(1).sum()) != len(left[name]):
            raise PlanError(f"{name}: cannot tell which filters were kept")
        keep_of[labels[~same.any(1).numpy()]] = False
    plan = Plan(channel_map, keep_of)
    for name, value in compact(dense, plan).named_parameters():
        if value.shape != left[name].shape:
            raise PlanError(f"{name}: {tuple(value.shape)} by the plan, {tuple(left[name].shape)} as it was cut")
    return plan


def chooser(method: str) -> Chooser:
    """How a method comes to its plan."""
    what, _, criterion = method.partition("-")
    if what == "tp":
        return by_torch_pruning
    found = {"time": by_time, "macs": by_macs}[what]
    return lambda bench, settings: found(bench, settings, criterion)
