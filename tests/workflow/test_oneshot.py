"""One-shot pruning and repair beat plain pruning at the same budget, on a model that has learnt something."""

from __future__ import annotations

import pytest
import torch
from equivalence import randomised
from torch import Tensor, nn
from torch.nn import functional as F

import prunekit
from prunekit.errors import DataError, PlanError, UsageError
from prunekit.planning import BudgetSettings, PruneSettings
from prunekit.repair import RepairSettings
from prunekit.workflow.pruning import prune


class Net(nn.Module):
    """A residual block between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv1, self.bn1 = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        x = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def test_a_budget_is_met_with_less_damage_than_by_magnitude() -> None:
    model = randomised(Net()).eval()
    images = torch.randn(128, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    others = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    done = prunekit.prune_oneshot(model, images, PruneSettings(BudgetSettings(macs=0.6)), RepairSettings(rows=4096))
    plain = prune(model, (images[:2],), macs=0.6, criterion="l2", scope="global")
    chart = done.plan.channel_map
    assert chart.macs(done.plan.keep) <= 0.6 * chart.macs()
    assert done.report.kept
    assert done.plan.provenance["prune"]["criterion"] == "elimination"
    assert done.verification.max_relative_difference < 1e-9
    with torch.no_grad():
        want = model(others)
        ours, theirs = ((small.eval()(others) - want).square().mean() for small in (done.model, plain.model))
    assert ours < 0.25 * theirs
    assert set(done.curves) == {group.name for group in chart.groups}


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.randn(7, 3, 8, 8), r"expected at least 8 images .* got a tensor of shape \(7, 3, 8, 8\)"),
        (torch.zeros(0, 3, 8, 8), r"got a tensor of shape \(0, 3, 8, 8\)"),
        (torch.tensor(1.0), r"got a tensor of shape \(\)"),
        ([torch.randn(8, 3, 8, 8)], "expected images as one tensor .* got list"),
    ],
)
def test_images_that_are_too_few_or_none(images: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        prunekit.prune_oneshot(Net().eval(), images, PruneSettings())
    assert isinstance(caught.value, UsageError)


def test_a_budget_out_of_reach_and_a_glob_of_nothing() -> None:
    model, images = randomised(Net()).eval(), torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(PlanError):
        prunekit.prune_oneshot(model, images, PruneSettings(BudgetSettings(macs=1e-6)))
    with pytest.raises(PlanError, match="conv9"):
        prunekit.prune_oneshot(model, images, PruneSettings(exclude=("conv9",)))


def test_the_model_given_stays_as_it_is() -> None:
    model, images = randomised(Net()).train(), torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    done = prunekit.prune_oneshot(model, images, PruneSettings(BudgetSettings(macs=0.6), exclude=("stem",)))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert done.plan.widths()["stem"] == (8, 8)
    assert done.model.conv1.out_channels < 16
