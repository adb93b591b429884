"""Every result of resnet152 shows itself: a line at the prompt, a page when printed and in a notebook, rows as data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import resnet152

from prunekit.channels import ChannelMap, trace
from prunekit.display import Displayed
from prunekit.planning import BudgetSettings, Plan, PruneSettings, load_plan
from prunekit.workflow import plan_model

PLAIN = (str, int, float, bool, type(None))
PAGE = 6000
"""Characters that a result has on a terminal and in a notebook, at most."""


def plain(value: Any) -> bool:
    """Whether a value is of Python's own kinds, as deep as it goes."""
    if isinstance(value, list):
        return all(map(plain, value))
    return type(value) in PLAIN


def check(result: Displayed) -> None:
    """A result shows itself, in bounds."""
    line, text, page, rows = repr(result), str(result), result._repr_html_(), result.rows()
    assert re.fullmatch(rf"<{type(result).__name__}: .{{10,180}}>", line), line
    assert 20 < len(text) < PAGE
    assert 100 < len(page) < PAGE
    assert type(rows) is list
    assert all(type(row) is dict and all(map(plain, row.values())) for row in rows), rows
    assert len(result.frame()) == len(rows)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return resnet152().eval()


@pytest.fixture(scope="module")
def example() -> tuple[torch.Tensor]:
    return (torch.zeros(1, 3, 32, 32),)


@pytest.fixture(scope="module")
def chart(model: nn.Module, example: tuple[torch.Tensor]) -> ChannelMap:
    return trace(model, example)


@pytest.fixture(scope="module")
def plan(model: nn.Module, example: tuple[torch.Tensor], chart: ChannelMap) -> Plan:
    settings = PruneSettings(BudgetSettings(macs=0.5, size_mb=150), criterion="l2")
    return plan_model(model, example, settings, channel_map=chart).plan


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(256, 10))


def small_plan() -> Plan:
    settings = PruneSettings(BudgetSettings(macs=0.5, params=0.6), criterion="l2")
    return plan_model(small(), (torch.zeros(1, 3, 8, 8),), settings).plan


def test_a_channel_map_names_groups_and_locks(chart: ChannelMap) -> None:
    check(chart)
    text = str(chart)
    assert len(chart.rows()) == len(chart.groups)
    assert f"... {len(chart.groups) - 30} more rows; .rows() has all" in text
    assert re.search(r"layer1\.0\.conv3 +256  layer1\.0\.conv3, 3 more +layer1\.1\.conv1, 3 more", text)
    assert re.search(r"fc +1000 +output of the model", text)
    row = next(row for row in chart.rows() if row["group"] == "layer1.0.conv3")
    assert row["made_by"] == ["layer1.0.conv3", "layer1.0.downsample.0", "layer1.1.conv3", "layer1.2.conv3"]


def test_heads_are_inside_their_attention() -> None:
    chart = trace(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (torch.zeros(1, 5, 32),))
    inside = [row for row in chart.rows() if row["group"].startswith("self_attn")]
    assert [row["channels"] for row in inside][:1] == [4]
    assert all(row["made_by"] == row["read_by"] == ["self_attn"] for row in inside)


def test_a_plan_names_layers_and_budgets(plan: Plan, tmp_path: Path) -> None:
    check(plan)
    assert re.search(r"size_mb +241 MB +150 MB +\d+ MB", str(plan))
    assert re.search(r"macs +100\.00 % +50\.00 % +50\.00 %  binds", str(plan))
    plan.save(tmp_path)
    read = load_plan(tmp_path)
    assert str(read) == str(plan)
    assert read.rows() == plan.rows()


def test_a_small_plan_as_it_reads() -> None:
    found = small_plan()
    assert repr(found) == (
        "<Plan: MACs 28.8 k -> 13.7 k (47.5 %), parameters 3.96 k -> 2.21 k (55.8 %), channels 24 -> 15 (62.5 %); "
        "criterion l2, scope uniform>"
    )
    assert str(found).partition("\n\n")[2] == (
        "  budget     dense  asked for     left\n"
        "  macs    100.00 %    50.00 %  47.48 %  binds\n"
        "  params  100.00 %    60.00 %  55.78 %\n\n"
        "  layer      inputs   outputs    MACs    left   share\n"
        "  0               –   8 ->  5  7.78 k  4.86 k  62.5 %\n"
        "  2        8 ->   5  16 -> 10  18.4 k  7.20 k  39.1 %\n"
        "  4      256 -> 160        10  2.56 k  1.60 k  62.5 %"
    )
    assert found.rows()[1] == {
        "layer": "2", "in_dense": 8, "in_kept": 5, "out_dense": 16, "out_kept": 10,
        "macs_dense": 18432, "macs_kept": 7200,
    }  # fmt: skip
    check(found.channel_map)


def test_paths_of_modules_are_escaped() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("<script>alert(1)</script>", nn.Linear(4, 8))
            self.add_module("<b>", nn.Linear(8, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self.children():
                x = module(x)
            return x

    planned = plan_model(Odd(), (torch.zeros(1, 4),), PruneSettings(BudgetSettings(macs=0.6), criterion="l2"))
    for result in (planned.plan, planned.plan.channel_map):
        assert "<script>" in str(result)
        assert "<script>" not in result._repr_html_()
        assert "&lt;script&gt;alert(1)" in result._repr_html_()
