"""Budgets against what compact models really hold, one at a time and several at once."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_net import Attention
from equivalence import settled_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from prunekit.channels.labels.label_union import Labels
from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.compaction.compact_model import compact
from prunekit.compaction.model_folder import save
from prunekit.errors import PlanError
from prunekit.measure.model_size import count_bytes, count_macs, count_parameters, size_bytes
from prunekit.planning.budgets.budget import Countable
from prunekit.planning.budgets.cost_model import GroupPart, cost_model
from prunekit.planning.candidates import free_parts
from prunekit.planning.plan import Plan, load_plan
from prunekit.planning.solver import make_plan
from prunekit.settings.pruning import BudgetSettings, PruneSettings

COUNTED = ("channels", "macs", "params", "size_mb")
"""Budgets that are counted exactly."""


class Mixed(nn.Module):
    """A shortcut, groups, a concatenation, flattened pixels, a norm with statistics, and a tied linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.inner, self.outer = nn.Conv2d(8, 12, 3, padding=1), nn.Conv2d(12, 8, 1)
        self.grouped, self.side = nn.Conv2d(8, 16, 3, padding=1, groups=4), nn.Conv2d(8, 5, 1)
        self.twice = nn.Linear(21 * 16, 21 * 16)
        self.head = nn.Linear(21 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = x + self.outer(self.inner(x).relu())
        x = torch.cat([self.grouped(x), self.side(x)], 1).flatten(1)
        return self.head(self.twice(self.twice(x).relu()))  # type: ignore[no-any-return]


MODELS: dict[str, tuple[type[nn.Module], tuple[Tensor]]] = {
    "mixed": (Mixed, (torch.zeros(1, 3, 4, 4),)),
    "attention": (partial(Attention, 6), (torch.zeros(1, 5, 6),)),
}


@cache
def model_and_chart(name: str) -> tuple[nn.Module, ChannelMap]:
    model = MODELS[name][0]().eval()
    # The trial may find sizes that the model's Python has to be told: those are part of the map of a plan.
    return model, settled_plan(model, MODELS[name][1], share=0.5).channel_map


def random_scores(chart: ChannelMap, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng(seed).random(chart.n_labels)


def kept(chart: ChannelMap, parts: list[GroupPart], counts: Labels) -> Plan:
    keep = np.ones(chart.n_labels, dtype=bool)
    for part, count in zip(parts, counts, strict=True):
        keep[part.labels[count:]] = False
    return Plan(chart, chart.completed(keep))


@settings(max_examples=25)
@given(st.sampled_from(list(MODELS)), st.integers(0, 10**6), st.sampled_from([(), ("side",), ("q",)]))
def test_costs_are_those_of_the_compact_model(name: str, seed: int, ignore: tuple[str, ...]) -> None:
    model, chart = model_and_chart(name)
    ignore = tuple(path for path in ignore if path in dict(model.named_modules()))
    generator = np.random.default_rng(seed)
    parts = free_parts(chart, random_scores(chart, seed), PruneSettings(ignore=ignore))
    counts = np.stack([generator.integers(1, [part.labels.size + 1 for part in parts]) for _ in range(3)])
    found = cost_model(chart, parts, [Countable(chart, parts).terms(name) for name in COUNTED])(counts)
    for row, costs in zip(counts, found, strict=True):
        plan = kept(chart, parts, row)
        small = compact(model, plan)
        expected = {
            "macs": count_macs(small, MODELS[name][1]),
            "params": count_parameters(small),
            "size_mb": count_bytes(small),
            "channels": sum(part.channels * count for part, count in zip(parts, row, strict=True)),
        }
        assert dict(zip(COUNTED, costs.tolist(), strict=True)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_size_is_that_of_the_file_but_for_its_header(dtype: torch.dtype, tmp_path: Path) -> None:
    model = Mixed().eval().to(dtype)
    chart = trace(model, (torch.zeros(1, 3, 4, 4, dtype=dtype),))
    wanted = 0.3 * count_bytes(model) / 1e6
    plan = make_plan(chart, random_scores(chart), PruneSettings(BudgetSettings(size_mb=wanted)))
    small = compact(model, plan)
    file = save(small, tmp_path / "model", plan) / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert size_bytes(file) - header == count_bytes(small)
    assert 0.9 * wanted < count_bytes(small) / 1e6 <= wanted
    assert plan.provenance["budgets"]["size_mb"]["left"] == pytest.approx(count_bytes(small) / 1e6)


def plan_for(scope: str = "per_mac", seed: int = 0, **budget: float) -> Plan:
    chart = model_and_chart("mixed")[1]
    return make_plan(chart, random_scores(chart, seed), PruneSettings(BudgetSettings(**budget), scope=scope))  # type: ignore[arg-type]


def left(plan: Plan) -> dict[str, float]:
    model, chart = model_and_chart("mixed")
    small = compact(model, plan)
    return {
        "macs": chart.macs(plan.keep) / chart.macs(),
        "params": count_parameters(small) / count_parameters(model),
        "size_mb": count_bytes(small) / 1e6,
    }


@pytest.mark.parametrize("scope", ["uniform", "global", "per_mac", "capacity"])
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_meets_all_its_budgets_and_the_one_that_binds_is_said(scope: str, seed: int) -> None:
    dense_mb = count_bytes(model_and_chart("mixed")[0]) / 1e6
    asked = {"macs": 0.6, "params": 0.5, "size_mb": 0.4 * dense_mb}
    plan = plan_for(scope, seed, **asked)
    found = left(plan)
    assert all(found[name] <= asked[name] for name in asked)
    assert plan.provenance["binding"] == max(asked, key=lambda name: found[name] / asked[name])
    each = plan.provenance["budgets"]
    assert {name: each[name]["asked"] for name in asked} == asked
    assert {name: each[name]["left"] for name in asked} == pytest.approx(found)
    assert each["size_mb"]["dense"] == pytest.approx(dense_mb)


@pytest.mark.parametrize("scope", ["uniform", "global"])
def test_a_budget_that_does_not_bind_changes_nothing(scope: str) -> None:
    alone, both = plan_for(scope, params=0.4), plan_for(scope, params=0.4, macs=1.0, size_mb=99)
    assert np.array_equal(alone.keep, both.keep)
    assert both.provenance["binding"] == "params"
    assert not np.array_equal(alone.keep, plan_for(scope, params=0.4, macs=0.3).keep)


def test_a_label_costs_what_the_budget_counts() -> None:
    """Two inner widths of equal scores: one is dear in MACs, the other in parameters."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.back = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
            self.late, self.end = nn.Linear(4, 30), nn.Linear(30, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.late(self.back(self.early(x)).mean((2, 3))).relu())  # type: ignore[no-any-return]

    chart = trace(Two(), (torch.zeros(1, 3, 16, 16),))
    scores = np.ones(chart.n_labels)

    def widths(**budget: float) -> tuple[int, int]:
        found = make_plan(chart, scores, PruneSettings(BudgetSettings(**budget), "random", "per_mac", ignore=("back",)))
        return found.widths()["early"][0], found.widths()["late"][0]

    assert widths(macs=0.5)[1] == 30
    assert widths(macs=0.5)[0] < 8
    assert widths(params=0.6) == (2, 30)  # 32 parameters of one against 7 of the other, and 189 have to go
    assert widths(channels=0.5)[0] + widths(channels=0.5)[1] == 19


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"params": 0.001},
            r"budget params: at most 0.001 was asked for, but .* leave no less than 0\.0\d+ of the dense",
        ),
        ({"size_mb": 0.001}, r"budget size_mb: at most 0.001 MB was asked for, but .* leave no less than 0\.\d+ MB"),
        (
            {"size_mb": 0.1, "min_channels": 8},
            r"at most 0.1 MB .* \(it contradicts min_channels, without which 0\.0\d+ MB can be had\)",
        ),
        (
            {"params": 0.2, "ignore": ("twice",), "round_to": 2},
            r"\(it contradicts ignore, without which 0\.\d+ can be had\); raise",
        ),
        (
            {"size_mb": 1e-6, "macs": 1e-6, "channels": 0.9},
            r"budget macs: at most 1e-06 .* of the dense model.*; budget size_mb: at most 1e-06 MB .*; raise",
        ),
        ({"size_mb": 99}, r"removes nothing: budget size_mb 99 leaves the whole model \(which has 0\.466 MB\)"),
    ],
)
def test_budgets_out_of_reach(options: dict[str, Any], message: str) -> None:
    chart = model_and_chart("mixed")[1]
    budget = BudgetSettings(**{name: options.pop(name) for name in COUNTED if name in options})
    with pytest.raises(PlanError, match=message):
        make_plan(chart, random_scores(chart), PruneSettings(budget, depth=False, **options))


def test_a_plan_that_is_read_again_can_be_priced_again(tmp_path: Path) -> None:
    plan = plan_for(size_mb=0.4)
    plan.save(tmp_path)
    again = load_plan(tmp_path)
    assert again.channel_map.stored == plan.channel_map.stored
    assert again.provenance == plan.provenance
    assert json.loads(json.dumps(again.provenance)) == again.provenance
