"""Nets written by hand: whatever they do, the compact model computes what the masked one does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from equivalence import (
    TOLERANCE,
    assert_unchanged,
    heads_and_positions,
    parity,
    random_keep,
    randomized,
    settled_plan,
    snapshot,
)
from net_cases import CASES
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.channels.trial.trial import run_trial
from prunekit.compaction.compact_model import compact
from prunekit.hooks.hook import count_hooks
from prunekit.measure.model_size import count_macs
from prunekit.planning.plan import Plan

NOT_COUNTED = {
    "lstm": "torch's counter does not know the CPU's recurrent kernel",
    "lstm_of_two_directions_and_layers": "torch's counter does not know the CPU's recurrent kernel",
    "spectral_norm": "torch's counter knows no matrix times vector",
    "blocks_of_frequencies": "the map counts an axis made of two by the labels of the first",
    "mask_of_the_lowest_number_before_a_width": "the map does not count operators without a label",
}

if torch.ops.aten._scaled_dot_product_flash_attention_for_cpu not in flop_registry:
    NOT_COUNTED["fused_attention"] = "this torch's counter does not know the CPU's attention kernel"


@pytest.mark.parametrize("name", CASES)
def test_masked_equals_compact(name: str) -> None:
    factory, prunable = CASES[name]
    model, example = factory()
    randomized(model).eval()
    before, hooks = snapshot(model), count_hooks(model)
    for seed in (0, 1):
        plan = settled_plan(model, example, seed)
        assert parity(model, plan, example) <= TOLERANCE
        assert not any("new_empty" in lock.operator for lock in plan.channel_map.locks)
        for parameter in prunable:
            rows = plan.channel_map.labels[parameter][0]
            assert rows is not None
            assert rows.any(), f"{parameter} is locked: {plan.channel_map.locks}"
            assert plan.kept(parameter, 0).size < rows.size
        if isinstance(example[0], Tensor) and name not in NOT_COUNTED:
            assert count_macs(compact(model, plan), example) == plan.channel_map.macs(plan.keep)
    assert_unchanged(model, before)
    assert count_hooks(model) == hooks


LOCKED_BY_RULE = {
    "mean_over_channels": ("", "aten.mean"),
    "softmax_over_channels": ("1", "aten._softmax"),
    "cumulative_sum_over_channels": ("", "aten.cumsum"),
    "sum_of_sigmoids": ("", "aten.sum"),
    "shifted_channels": ("", "aten.constant_pad_nd"),
    "plain_tensor_attribute": ("", "aten.mul"),
    "operator_without_a_rule": ("", "aten.digamma"),
    "layer_norm_as_a_function_locks_its_channels": ("", "aten.native_layer_norm"),
}


@pytest.mark.parametrize("name", LOCKED_BY_RULE)
def test_locks_name_module_and_operator(name: str) -> None:
    model, example = CASES[name][0]()
    module, operator = LOCKED_BY_RULE[name]
    chart = trace(model, example)
    found = [lock for lock in chart.locks if (lock.module, lock.operator) == (module, operator)]
    assert found, chart.locks
    assert all(lock.reason and lock.channels >= 2 for lock in found)


FOUND_BY_TRIAL = {
    "split_of_a_fixed_size": "",
    "split_of_a_fixed_size_that_raises_nothing": "",
    "fixed_groups_in_a_function": "",
    "scale_by_the_width": "",
}


@pytest.mark.parametrize("name", FOUND_BY_TRIAL)
def test_what_only_the_trial_sees_is_locked_and_reported(name: str) -> None:
    model, example = CASES[name][0]()
    randomized(model).eval()
    first = trace(model, example)
    assert first.groups, "the rules alone see nothing to lock here"
    plan = settled_plan(model, example)
    added = [lock for lock in plan.channel_map.locks if lock not in first.locks]
    assert added
    assert all("the trial found a difference" in lock.reason for lock in added)
    assert FOUND_BY_TRIAL[name] in {lock.module for lock in added}
    assert plan.removed == 0


def test_heads_are_pruned_whole() -> None:
    model, example = CASES["attention_with_any_number_of_heads"][0]()
    plan = settled_plan(randomized(model).eval(), example, seed=2)
    heads, positions = heads_and_positions(plan.kept("q.weight", 0), 2)
    assert (len(heads), len(positions)) == (4, 1)
    assert np.array_equal(plan.kept("q.weight", 0), plan.kept("k.weight", 0))
    assert heads_and_positions(plan.kept("v.weight", 0), 2)[0] == heads


def test_heads_that_are_part_of_the_batch_are_pruned_without_positions() -> None:
    """The width of a head is written as a quotient, beside an axis that has both the batch and the heads."""

    def without_a_head(chart: ChannelMap) -> Keep:
        rows, keep = chart.labels["v.weight"][0], np.ones(chart.n_labels, dtype=bool)
        assert rows is not None
        keep[chart.deciding(rows)[0][0]] = False
        return keep

    model, example = CASES["heads_folded_into_the_batch"][0]()
    randomized(model).eval()
    settled = run_trial(model, trace(model, example), without_a_head, [example])
    plan = Plan(settled.channel_map, settled.keep)
    assert heads_and_positions(plan.kept("v.weight", 0), 4) == ([1, 2], [0, 1, 2, 3])
    assert plan.kept("inner.weight", 0).size == 12
    for batch in (2, 5):
        assert parity(model, plan, (torch.randn(batch, 5, 6),)) <= TOLERANCE


def test_a_tied_weight_stays_tied() -> None:
    model, example = CASES["tied_weights"][0]()
    small = compact(model, settled_plan(randomized(model), example))
    assert small[4].weight is small[2].weight  # type: ignore[index]
    assert small[2].weight.shape[0] < 8  # type: ignore[index, union-attr]


class Remembering(nn.Module):
    """Computes a number the first time, as detection models do with the scales of their feature maps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 1)
        self.scale: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = float(torch.tensor(4.0).log2())
        y = self.a(x).abs().add(1).log2()
        return self.b(y * self.scale) if self.training else self.b(y).relu()


def test_the_trial_leaves_nothing_behind_in_the_compact_model() -> None:
    model = randomized(Remembering())
    example = (torch.randn(1, 3, 6, 6),)
    chart = trace(model, example)
    settled = run_trial(model, chart, random_keep, [example])
    assert not [lock for lock in settled.channel_map.locks if lock not in chart.locks]
    assert settled.compact.scale is None
    assert model.scale is None
