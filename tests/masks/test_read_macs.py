"""MACs of the operators that read masked values: through views, copies and operators that keep zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.hooks.hook import count_hooks
from prunekit.masks.activation_budget import macs_of_readers
from prunekit.masks.activation_masks import Side


def macs(model: nn.Module, x: Tensor, *paths: str, side: Side = "output") -> dict[str, float]:
    return macs_of_readers(model, (x,), paths, side)


def test_convolutions_and_linear_layers_are_counted_at_their_inputs() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(128, 5))
    x = torch.randn(2, 3, 4, 4)
    assert macs(model, x, "0", "3", side="input") == {"0": 2 * 16 * 8 * 27, "3": 2 * 128 * 5}
    assert macs(model, x, "0", "1") == {"0": 0, "1": 2 * 128 * 5}  # the nearest mask counts
    assert macs(model, x, "0") == {"0": 2 * 128 * 5}  # a ReLU in place keeps zeros
    assert count_hooks(model) == 0


class Through(nn.Module):
    """A layer reads a module's output through a function."""

    def __init__(self, function: Any, width: int = 6) -> None:
        super().__init__()
        self.start, self.function, self.layer = nn.Identity(), function, nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.function(self.start(x)))
        return out


@pytest.mark.parametrize(
    ("function", "width", "read"),
    [
        (lambda x: x.transpose(0, 1), 6, True),
        (lambda x: F.pad(x, (1, 1)), 8, True),
        (lambda x: F.silu(x) * torch.ones(6), 6, True),
        (lambda x: torch.cat([x, torch.ones(2, 3, 1)], -1), 7, True),
        (lambda x: x.double().float(), 6, True),
        (lambda x: x + 1, 6, False),
        (lambda x: x.add_(1), 6, False),
        (lambda x: x.softmax(-1), 6, False),
        (lambda x: F.layer_norm(x, (6,)), 6, False),
    ],
)
def test_zeros_are_followed_to_where_they_end(function: Any, width: int, read: bool) -> None:
    found = macs(Through(function, width), torch.randn(2, 3, 6), "start")
    assert found == {"start": 2 * 3 * width * 4 * read}


def test_a_shortcut_around_a_mask_does_not_count_for_it() -> None:
    class Shortcut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.one(x) + self.two(x)
            return out

    assert macs(Shortcut(), torch.randn(3, 4), "one", side="input") == {"one": 3 * 16}


def test_attention_counts_projections_scores_and_values() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    found = macs(model, torch.randn(2, 5, 8), "self_attn", "linear1", "linear2", side="input")
    assert found == {"self_attn": 10 * 8 * 24, "linear1": 10 * 128, "linear2": 10 * 128}
