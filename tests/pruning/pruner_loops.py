"""A small network, its batches, and loops for tests of pruners."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from prunekit.hooks.hook import count_hooks
from prunekit.pruning.pruner import Pruner


class Net(nn.Module):
    """Convolutions with a norm each, a shortcut, and a linear layer; without dropout, in float64."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.two, self.group, self.back = nn.Conv2d(8, 12, 3), nn.GroupNorm(3, 12), nn.Conv2d(12, 8, 3, padding=2)
        self.fc = nn.Linear(32, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.one(x.double())).relu()
        x = x + self.back(self.group(self.two(x)).relu())
        return self.fc(F.adaptive_avg_pool2d(x, 2).flatten(1))  # type: ignore[no-any-return]


X, Y = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4
MOMENTUM = partial(SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)


def batch(number: int) -> tuple[Tensor, Tensor]:
    order = torch.randperm(8, generator=torch.Generator().manual_seed(number))
    return X[order] + 0.1 * number, Y[order]


def step(model: nn.Module, optimizer: Optimizer, number: int) -> float:
    images, labels = batch(number)
    loss = F.cross_entropy(model(images), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def loop(model: nn.Module, optimizer: Optimizer, pruner: Pruner, numbers: range) -> None:
    for number in numbers:
        step(model, optimizer, number)
        pruner.step()


def count_all(model: nn.Module, *optimizers: Optimizer) -> int:
    """Hooks on the model and on optimizers."""
    tables = (table for it in optimizers for table in (it._optimizer_step_pre_hooks, it._optimizer_step_post_hooks))
    return count_hooks(model) + sum(len(table) for table in tables)


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4))
