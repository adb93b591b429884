"""Units that pass half of their channels on and shuffle them with the rest, as those of ShuffleNet v2 (2018) do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 16


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, groups, c // groups, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


def shuffled_and_halved(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w) * 0.5


class Unit(nn.Module):
    """Shuffles by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Conv2d(WIDTH // 2, WIDTH // 2, 1), nn.BatchNorm2d(WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        passed, taken = x.chunk(2, dim=1)
        return channel_shuffle(torch.cat([passed, self.norm(self.mix(taken)).relu()], 1), 2)


class Shuffle(nn.Module):
    """A shuffle by a chain of methods, in a module of its own."""

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        return x.reshape(n, 2, c // 2, h, w).permute(0, 2, 1, 3, 4).reshape(n, c, h, w)


class UnitOfModules(Unit):
    """Shuffles by a module, and splits by a function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.shuffle = Shuffle()

    def forward(self, x: Tensor) -> Tensor:
        passed, taken = torch.chunk(x, 2, 1)
        return self.shuffle(torch.cat([passed, self.norm(self.mix(taken)).relu()], 1))


class HalvedUnit(Unit):
    """Its function does more than shuffle."""

    def forward(self, x: Tensor) -> Tensor:
        passed, taken = x.chunk(2, dim=1)
        return shuffled_and_halved(torch.cat([passed, self.norm(self.mix(taken)).relu()], 1))


def units(cls: type[Unit], count: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, WIDTH, 1), *(cls() for _ in range(count)), nn.Conv2d(WIDTH, 5, 1))
