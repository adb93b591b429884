"""Small networks to quantize, and scores of files: how often their class is that of the model in float."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Array = np.ndarray[Any, Any]
OUTLIER = 3000.0
"""How much larger one channel is than the others, which a scale for all channels leaves no bits."""


class Residual(nn.Module):
    """A network of convolutions with a shortcut, and a layer whose output has an outlier channel if asked for."""

    def __init__(self, outlier: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)
        with torch.no_grad():
            self.second.weight *= 8  # what the shortcut passes matters less
            if outlier:
                self.first.weight[3] *= OUTLIER
                self.second.weight[:, 3] /= OUTLIER
            x = self.features(torch.from_numpy(drawn(64, (3, 10, 10))))
            self.head.bias.copy_(-self.head(x).mean(0) + self.head.bias)  # all classes are about as frequent

    def features(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return (x + self.second(self.first(x).relu())).relu().mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """A block of a transformer on tokens: attention and norms stay in float."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(6, 16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.down(self.up(self.norm(x)).relu())
        return self.head(x.mean(1))  # type: ignore[no-any-return]


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    """A network in eval mode whose weights are always the same."""
    torch.manual_seed(0)
    return kind().eval()


def drawn(count: int, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Normal numbers (count, *shape), whose mean differs from sample to sample."""
    generator = np.random.default_rng(seed)
    means = generator.standard_normal((count, shape[0], *(1 for _ in shape[1:])))
    return (means + generator.standard_normal((count, *shape))).astype(np.float32)


def agreement(model: nn.Module, samples: Array, run: Callable[[Path, Array], Array]) -> Callable[[Path], float]:
    """A score: percent of samples whose class is that of the model in float."""
    with torch.no_grad():
        wanted = model(torch.from_numpy(samples)).argmax(1).numpy()
    return lambda file: 100 * float((run(file, samples).argmax(1) == wanted).mean())
