"""A plan is that of one model: whatever takes both says so before it does anything, and names the first misfit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equivalence import Net, image, randomized, settled_plan, snapshot
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

import prunekit
from prunekit.channels.trace import trace
from prunekit.compaction.compact_model import spread_
from prunekit.criteria.gradient import Movement
from prunekit.criteria.scoring import score
from prunekit.errors import PlanError, UsageError
from prunekit.masks.gradient_masks import GradientMasks
from prunekit.masks.masked_model import sparsity
from prunekit.masks.weight_masks import WeightMasks
from prunekit.planning.plan import Plan, load_plan
from prunekit.repair.repair_model import repair


def forward(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = x + block(x) if x.shape[1] == 8 else block(x)
    return net.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def block(inner: int, channels: int = 8) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, inner, 3, padding=1), nn.BatchNorm2d(inner), nn.Conv2d(inner, 8, 1))


def net(*inner: int, classes: int = 3) -> nn.Module:
    widths = inner or (6, 12)
    blocks = [block(width, 8 if index else 3) for index, width in enumerate(widths)]
    return randomized(Net(forward, blocks=nn.ModuleList(blocks), head=nn.Linear(8, classes)))


MODEL = net()
PLAN = settled_plan(MODEL, image())
SMALL = prunekit.compact(MODEL, PLAN)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def entered(context: Any) -> None:
    with context:
        pass


TAKERS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "compact": lambda model, _: prunekit.compact(model, PLAN),
    "masked": lambda model, _: entered(prunekit.masked(model, PLAN)),
    "weight masks": lambda model, _: WeightMasks(model, PLAN),
    "gradient masks": lambda model, _: GradientMasks(model, PLAN),
    "changing masks": lambda model, _: prunekit.ChangingMasks(model, PLAN),
    "verify": lambda model, _: prunekit.verify(model, SMALL, PLAN, [image()]),
    "spread_": lambda model, _: spread_(model, SMALL, PLAN),
    "transfer": lambda model, _: prunekit.transfer(SGD, model, SMALL, PLAN),
    "transfer_average": lambda model, _: prunekit.transfer_average(AveragedModel(model), PLAN),
    "repair": lambda model, _: repair(model, PLAN, image(batch=16)[0]),
    "score": lambda model, _: score("l2", model, PLAN.channel_map),
    "movement": lambda model, _: Movement(model, PLAN.channel_map, SGD),
    "plan": lambda m, _: prunekit.plan(m, image(), macs=0.5, channel_map=PLAN.channel_map),
    "a plan that was loaded": lambda model, folder: (PLAN.save(folder), prunekit.compact(model, load_plan(folder))),
}


@pytest.mark.parametrize("taker", TAKERS)
def test_a_longer_model_of_the_same_names_is_refused_and_left_alone(taker: str, tmp_path: Path) -> None:
    """All that the plan knows is there and fits; what it doesn't know would stay dense among narrow layers."""
    model = net(6, 12, 12)
    before = snapshot(model)
    with pytest.raises(PlanError, match=r"'blocks.2.0.weight' of shape \(12, 8, 3, 3\) does not fit .* none of that"):
        TAKERS[taker](model, tmp_path)
    assert all(torch.equal(value, snapshot(model)[name]) for name, value in before.items())


NO_PLANS: dict[str, tuple[Any, str]] = {
    "a path": ("kept/plan", r"got the path 'kept/plan'; .*prunekit\.load_plan\('kept/plan'\)"),
    "a folder": (Path("plan"), r"got the path .*prunekit\.load_plan\('plan'\)"),
    "nothing": (None, r"got None; give prunekit\.plan\(model, x, macs=0\.5\)"),
    "a map": (PLAN.channel_map, r"got a ChannelMap, which .* prunekit\.plan\("),
    "a result": (SimpleNamespace(plan=PLAN), r"got SimpleNamespace; give its \.plan"),
}
PLAN_TAKERS: dict[str, Callable[[Any, Path], Any]] = {
    "compact": lambda plan, _: prunekit.compact(MODEL, plan),
    "masked": lambda plan, _: entered(prunekit.masked(MODEL, plan)),
    "changing masks": lambda plan, _: prunekit.ChangingMasks(MODEL, plan),
    "verify": lambda plan, _: prunekit.verify(MODEL, SMALL, plan, [image()]),
    "save": lambda plan, folder: prunekit.save(SMALL, folder / "model", plan),
    "spread_": lambda plan, _: spread_(MODEL, SMALL, plan),
    "transfer": lambda plan, _: prunekit.transfer(SGD, MODEL, SMALL, plan),
    "transfer_average": lambda plan, _: prunekit.transfer_average(AveragedModel(MODEL), plan),
    "repair": lambda plan, _: repair(MODEL, plan, image(batch=16)[0]),
    "sparsity": lambda plan, _: sparsity(MODEL, plan),
}


@pytest.mark.parametrize("taker", PLAN_TAKERS)
def test_what_is_no_plan_is_refused_with_the_call_that_gives_one(taker: str, tmp_path: Path) -> None:
    for given, said in NO_PLANS.values():
        with pytest.raises(UsageError, match=rf"plan: expected a prunekit\.Plan, {said}"):
            PLAN_TAKERS[taker](given, tmp_path)


@pytest.mark.parametrize("taker", TAKERS)
def test_a_compact_model_in_place_of_the_dense_one_is_refused(taker: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"'blocks\.0\.\d\.weight' of shape .* does not fit the .*, which has \("):
        TAKERS[taker](prunekit.compact(MODEL, PLAN), tmp_path)


