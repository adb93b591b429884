"""Plans for a budget of memory: the most of several sums, each of which may be the peak."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from chains import Chain, kept, scored
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prunekit.channels.labels.label_union import Labels
from prunekit.channels.memory_table import record_memory
from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.compaction.compact_model import compact
from prunekit.errors import ModelError, PlanError, UsageError
from prunekit.planning.budgets.budget import budgets_of
from prunekit.planning.budgets.cost_model import GroupPart
from prunekit.planning.candidates import Scores, free_parts
from prunekit.planning.plan import load_plan
from prunekit.planning.solver import make_plan
from prunekit.settings.deployment import Target
from prunekit.settings.pruning import BudgetSettings, PruneSettings

EXAMPLE = (torch.zeros(1, 3, 32, 32),)


def wanted(batch: int = 1, **options: Any) -> PruneSettings:
    budget = BudgetSettings(**{name: options.pop(name) for name in vars(BudgetSettings()) if name in options})
    return PruneSettings(budget, target=Target(batch=batch), **{"scope": "per_mac"} | options)


def memory_range(chart: ChannelMap, parts: list[GroupPart], batch: int) -> tuple[float, float]:
    """Megabytes of the narrowest and of the dense model."""
    found = budgets_of(chart, parts, wanted(batch, memory_mb=1.0))
    return float(found.left(np.array([part.counts[0] for part in parts]))[0]), float(found.dense[0])


def every_choice(parts: list[GroupPart]) -> Labels:
    return np.stack(np.meshgrid(*[part.counts for part in parts], indexing="ij"), -1).reshape(-1, len(parts))


widths = st.lists(st.integers(3, 40), min_size=2, max_size=2) | st.lists(st.integers(3, 8), min_size=3, max_size=4)


@pytest.mark.slow
@settings(max_examples=20, derandomize=True)
@given(
    widths,
    st.booleans(),
    st.sampled_from([1, 4]),
    st.floats(0.1, 0.9),
    st.fixed_dictionaries({}, optional={"macs": st.floats(0.25, 0.85), "params": st.floats(0.25, 0.85)}),
    st.integers(0, 10**6),
)
def test_within_one_percent_of_the_best_plan_for_memory(
    widths: list[int], shortcut: bool, batch: int, share: float, others: dict[str, float], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    model = Chain(widths, [int(kernel) for kernel in generator.choice([1, 3], len(widths))], shortcut)
    chart = trace(model, EXAMPLE)
    scores = scored(chart, generator)
    parts = free_parts(chart, scores, wanted())
    least, dense = memory_range(chart, parts, batch)
    budget = wanted(batch, memory_mb=least + share * (dense - least), **others)
    every = every_choice(parts)
    worth = sum(np.r_[0, np.cumsum(scores[part.labels])][every[:, i]] for i, part in enumerate(parts))
    limits = budgets_of(chart, parts, budget)
    assert np.array_equal(limits.fits(every), (limits.left(every) <= limits.asked).all(axis=1))
    best = float((worth * limits.fits(every)).max())
    assume(best > 0)
    plan = make_plan(chart, scores, budget)
    assert 0.99 * best <= kept(plan, scores) <= best * (1 + 1e-12)
    found = plan.provenance["budgets"]["memory_mb"]
    assert found["left"] == record_memory(compact(model, plan), EXAMPLE, batch).peak_bytes / 1e6 <= found["asked"]
    assert found["dense"] == record_memory(model, EXAMPLE, batch).peak_bytes / 1e6


@cache
def resnet() -> tuple[torch.nn.Module, ChannelMap, Scores]:
    model = torchvision.models.resnet18(num_classes=10).eval()
    chart = trace(model, (torch.zeros(1, 3, 64, 64),))
    return model, chart, scored(chart, np.random.default_rng(0))


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["uniform", "global", "per_mac", "capacity"])
def test_resnet18_uses_its_memory_up(scope: str) -> None:
    model, chart, scores = resnet()
    half = record_memory(model, EXAMPLE, 8).peak_bytes / 2e6
    plan = make_plan(chart, scores, wanted(8, memory_mb=half, macs=0.9, scope=scope))
    taken = record_memory(compact(model, plan), (torch.zeros(1, 3, 64, 64),), 8).peak_bytes / 1e6
    asked = plan.provenance["budgets"]["memory_mb"]["asked"]
    assert 0.99 * asked < taken <= asked == half
    assert plan.provenance["binding"] == "memory_mb"


def test_prices_of_several_moments_keep_more_than_the_same_share_of_all() -> None:
    _, chart, scores = resnet()
    parts = free_parts(chart, scores, wanted())
    least, dense = memory_range(chart, parts, 32)
    half = (least + dense) / 2
    worth = {
        scope: kept(make_plan(chart, scores, wanted(32, memory_mb=half, scope=scope)), scores)
        for scope in ("uniform", "global", "per_mac")
    }
    assert worth["per_mac"] > 1.01 * worth["global"] > 1.01 * worth["uniform"]


def test_moments_below_the_budget_in_the_dense_model_limit_nothing() -> None:
    _, chart, scores = resnet()
    parts = free_parts(chart, scores, wanted())
    _, dense = memory_range(chart, parts, 64)
    several = [budgets_of(chart, parts, wanted(64, memory_mb=share * dense, macs=0.5)) for share in (0.5, 0.9, 1.1)]
    counts = [len(one.limits) for one in several]
    assert counts[0] > counts[1] == counts[2] == 2
    whole = np.array([part.labels.size for part in parts])
    assert several[2].left(whole)[list(several[2].names).index("memory_mb")] == pytest.approx(dense)


def test_a_larger_batch_prunes_early_layers_more() -> None:
    """With one image weights take most of the memory, and they are late; with many, activations do, early ones."""
    _, chart, scores = resnet()
    first, last = (
        np.concatenate([group.labels for group in chart.groups if group.name.startswith(name)])
        for name in ("conv1", "layer4")
    )
    shares = []
    for batch in (1, 64):  # of widths that are no coarser than the shares below tell apart
        least, dense = memory_range(chart, free_parts(chart, scores, wanted(round_to=8)), batch)
        plan = make_plan(chart, np.ones_like(scores), wanted(batch, memory_mb=(least + dense) / 2, round_to=8))
        shares.append((plan.keep[first].mean(), plan.keep[last].mean()))
    (first_of_one, last_of_one), (first_of_many, last_of_many) = shares
    assert first_of_one > 0.9 > 0.5 > first_of_many
    assert last_of_one < last_of_many - 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"memory_mb": 0.02},
            r"memory_mb: at most 0.02 MB was asked for, but .* leave no less than 0\.0\d+ MB; raise",
        ),
        (
            {"memory_mb": 0.1, "min_channels": 20},
            r"at most 0.1 MB .* \(it contradicts min_channels, without which 0\.0\d+ MB can be had\); raise",
        ),
        ({"memory_mb": 99}, r"removes nothing: budget memory_mb 99 leaves the whole model \(which has 0\.\d+ MB\)"),
    ],
)
def test_memory_out_of_reach(options: dict[str, Any], message: str) -> None:
    chart = trace(Chain([24, 32], [3, 3], True), EXAMPLE)
    with pytest.raises(PlanError, match=message):
        make_plan(chart, np.ones(chart.n_labels), wanted(**options))


def test_settings_that_are_no_memory() -> None:
    chart = trace(Chain([4, 4], [3, 3], True), EXAMPLE)
    with pytest.raises(UsageError, match=r"memory_mb: expected a number of megabytes \(10\^6 bytes\) above 0, got -1"):
        make_plan(chart, np.ones(chart.n_labels), wanted(memory_mb=-1))


def test_a_map_without_a_trace_and_a_model_that_does_not_take_the_batch(tmp_path: Path) -> None:
    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.wide(x.view(1, 4)).relu())  # type: ignore[no-any-return]

    chart = trace(One(), (torch.zeros(1, 4),))
    plan = make_plan(chart, np.ones(chart.n_labels), wanted(memory_mb=2e-4 + 1e-4))
    plan.save(tmp_path)
    with pytest.raises(PlanError, match="memory_mb: expected a map of a traced model, got one read from a file"):
        make_plan(load_plan(tmp_path).channel_map, np.ones(chart.n_labels), wanted(memory_mb=1e-4))
    with pytest.raises(ModelError, match="does not run on a batch of 2"):
        make_plan(chart, np.ones(chart.n_labels), wanted(2, memory_mb=1.0))
