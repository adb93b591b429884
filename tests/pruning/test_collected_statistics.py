"""Several budgets from one collection of statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import prunekit as pk
from prunekit.criteria import elimination
from prunekit.errors import UsageError
from prunekit.pruning import collected_statistics as collecting
from prunekit.pruning import prune, sample_statistics
from prunekit.utils import context


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3)).eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(64, 6, generator=torch.Generator().manual_seed(1))


def test_plans_are_those_of_separate_calls_and_orders_are_found_once(
    monkeypatch: pytest.MonkeyPatch, x: torch.Tensor
) -> None:
    model, orders = net(), list[int]()
    alone = [pk.prune(model, calibration=x, macs=macs) for macs in (0.7, 0.4)]
    eliminate = elimination.eliminate
    monkeypatch.setattr(elimination, "eliminate", lambda labels, *args: orders.append(1) or eliminate(labels, *args))
    collected = pk.collect(model, x)

    def again(*args: object, **named: object) -> None:
        raise AssertionError("collected already")

    monkeypatch.setattr(sample_statistics, "patch_statistics", again)
    together = [pk.prune(model, calibration=collected, macs=macs) for macs in (0.7, 0.4)]
    assert len(orders) == len(collected.channel_map.groups)
    for one, other in zip(alone, together, strict=True):
        assert one.plan == other.plan or one.plan.widths() == other.plan.widths()
        assert one.notes == other.notes
        for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    plan = pk.plan(model, calibration=collected, macs=0.4)
    assert plan.widths() == alone[1].plan.widths()


def test_other_criteria_and_patterns_take_the_samples(x: torch.Tensor) -> None:
    model = net()
    collected = pk.collect(model, x)
    for keywords in ({"criterion": "wanda", "macs": 0.5}, {"pattern": "2:4"}):
        one, other = (pk.prune(model, calibration=data, **keywords) for data in (x, collected))  # type: ignore[arg-type]
        for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_loader_gives_as_many_samples_as_to_prune(x: torch.Tensor) -> None:
    model, loader = net(), torch.utils.data.DataLoader(x, batch_size=4)
    collected = pk.collect(model, loader)
    assert torch.equal(collected.samples, x)
    alone = pk.prune(model, calibration=loader, macs=0.5)
    together = pk.prune(model, calibration=collected, macs=0.5)
    for mine, theirs in zip(alone.model.parameters(), together.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_it_shows_what_was_collected(x: torch.Tensor) -> None:
    collected = pk.collect(net(), x)
    assert repr(collected) == "<Collected: 64 samples of Sequential, moments of 2 layers, 0 MiB>"
    assert [row["layer"] for row in collected.rows()] == ["2.weight", "4.weight"]


def test_another_model_other_weights_and_other_traces_are_refused(x: torch.Tensor) -> None:
    model = net()
    collected = pk.collect(model, x)
    with pytest.raises(UsageError, match="collected of another Sequential"):
        pk.prune(net(), calibration=collected, macs=0.5)
    with pytest.raises(UsageError, match="outputs: the model was traced by collect"):
        pk.prune(model, calibration=collected, macs=0.5, outputs=0)
    with pytest.raises(UsageError, match="example: the model was traced by collect"):
        pk.plan(model, x[:2], calibration=collected, macs=0.5)
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(UsageError, match=r"'2.weight' of the model was changed since collect"):
        pk.prune(model, calibration=collected, macs=0.5)
    assert collecting.collect(model, x).notes == collected.notes


def test_a_large_model_is_compared_on_a_few_samples_at_a_time(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor) -> None:
    model, sizes = net(), list[list[int]]()
    usual = pk.prune(model, calibration=x, macs=0.5)
    verify = prune.verify

    def watched(*args: Any, **named: Any) -> Any:
        sizes.append([len(example[0]) for example in args[3]])
        return verify(*args, **named)

    monkeypatch.setattr(prune, "verify", watched)
    monkeypatch.setattr(context, "LARGE", 1)
    large = pk.prune(model, calibration=x, macs=0.5)
    assert sizes == [[2, 2, 2, 2]]
    for mine, theirs in zip(usual.model.parameters(), large.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
