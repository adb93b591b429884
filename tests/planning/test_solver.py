"""From scores and a budget to a plan: budgets, limits, order, and what is refused."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.ao.quantization.fake_quantize import FusedMovingAvgObsFakeQuantize

from prunekit.channels.labels.constraints import LockRecord
from prunekit.channels.map_builder import with_extra
from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.errors import NonFiniteError, PlanError, UsageError
from prunekit.planning.candidates import Scores, free_parts, labels_matching
from prunekit.planning.plan import Plan
from prunekit.planning.solver import make_plan
from prunekit.settings.deployment import Target
from prunekit.settings.pruning import BudgetSettings, PruneSettings

EXAMPLE = (torch.zeros(1, 3, 16, 16),)
BUDGETS = ("macs", "channels", "params", "size_mb")


class Blocks(nn.Module):
    """Two stages with a shortcut, a grouped convolution and a two-part concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.inner = nn.Conv2d(16, 24, 3, padding=1)
        self.outer = nn.Conv2d(24, 16, 1)
        self.grouped = nn.Conv2d(16, 32, 3, padding=1, groups=8)
        self.side = nn.Conv2d(16, 10, 1)
        self.head = nn.Linear(42, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        x = x + self.outer(self.inner(x).relu())
        both = torch.cat([self.grouped(x), self.side(x)], 1)
        return self.head(both.mean((2, 3)))


@cache
def chart(name: str = "blocks") -> ChannelMap:
    if name == "blocks":
        return trace(Blocks(), EXAMPLE)
    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None, num_classes=10)
    return trace(model, (torch.empty(1, 3, 64, 64, device="meta"),))


def random_scores(channel_map: ChannelMap, seed: int = 0) -> Scores:
    scores = np.random.default_rng(seed).random(channel_map.n_labels)
    scores[0] = np.inf
    return scores


def plan(seed: int = 0, name: str = "blocks", **options: Any) -> Plan:
    budget = BudgetSettings(**{key: options.pop(key) for key in BUDGETS if key in options})
    wanted = PruneSettings(budget=budget, **{"depth": False, **options})
    return make_plan(chart(name), random_scores(chart(name), seed), wanted)


def channels_left(found: Plan) -> float:
    parts = free_parts(found.channel_map, random_scores(found.channel_map), PruneSettings())
    left = sum(part.channels * int(found.keep[part.labels].sum()) for part in parts)
    return left / sum(part.channels * part.labels.size for part in parts)


# Budgets


@settings(max_examples=40)
@given(st.floats(0.12, 0.97), st.sampled_from(["uniform", "global"]), st.integers(0, 5), st.sampled_from([1, 2, 4]))
def test_a_macs_budget_is_met(macs: float, scope: str, seed: int, round_to: int) -> None:
    found = plan(seed, macs=macs, scope=scope, round_to=round_to)
    left = found.channel_map.macs(found.keep) / found.channel_map.macs()
    assert left <= macs
    for group in found.channel_map.groups:
        assert found.keep[group.labels].any()


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
@pytest.mark.parametrize("scope", ["uniform", "global"])
@pytest.mark.parametrize("macs", [0.3, 0.5, 0.8])
def test_a_macs_budget_is_nearly_used_up(name: str, scope: str, macs: float) -> None:
    found = plan(name=name, macs=macs, scope=scope)
    assert macs - 0.01 < found.channel_map.macs(found.keep) / found.channel_map.macs() <= macs


@settings(max_examples=30)
@given(st.floats(0.1, 0.95), st.integers(0, 5))
def test_a_channel_budget_of_every_group(share: float, seed: int) -> None:
    found = plan(seed, channels=share, round_to=1)
    for kept, dense in found.widths().values():
        assert kept == max(1, int(share * dense + 1e-9))


@settings(max_examples=30)
@given(st.floats(0.15, 0.95), st.integers(0, 5))
def test_a_channel_budget_over_all_groups(share: float, seed: int) -> None:
    found = plan(seed, channels=share, scope="global")
    assert channels_left(found) <= share + 1e-9
    smallest = min(part.channels for part in free_parts(chart(), random_scores(chart()), PruneSettings()))
    assert channels_left(found) > share - (smallest + 3) / 66


@pytest.mark.parametrize("scope", ["uniform", "global"])
@pytest.mark.parametrize("kind", ["macs", "channels"])
def test_a_larger_budget_never_keeps_less(scope: str, kind: str) -> None:
    kept = [plan(1, scope=scope, **{kind: share}).keep for share in (0.2, 0.4, 0.6, 0.8)]
    sizes = [int(keep.sum()) for keep in kept]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    if kind == "channels" and scope == "uniform":
        for small, large in pairwise(kept):
            assert not (small & ~large).any()


