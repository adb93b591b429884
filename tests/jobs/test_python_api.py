"""The Python API: pruning in one call, and the same journey step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchvision

import prunekit
from prunekit.data.loader import batches
from prunekit.data.sources import load_splits
from prunekit.errors import PlanError, UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.measure.model_size import count_macs
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings

EXAMPLE = (torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)),)


def test_prune_in_one_call() -> None:
    model = torchvision.models.resnet18(num_classes=10)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pruned = prunekit.prune(model, EXAMPLE, macs=0.4, round_to=8)
    assert type(pruned.model) is type(model)
    assert count_macs(pruned.model, EXAMPLE) <= 0.4 * count_macs(model, EXAMPLE)
    assert pruned.max_relative_difference <= 1e-9
    assert count_hooks(pruned.model) == count_hooks(model) == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    widths = [m.out_channels for m in pruned.model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert all(width % 8 == 0 for width in widths)


def test_the_plan_of_a_transformer_compacts_it_again() -> None:
    """It knows of the sizes that the trial had to set: the images' reshape to `hidden_dim` here."""
    model = torchvision.models.VisionTransformer(32, 8, 2, 4, 16, 32, num_classes=5).eval()
    pruned = prunekit.prune(model, EXAMPLE, channels=0.5)
    chart, keep = pruned.plan.channel_map, pruned.plan.keep
    assert chart.free_share(name for name, _ in model.named_parameters()) > 0.99
    assert pruned.model.hidden_dim == 8
    with torch.no_grad():
        assert torch.equal(prunekit.compact(model, pruned.plan)(*EXAMPLE), pruned.model(*EXAMPLE))
    assert count_macs(pruned.model, EXAMPLE) == chart.macs(keep) < 0.4 * count_macs(model, EXAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("criterion", ["l1", "random"])
@pytest.mark.parametrize("scope", ["uniform", "global"])
def test_criteria_and_scopes_meet_the_budget(criterion: str, scope: str) -> None:
    model = torchvision.models.mobilenet_v3_small(num_classes=10)
    pruned = prunekit.prune(model, EXAMPLE, macs=0.5, criterion=criterion, scope=scope, seed=3)  # type: ignore[arg-type]
    left = count_macs(pruned.model, EXAMPLE) / count_macs(model, EXAMPLE)
    assert 0.45 < left <= 0.5
    same = prunekit.prune(model, EXAMPLE, macs=0.5, criterion=criterion, scope=scope, seed=3)  # type: ignore[arg-type]
    assert (same.plan.keep == pruned.plan.keep).all()


@pytest.mark.slow
def test_the_journey_step_by_step(tmp_path: Path) -> None:
    splits = load_splits(DataSettings(image_size=32))
    images = batches(splits.train, 32, shuffle_seed=0, indices=range(64))
    model = torchvision.models.resnet18(num_classes=10)
    stats = prunekit.calibrate(model, images)
    settings = PruneSettings(budget=BudgetSettings(channels=0.5), criterion="activation")
    plan = prunekit.plan(model, EXAMPLE, settings=settings, stats=stats)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    with prunekit.masked(model, plan, optimizer):
        for x, y in images:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    small = prunekit.compact(model, plan)
    proof = prunekit.verify(model, small, plan, [EXAMPLE])
    assert proof.max_relative_difference <= 1e-9
    assert proof.inputs == 2
    build = ModelSettings("resnet18", arguments={"num_classes": 10})
    folder = prunekit.save(small, tmp_path / "model", plan, build=build)
    loaded = prunekit.load(folder)
    assert torch.equal(loaded(EXAMPLE[0]), small.eval()(EXAMPLE[0]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "budget: expected at least one of channels, macs, params, size_mb"),
        ({"params": 2, "size_mb": -1}, "params: expected a share .*; size_mb: expected a number of megabytes"),
        ({"macs": 1.5}, "macs: expected a share above 0 and at most 1, got 1.5"),
        ({"channels": 0.0}, "channels: expected a share above 0"),
        ({"macs": 0.5, "round_to": 0}, "round_to: expected a whole number of at least 1, or None, got 0"),
        (
            {"macs": 0.5, "scope": "everywhere"},
            "scope: expected one of 'uniform', 'global', 'per_mac', 'capacity', got 'everywhere'",
        ),
        ({"macs": 0.5, "criterion": "l3"}, "l2"),
        ({"macs": 0.5, "criterion": "activation"}, "stat"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prunekit.prune(torch.nn.Conv2d(3, 8, 3), EXAMPLE, **arguments)  # type: ignore[arg-type]


@pytest.mark.slow
def test_globs_and_limits() -> None:
    model = torchvision.models.resnet18(num_classes=10)
    with pytest.raises(PlanError, match=r"did you mean 'layer1"):
        prunekit.prune(model, EXAMPLE, macs=0.5, ignore=["layer1.0.conv9"])
    with pytest.raises(PlanError, match="removes nothing"):
        prunekit.prune(model, EXAMPLE, channels=1.0)
    with pytest.raises(PlanError, match="no channel is free"):
        prunekit.prune(model, EXAMPLE, macs=0.5, ignore=["*"])
    kept = prunekit.prune(model, EXAMPLE, channels=0.5, ignore=["layer1.*"], ratios={"layer4.0.conv1": 0.25}).model
    assert kept.layer1[0].conv1.out_channels == 64
    assert kept.layer4[0].conv1.out_channels == 128
    assert kept.layer4[1].conv1.out_channels == 256


class Branching(torch.nn.Module):
    """Takes its middle layer only for batches of more than two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (torch.nn.Linear(a, b) for a, b in ((6, 8), (8, 8), (8, 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        return self.last(self.middle(x).relu() if len(x) > 2 else x)


def test_branches_that_only_further_examples_take() -> None:
    model, few, many = Branching().eval(), (torch.randn(2, 6),), (torch.randn(5, 6),)
    pruned = prunekit.prune(model, few, channels=0.5, more_examples=[many])
    assert pruned.model.middle.weight.shape == (4, 4)
    assert pruned.model(*many).shape == (5, 3)
    settings = PruneSettings(budget=BudgetSettings(channels=0.5))
    with pytest.raises(UsageError, match="traced on 2 examples, got 1"):
        prunekit.plan(model, few, settings=settings, channel_map=prunekit.trace(model, few, many))
