"""A small net that every criterion can score, and its evidence, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.criteria.scoring import score
from prunekit.statistics.channel_stats import ChannelStats
from prunekit.statistics.channel_stats_collector import calibrate
from prunekit.statistics.taylor_terms import TaylorTerms, collect_gradients

Scores = npt.NDArray[np.float64]


class SmallNet(nn.Module):
    """conv1 (3 -> 6), norm1, ReLU, conv2 (6 -> 5), norm2, ReLU, flattened 2x2 into fc (20 -> 4)."""

    def __init__(self, *, functional: bool = False) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.relu1, self.relu2 = (nn.Identity(), nn.Identity()) if functional else (nn.ReLU(), nn.ReLU(inplace=True))
        self.act = F.relu if functional else nn.Identity()
        self.fc = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.relu1(self.norm1(self.conv1(x))))
        return self.fc(self.act(self.relu2(self.norm2(self.conv2(x)))).flatten(1))  # type: ignore[no-any-return]


def small_net(seed: int = 0, *, functional: bool = False) -> SmallNet:
    """The net with random weights, norms included."""
    torch.manual_seed(seed)
    model = SmallNet(functional=functional).double().eval()
    randomize_norms(model)
    return model


def randomize_norms(model: nn.Module) -> None:
    """Gives every BatchNorm scales, shifts and statistics of its own, in place."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.normal_().add_(0.3)
                module.bias.normal_()
                module.running_mean.normal_(std=0.1)  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]


def data(size: int = 2, classes: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Three batches of eight images and labels."""
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(3, 8, 3, size, size, dtype=torch.float64, generator=draw)
    return list(zip(images, torch.randint(classes, (3, 8), generator=draw), strict=True))


@dataclass(frozen=True, eq=False)
class Scored:
    """A model with everything that criteria look at."""

    model: nn.Module
    chart: ChannelMap
    stats: ChannelStats
    gradients: TaylorTerms

    def __call__(self, criterion: str) -> Scores:
        return score(criterion, self.model, self.chart, stats=self.stats, gradients=self.gradients)

    def along(self, criterion: str, name: str, axis: int = 0) -> Scores:
        """Scores in the order of the indices along a parameter's axis."""
        labels = self.chart.labels[name][axis]
        assert labels is not None
        return self(criterion)[labels]


def scored(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Scored:
    """Traces a model and collects statistics and gradients."""
    chart = trace(model, (batches[0][0][:1],))
    stats = calibrate(model, batches)
    return Scored(model, chart, stats, collect_gradients(model, batches, F.cross_entropy, second_order=True))