# Scores decide


def test_in_every_group_the_highest_scores_stay() -> None:
    found = plan(3, macs=0.5)
    scores = random_scores(chart(), 3)
    for group in chart().groups:
        stays = found.keep[group.labels]
        assert scores[group.labels[stays]].min() >= scores[group.labels[~stays]].max()


def test_global_ranking_takes_from_the_group_with_low_scores() -> None:
    scores = np.ones(chart().n_labels)
    first, second = (next(g for g in chart().groups if g.name == name) for name in ("inner", "side"))
    scores[first.labels] = 1e-3 * (1 + np.arange(first.labels.size))
    found = make_plan(chart(), scores, PruneSettings(budget=BudgetSettings(macs=0.7), scope="global"))
    widths = found.widths()
    assert widths["inner"][0] < widths["inner"][1]
    assert widths["side"] == (second.labels.size,) * 2
    assert found.removed == widths["inner"][1] - widths["inner"][0]


def test_equal_scores_keep_the_first_channels_and_a_plan_is_repeatable() -> None:
    scores = np.ones(chart().n_labels)
    wanted = PruneSettings(budget=BudgetSettings(channels=0.5))
    first, second = make_plan(chart(), scores, wanted), make_plan(chart(), scores, wanted)
    assert np.array_equal(first.keep, second.keep)
    assert first.kept("inner.weight", 0).tolist() == list(range(12))


# Limits


@pytest.mark.parametrize("scope", ["uniform", "global"])
@pytest.mark.parametrize("round_to", [2, 4, 8])
def test_widths_are_multiples(scope: str, round_to: int) -> None:
    found = plan(2, macs=0.4, scope=scope, round_to=round_to)
    for name in ("stem", "inner", "grouped", "side"):
        kept, dense = found.kept(f"{name}.weight", 0).size, chart().shapes[f"{name}.weight"][0]
        assert kept % round_to == 0 or kept == dense, name
    assert found.removed > 0


@pytest.mark.parametrize(
    ("dense", "block", "step"),
    [
        (7, 8, 1),
        (15, 8, 1),
        (16, 8, 2),
        (31, 8, 2),
        (32, 8, 4),
        (63, 8, 4),
        (64, 8, 8),
        (100, 8, 8),
        (100, 4, 8),
        (127, 8, 8),
        (128, 8, 16),
        (200, 16, 16),
        (300, 32, 32),
    ],
)
def test_widths_are_rounded_by_the_size_of_the_axis(dense: int, block: int, step: int) -> None:
    """In steps that are an eighth of the axis at most; below one step any width is left, so that no budget is lost."""
    channel_map = trace(nn.Sequential(nn.Linear(3, dense), nn.ReLU(), nn.Linear(dense, 2)), torch.zeros(1, 3))
    (part,) = free_parts(channel_map, random_scores(channel_map), PruneSettings(target=Target(block=block)))
    assert part.counts.tolist() == [
        count for count in range(1, dense + 1) if count % step == 0 or count in (dense, *range(step))
    ]
    assert step <= max(1, dense / 8)


@pytest.mark.parametrize("scope", ["uniform", "global"])
def test_a_group_keeps_its_minimum(scope: str) -> None:
    found = plan(2, macs=0.5, scope=scope, min_channels=9)
    for name in ("stem", "inner", "side"):
        assert found.kept(f"{name}.weight", 0).size >= 9
    kept = found.kept("grouped.weight", 0).size
    assert kept >= 9
    assert kept % 4 == 0, "whole groups of four channels"


def test_excluded_layers_stay_whole() -> None:
    found = plan(channels=0.25, ignore=("inner", "gro*"))
    widths = found.widths()
    assert found.kept("inner.weight", 0).size == 24
    assert found.kept("grouped.weight", 0).size == 32
    assert found.kept("stem.weight", 0).size == 16, "the groups run over the stem's channels"
    assert widths["side"] == (2, 10)


def test_excluding_one_of_several_tied_layers_keeps_them_all() -> None:
    found = plan(name="resnet18", channels=0.5, ignore=("layer1.1.conv2",))
    for name in ("conv1.weight", "layer1.0.conv2.weight", "layer1.1.conv2.weight"):
        assert found.kept(name, 0).size == 64
    assert found.kept("layer1.0.conv1.weight", 0).size == 32