def changed(change: Callable[[Any], object]) -> nn.Module:
    model = copy.deepcopy(MODEL)
    change(model)
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (SMALL, "the model is compact already: give the dense one"),
        (net(classes=4), r"parameter 'head.weight' of shape \(4, 8\) does not fit the plan, which has \(3, 8\)"),
        (net(6), "the plan knows 'blocks.1.0.weight' of shape .*, which this model does not have; did you mean"),
        (nn.ModuleList([MODEL]), r"what fits is a part of this ModuleList: give its `\.0`"),
        (nn.ModuleDict({"a": nn.ModuleDict({"student": MODEL})}), r"of this ModuleDict: give its `\.a\.student`"),
        (changed(lambda model: parametrizations.weight_norm(model.head)), "'head.parametrizations.weight.original0'"),
        (changed(lambda model: model.blocks.append(nn.BatchNorm2d(8, affine=False))), "buffer 'blocks.2.running_mean'"),
        (changed(lambda model: setattr(model.head, "bias", None)), "the plan knows 'head.bias'"),
        (changed(lambda model: model.register_buffer("blind", torch.ones(3))), ""),  # it may make its own anew
        (
            changed(lambda model: model.blocks[0][1].register_buffer("calls", torch.ones(()))),
            "",
        ),  # nothing of it can go
        (changed(lambda model: model.half().requires_grad_(requires_grad=False).to("meta")), ""),
        (changed(lambda model: model.compile(backend="eager")), ""),
    ],
)
def test_what_belongs_and_what_does_not(model: nn.Module, said: str) -> None:
    if not said:
        PLAN.require_model(model)
        return
    with pytest.raises(PlanError, match=said):
        prunekit.compact(model, PLAN)


def test_a_part_that_states_sizes_or_takes_a_mean_is_missed_by_its_path() -> None:
    norm = nn.LayerNorm(8, elementwise_affine=False)
    model = Net(lambda net, x: net.b(net.norm(net.a(x))), a=nn.Linear(4, 8), norm=norm, b=nn.Linear(8, 3))
    plan = settled_plan(model, (torch.randn(2, 4),))
    other = Net(lambda net, x: net.b(net.a(x)), a=nn.Linear(4, 8), b=nn.Linear(8, 3))
    with pytest.raises(PlanError, match="the plan knows a module 'norm', which this model does not have"):
        prunekit.compact(other, plan)


class Tied(nn.Module):
    """A table that reads and writes, with a head that is the same tensor or one of its own."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table, self.a, self.b = nn.Embedding(11, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 11, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(x + self.b(self.a(x).relu()))  # type: ignore[no-any-return]


def test_tied_weights() -> None:
    ids = (torch.arange(8).view(2, 4),)
    one, two = Tied(tied=True), Tied(tied=False)
    of_one, of_two = (settled_plan(randomized(model), ids) for model in (one, two))
    with pytest.raises(PlanError, match=r"'head.weight' of shape \(11, 16\) does not fit the plan, which has none"):
        prunekit.compact(two, of_one)
    small = prunekit.compact(one, of_two)  # both names lose the same
    assert small.get_parameter("head.weight") is small.get_parameter("table.weight")
    optimizer = torch.optim.Adam(one.parameters())
    with prunekit.masked(one, of_one, optimizer):
        one(*ids).square().sum().backward()
        optimizer.step()
    small = prunekit.compact(one, of_one)
    prunekit.transfer(optimizer, one, small, of_one)
    assert {id(parameter) for parameter in small.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}


def test_a_tensor_that_is_two_in_the_plan_and_goes_apart_is_found() -> None:
    model = Net(lambda net, x: net.c(net.a(x) * net.b(x + 1)), a=nn.Linear(4, 8), b=nn.Linear(4, 8), c=nn.Linear(8, 3))
    chart = trace(model, (torch.randn(2, 4),))
    labels = {**chart.labels, "b.weight": (chart.labels["b.weight"][0] * 0, None)}  # type: ignore[operator, index]
    plan = Plan(type(chart)(**{**vars(chart), "labels": labels}), [True] * chart.n_labels)  # type: ignore[arg-type]
    model.b.weight = model.a.weight  # type: ignore[union-attr, assignment]
    with pytest.raises(
        PlanError,
        match=r"'b\.weight' and 'a\.weight' are one tensor in the model, and two that lose",
    ):
        plan.require_model(model)


def test_masks_of_single_weights_fit_too() -> None:
    odd = Plan(PLAN.channel_map, PLAN.keep, element_masks={"head.weight": torch.ones(3, 7, dtype=torch.bool)})
    with pytest.raises(PlanError, match=r"element_masks: 'head.weight' of shape \(3, 7\), expected \(3, 8\)"):
        WeightMasks(MODEL, odd)


def test_only_what_the_plan_leaves_is_saved(tmp_path: Path) -> None:
    for model, said in (
        (MODEL, "the model is in its dense size: give prunekit.compact"),
        (net(6, 12, 12), r"give prunekit.compact\(model, plan\) of the dense model that the plan was made for"),
        (nn.ModuleDict({"module": SMALL}), r"give its `\.module`"),
    ):
        with pytest.raises(PlanError, match=said):
            prunekit.save(model, tmp_path / "model", PLAN)
        assert not list(tmp_path.iterdir())
    folded = prunekit.fold_batchnorm(SMALL, image()).model
    for model in (SMALL, folded):
        prunekit.save(model, tmp_path / "model", PLAN)
        again = prunekit.load(tmp_path / "model", model=MODEL)
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
