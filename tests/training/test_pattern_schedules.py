"""Patterns of zeros that a schedule brings into force while a model is trained, by `Pruner` in one's own loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pattern_masks import holds
from process_group import together
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from prunekit.errors import PlanError, UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.planning.patterns.pattern import Pattern
from prunekit.planning.plan import Plan
from prunekit.pruning.pruner import Pruner
from prunekit.settings.pruning import BudgetSettings, PruneSettings, ScheduleSettings
from prunekit.settings.weight_pattern import PatternSettings

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": partial(SGD, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "adam, foreach": partial(Adam, lr=1e-2, weight_decay=1e-2, foreach=True),
    "adamw, fused": partial(AdamW, lr=1e-2, fused=True),
}
REGROWN = ScheduleSettings("cubic", unit="step", every=2, regrow=True, freeze=10)
WAYS: dict[str, dict[str, Any]] = {
    "grows": {"sparsity": 0.8},
    "2:4 and channels": {"pattern": "2:4", "macs": 0.6},
    "by gradients": {"pattern": PatternSettings("block", 0.5, block=(4, 1)), "schedule": REGROWN},
    "movement": {
        "pattern": PatternSettings("kernel", 0.5, scope="uniform"),
        "schedule": ScheduleSettings("linear", unit="step", every=2, regrow=True, freeze=8, score="movement"),
    },
    "straight-through": {
        "pattern": "2:4",
        "schedule": ScheduleSettings("linear", unit="step", every=1, regrow=True, gradients="straight_through"),
    },
}
X = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4),
    )  # fmt: skip


def batch(number: int) -> tuple[Tensor, Tensor]:
    order = torch.randperm(8, generator=torch.Generator().manual_seed(number))
    return X[order] + 0.1 * number, torch.arange(8)[order] % 4


def step(model: nn.Module, optimizer: Optimizer, number: int, *, precision: Any = None) -> None:
    optimizer.zero_grad()
    images, labels = batch(number)
    with precision or nullcontext():
        loss = F.cross_entropy(model(images), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def require_zeros(model: nn.Module, plan: Plan) -> None:
    for name, mask in plan.element_masks.items():
        pruned = model.get_parameter(name)[~mask]
        assert not pruned.any(), name
        assert not pruned.signbit().any(), name


def trained(pruner: Pruner, model: nn.Module, optimizer: Optimizer, steps: range, **how: Any) -> Iterator[int]:
    for number in steps:
        step(model, optimizer, number, **how)
        require_zeros(model, pruner.plan)
        yield number
        pruner.step()
        require_zeros(model, pruner.plan)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zeros_are_exact_after_every_step_and_in_the_compact_model(name: str, way: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    half = torch.autocast("cpu", dtype=torch.bfloat16) if name == "momentum" else None
    pruner = Pruner(model, optimizer, X[:2], steps=6, average=average, **WAYS[way])
    for _ in trained(pruner, model, optimizer, range(10), precision=half):
        average.update_parameters(model)
        require_zeros(average.module, pruner.plan)
    assert pruner.done
    plan, settings = pruner.plan, pruner.settings.pattern
    assert settings is not None
    small, _ = pruner.finish()
    assert pruner.verification is not None
    assert pruner.verification.max_relative_difference < 1e-12
    assert set(plan.element_masks) == {"3.weight", "7.weight"}
    assert pruner.average is not None
    zeros = 0
    for one, mask in plan.element_masks.items():
        cut = mask[np.ix_(plan.kept(one, 0), plan.kept(one, 1))]
        zeros += int((~cut).sum())
        assert holds(Pattern.of(settings), cut.reshape(*cut.shape[:2], -1))
        for compact in (small, pruner.average.module):
            assert not compact.get_parameter(one)[~cut].any()
    if settings.kept_of is None:
        size = sum(weight.numel() for weight in small.parameters() if weight.ndim > 1)
        assert zeros == pytest.approx(settings.zeros * size, abs=9)
    assert count_hooks(model) == 0


def test_movement_is_that_of_the_values_behind_the_zeros() -> None:
    """Sanh et al. 2020: -w dL/dw, where the gradient is that of the masked model and w the value that was masked."""
    schedule = ScheduleSettings("oneshot", unit="step", score="movement", regrow=True, every=3, freeze=7)
    model = net().double()
    optimizer = SGD(model.parameters(), lr=0.02)
    pattern = PatternSettings("unstructured", sparsity=0.5, scope="uniform")
    pruner = Pruner(model, optimizer, X[:2].double(), pattern=pattern, schedule=schedule, begin=4)
    name, sums = "3.weight", torch.zeros(16, 8, 3, 3, dtype=torch.float64)
    weight = model.get_parameter(name)
    behind = torch.zeros_like(sums)
    for number in range(8):
        images, labels = batch(number)
        before = weight.detach().clone()
        copied = copy.deepcopy(model)
        F.cross_entropy(copied(images.double()), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        F.cross_entropy(model(images.double()), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        gradient = copied.get_parameter(name).grad
        assert gradient is not None
        sums -= (before + behind) * gradient
        old, values = pruner.plan.element_masks.get(name), weight.detach().clone()
        pruner.step()
        if pruner.changes and pruner.changes[-1].step == number + 1:
            mask = pruner.plan.element_masks[name]
            ranked = sums.float().flatten()
            threshold = ranked.sort().values[int((~mask).sum()) - 1]
            assert torch.equal(mask.flatten(), ranked > threshold)
            whole = values if old is None else torch.where(old, values, behind)
            assert torch.equal(weight, whole * mask)
            behind = whole * ~mask
    assert sum(change.weights_regrown for change in pruner.changes) > 0
    pruner.close()


def test_weights_grow_again_at_zero_where_the_gradient_is_largest() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    pattern = PatternSettings("unstructured", sparsity=0.7, scope="uniform")
    pruner = Pruner(model, optimizer, X[:2], pattern=pattern, schedule=REGROWN, steps=4, gradient_masks=True)
    name, grown = "3.weight", 0
    for number in range(8):
        copied = copy.deepcopy(model)
        images, labels = batch(number)
        F.cross_entropy(copied(images), labels).backward()  # type: ignore[no-untyped-call]
        dense = copied.get_parameter(name).grad
        assert dense is not None
        step(model, optimizer, number)
        masked = model.get_parameter(name).grad
        assert masked is not None
        before = pruner.plan.element_masks.get(name)
        if before is not None:
            assert not masked[~before].any()  # which the planner read before
        pruner.step()
        after = pruner.plan.element_masks.get(name)
        if before is None or after is None or before is after:
            continue
        new = ~before & after
        assert not model.get_parameter(name)[new].any()
        if new.any():
            grown += int(new.sum())
            assert dense[new].abs().min() >= dense[~before & ~after].abs().max()
    assert grown > 0
    assert grown <= sum(change.weights_regrown for change in pruner.changes)
    pruner.close()


def test_a_pattern_is_exact_in_what_the_last_channels_leave() -> None:
    model = net()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    seen: list[dict[str, Any]] = []
    pruner = Pruner(model, optimizer, X[:2], pattern="2:4", macs=0.5, steps=6, on_change=seen.append)
    for _ in trained(pruner, model, optimizer, range(7)):
        pass
    assert {"macs_left", "weights_left", "weights_pruned", "weights_regrown"} <= seen[-1].keys()
    assert pruner.rows()[-1]["weights_left"] == seen[-1]["weights_left"]
    assert "MACs " in str(pruner)
    small, _ = pruner.finish()
    assert small[3].weight.shape[1] % 4 == small[7].weight.shape[1] % 4 == 0
    for index in (3, 7):
        groups = (small[index].weight != 0).view(len(small[index].weight), -1, 4, small[index].weight[0, 0].numel())
        assert int(groups.sum(2).max()) == 2


@pytest.mark.slow
def test_a_compiled_model_follows_its_pattern() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    pruner = Pruner(model, optimizer, X[:2], steps=2, **(WAYS["straight-through"] | {"schedule": "linear"}))
    compiled = torch.compile(model, backend="eager")
    for number in range(4):
        step(compiled, optimizer, number)
        require_zeros(model, pruner.plan)
        pruner.step()
    assert pruner.finish()[0](X).shape == (8, 4)


def _replicated(ways: list[str]) -> list[tuple[Any, ...]]:
    found, rank = [], torch.distributed.get_rank()
    for way in ways:
        model = DistributedDataParallel(net(rank))  # which gives all the first one's weights
        optimizer = SGD(model.parameters(), lr=0.2, momentum=0.9)
        pruner = Pruner(model, optimizer, X[:2], steps=8, **WAYS[way])
        for number in range(12):
            step(model, optimizer, 10 * number + rank)
            require_zeros(model.module, pruner.plan)
            pruner.step()
        small, _ = pruner.finish()
        found.append((pruner.changes, pruner.plan.digest, [*small.parameters()]))
    return found


@pytest.mark.slow
def test_processes_follow_one_pattern(tmp_path: Path) -> None:
    for first, second in zip(*together(2, tmp_path, _replicated, ["by gradients", "straight-through"]), strict=True):
        assert first[:2] == second[:2]
        assert sum(change.weights_regrown for change in first[0]) > 0
        assert all(torch.equal(one, other) for one, other in zip(first[2], second[2], strict=True))


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"pattern": "1:3"}, PlanError, "pattern: 1:3 doesn't fit 2 of the layers: 3 has 8 inputs, no multiple of 3"),
        ({"sparsity": 0.99}, PlanError, "pattern.sparsity: 99.0 % of .* at most .* is possible"),
        (
            {"sparsity": 0.5, "schedule": ScheduleSettings(gradients="straight_through")},
            UsageError,
            "schedule.gradients: expected 'masked', because regrow is false",
        ),
        (
            {"macs": 0.5, "schedule": ScheduleSettings(gradients="straight_through", regrow=True)},
            UsageError,
            "schedule.gradients: expected 'masked', because there is no pattern",
        ),
        (
            {"sparsity": 0.5, "schedule": ScheduleSettings(masked_decay=0.1)},
            UsageError,
            "schedule.masked_decay: expected nothing, because gradients are masked",
        ),
        (
            {
                "sparsity": 0.5,
                "schedule": ScheduleSettings(regrow=True, score="movement", gradients="straight_through"),
            },
            UsageError,
            "schedule.gradients: expected 'masked', because score is 'movement'",
        ),
        (
            {"settings": PruneSettings(BudgetSettings(), pattern=PatternSettings("2:4"), compact_early=True)},
            UsageError,
            "compact_early: expected false, because a pattern is given",
        ),
    ],
    ids=["width", "budget", "lost", "channels", "decay", "movement", "early"],
)
def test_what_does_not_fit_is_said_before_anything_is_hooked(
    given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(kind, match=message):
        Pruner(model, optimizer, X[:2], steps=4, **given)
    assert count_hooks(model) == 0