def test_a_module_that_is_never_called_can_be_excluded_too() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(nn.functional.linear(x, self.inner.weight, self.inner.bias))

    found = trace(Functional(), (torch.ones(2, 4),))
    with pytest.raises(PlanError, match="no channel is free"):
        make_plan(found, np.ones(9), PruneSettings(budget=BudgetSettings(channels=0.5), ignore=("inner",)))
    half = make_plan(found, np.ones(9), PruneSettings(budget=BudgetSettings(channels=0.9), ratios={"inner": 0.25}))
    assert half.kept("inner.weight", 0).tolist() == [0, 1]


@pytest.mark.parametrize("scope", ["uniform", "global"])
def test_ratios_are_kept_to_whatever_the_budget(scope: str) -> None:
    for macs in (0.5, 0.7):
        found = plan(macs=macs, scope=scope, ratios={"inner": 0.25, "side": 1.0})
        assert found.kept("inner.weight", 0).size == 6
        assert found.kept("side.weight", 0).size == 10
        assert found.channel_map.macs(found.keep) <= macs * found.channel_map.macs()


def test_exclude_wins_over_ratios_and_the_last_ratio_over_the_first() -> None:
    found = plan(macs=0.9, ratios={"*": 0.5, "inner": 0.75, "side": 0.1}, ignore=("side",))
    assert found.kept("inner.weight", 0).size == 18
    assert found.kept("side.weight", 0).size == 10
    assert found.kept("stem.weight", 0).size == 8


@given(st.sampled_from(["*", "layer?.0.*", "layer[12].*.conv1", "conv1", "*.bn2", "layer3*", "layer4.1"]))
@settings(max_examples=7)
def test_globs_match_module_paths(pattern: str) -> None:
    found = chart("resnet18")
    matched = labels_matching(found, [pattern], "ignore")
    wanted = np.zeros_like(matched)
    for (path, kind, _), labels in found.activations.items():
        if kind == "output" and fnmatchcase(path, pattern):
            wanted[labels] = True
    wanted[0] = False
    assert np.array_equal(matched, wanted)
    assert matched.any()


# What is refused


@pytest.mark.parametrize("key", ["ignore", "ratios"])
def test_a_glob_that_matches_nothing_names_near_paths(key: str) -> None:
    options: dict[str, Any] = {"ignore": ("iner",)} if key == "ignore" else {"ratios": {"iner": 0.5}}
    with pytest.raises(PlanError, match=rf"{key}: 'iner' matches no module path; did you mean 'inner'"):
        plan(macs=0.5, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"macs": 0.001}, r"budget macs: at most 0.001 was asked for, but .* leave no less than 0\.\d+"),
        ({"macs": 0.02, "ignore": ("inner",)}, "leave no less than"),
        ({"macs": 0.2, "min_channels": 16}, "leave no less than"),
        ({"macs": 0.2, "round_to": 16}, "leave no less than"),
        ({"macs": 0.3, "ratios": {"*": 0.9}}, "leave no less than"),
        ({"channels": 0.02, "scope": "global"}, "budget channels: at most 0.02"),
        ({"macs": 1.0}, "the plan removes nothing"),
        ({"channels": 1.0}, "the plan removes nothing"),
        ({"channels": 0.5, "round_to": 64}, "the plan removes nothing"),
        ({"channels": 0.5, "min_channels": 999}, "the plan removes nothing"),
        ({"macs": 1.0, "ratios": {"*": 1.0}}, "the plan removes nothing"),
        ({"macs": 0.5, "ignore": ("*",)}, "no channel is free"),
    ],
)
def test_budgets_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "budget: expected at least one of channels, macs, params, size_mb, .*; got none"),
        ({"params": 1.5}, "params: expected a share above 0 and at most 1, got 1.5"),
        ({"size_mb": 0}, r"size_mb: expected a number of megabytes \(10\^6 bytes\) above 0, got 0"),
        ({"size_mb": "5 MB"}, "size_mb: expected a number of megabytes .* got '5 MB'"),
        ({"size_mb": float("inf"), "macs": 7}, "macs: expected a share .*; size_mb: expected .* got inf"),
        ({"macs": 0.0}, "macs: expected a share above 0 and at most 1, got 0.0"),
        ({"macs": float("nan")}, "macs: expected a share .* got nan"),
        ({"macs": "half"}, "macs: expected a share .* got 'half'"),
        ({"channels": 50}, "channels: expected a share .* got 50"),
        ({"channels": 0.5, "ratios": {"inner": -1}}, r"ratios\['inner'\]: expected a number"),
        ({"macs": 0.5, "round_to": 0}, "round_to: expected a whole number of at least 1, or None, got 0"),
        ({"macs": 0.5, "round_to": 2.5}, "round_to: expected a whole number of at least 1, or None, got 2.5"),
        ({"macs": 0.5, "min_channels": -3}, "min_channels: expected a whole number of at least 1, got -3"),
        ({"macs": 0.5, "scope": "layer"}, "scope: expected one of 'uniform', 'global', .* got 'layer'"),
        ({"macs": 0.5, "ratios": {"inner": -1}, "round_to": 0}, "round_to: .*; ratios.*inner"),
    ],
)
def test_settings_out_of_range_are_all_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(**options)


