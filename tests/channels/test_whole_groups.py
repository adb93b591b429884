"""Convolutions of few groups: whole groups go where the channels of each go together, else columns of every one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from equivalence import heads_and_positions, randomized, settled_plan
from nets_grouped import DEPTH, HEADS, heads_with_a_column_more, linear_attention_over_two_scales
from torch import nn

from prunekit.compaction.compact_model import compact
from prunekit.compaction.model_folder import load, save


@pytest.mark.parametrize("seed", range(3))
def test_groups_go_with_the_heads_they_are_part_of(seed: int, tmp_path: Any) -> None:
    model, example = linear_attention_over_two_scales()
    plan = settled_plan(randomized(model).eval(), example, seed)
    heads, positions = heads_and_positions(plan.kept("1.mix.weight", 0), 3 * DEPTH)
    assert len(positions) == 3 * DEPTH
    assert heads == heads_and_positions(plan.kept("1.qkv.weight", 0), 3 * DEPTH)[0]
    assert 1 <= len(heads) < HEADS
    small = compact(model, plan)
    mix: Any = small.get_submodule("1.mix")
    sizes = (3 * len(heads), 3 * DEPTH * len(heads), 3 * DEPTH * len(heads))
    assert (mix.groups, mix.in_channels, mix.out_channels) == sizes
    assert mix.weight.shape[1] == DEPTH
    save(small, tmp_path / "folder", plan)
    again = load(tmp_path / "folder", model)
    assert (again.get_submodule("1.mix").groups, str(again)) == (3 * len(heads), str(small))
    assert torch.equal(again(*example), small.eval()(*example))


def test_columns_go_where_nothing_says_that_groups_go() -> None:
    model: Any = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 12, 3, groups=2), nn.Conv2d(12, 5, 1))
    plan = settled_plan(randomized(model).eval(), (torch.randn(1, 3, 9, 9),))
    small: Any = compact(model, plan)
    assert small[2].groups == 2
    for name, size in (("0.weight", 8), ("2.weight", 6)):
        groups, columns = heads_and_positions(plan.kept(name, 0), size)
        assert groups == [0, 1]
        assert len(columns) < size


def test_what_is_added_to_heads_stays_where_positions_of_them_go() -> None:
    model, example = heads_with_a_column_more()
    plan = settled_plan(randomized(model).eval(), example)
    heads, positions = heads_and_positions(plan.kept("v.weight", 0), 4)
    assert len(heads) == 3
    assert len(positions) < 4
    columns = plan.kept("o.weight", 1)
    assert np.array_equal(columns, [5 * head + at for head in heads for at in [*positions, 4]])