@pytest.mark.parametrize("shape", [(3,), (), (0,)])
def test_scores_of_another_model_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="scores: expected one for each label"):
        make_plan(chart(), np.ones(shape), PruneSettings())


def test_scores_that_are_not_numbers_name_the_group() -> None:
    scores = random_scores(chart())
    scores[next(group for group in chart().groups if group.name == "side").labels[2]] = np.nan
    with pytest.raises(NonFiniteError, match="scores: NaN in side"):
        make_plan(chart(), scores, PruneSettings())


def test_a_model_with_nothing_to_prune() -> None:
    found = trace(nn.Linear(4, 3), (torch.ones(2, 4),))
    with pytest.raises(PlanError, match="no channel is free"):
        make_plan(found, np.ones(found.n_labels), PruneSettings())


def test_an_error_names_what_a_trial_locked() -> None:
    """Not the most frequent lock of the trace, which has nothing to do with it."""
    found = trace(nn.Sequential(nn.Linear(40, 6), nn.Linear(6, 3)), (torch.ones(2, 40),))
    axes = found.traced.trace.labels["0.weight"]
    assert axes[0] is not None
    half = PruneSettings(budget=BudgetSettings(channels=0.5))
    locked = with_extra(found, [LockRecord("the trial found a difference: that one", "1", "aten.mm", axes[0])])
    with pytest.raises(PlanError, match=r"no channel is free.* locked those in 1 \(aten.mm\): .*: that one"):
        make_plan(locked, np.ones(locked.n_labels), half)
    partly = with_extra(found, [LockRecord("it differs", "1", "aten.mm", axes[0][:3])])
    least = PruneSettings(budget=BudgetSettings(macs=0.1))
    with pytest.raises(PlanError, match=r"budget macs: .*\. The trial of a plan locked those in 1 .*: it differs"):
        make_plan(partly, np.ones(partly.n_labels), least)


class Observed(nn.Module):
    """A net whose inner values are quantized as torch prepares it for training."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)
        self.quantizer = FusedMovingAvgObsFakeQuantize()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.quantizer(self.a(x)))


def test_a_model_that_is_prepared_for_quantization_is_to_be_pruned_before() -> None:
    found = trace(Observed(), (torch.ones(2, 4),))
    assert [lock.reason for lock in found.locks if "prune the model before" in lock.reason]
    with pytest.raises(PlanError, match=r"beside quantizer, .* prune the model before it is prepared for quantization"):
        make_plan(found, np.ones(found.n_labels), PruneSettings(budget=BudgetSettings(channels=0.5)))


def test_nested_examples_say_what_to_give_instead() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    found = trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (nested,))
    with pytest.raises(PlanError, match="none follows nested tensors: give an example with as many tokens in each"):
        make_plan(found, np.ones(found.n_labels), PruneSettings(budget=BudgetSettings(channels=0.5)))


@pytest.mark.slow
@given(st.floats(0.05, 1.0), st.sampled_from([1, 3, 8]), st.integers(1, 20), st.sampled_from(["uniform", "global"]))
@settings(max_examples=40)
def test_a_plan_never_breaks_its_limits(macs: float, round_to: int, least: int, scope: str) -> None:
    try:
        found = plan(macs=macs, round_to=round_to, min_channels=least, scope=scope)
    except PlanError:
        assume(False)
    assert found.keep[0]
    for group in chart().groups:
        name, axis = next(slot for slot in group.slots if slot[1] == 0)
        labels = chart().labels[name][axis]
        assert labels is not None
        on_axis = labels[np.isin(labels, group.labels)]
        kept = int(found.keep[on_axis].sum())
        assert kept == on_axis.size or (kept % round_to == 0 and kept >= least), group.name
