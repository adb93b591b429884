"""Maps and tokens that a linear layer makes from a vector lose whole channels, as an expert would remove them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from equivalence import TOLERANCE, difference, parity, randomized, settled_plan
from nets_maps import SIDE, WIDTH, Generator, Tokens, vector
from torch import Tensor, nn

import prunekit
from prunekit.compaction.compact_model import compact


def rows_of(channels: np.ndarray[Any, Any], positions: int) -> np.ndarray[Any, Any]:
    return (channels[:, None] * positions + np.arange(positions)).reshape(-1)


def test_a_generator_loses_all_positions_of_a_channel(tmp_path: Path) -> None:
    net = randomized(Generator()).eval()
    plan = settled_plan(net, vector())
    channels = plan.kept("up.weight", 0)
    assert 0 < channels.size < WIDTH
    for name in ("fc.weight", "other.bias", "flat.running_mean"):
        assert np.array_equal(plan.kept(name, 0), rows_of(channels, SIDE * SIDE))
    small: Any = compact(net, plan)
    assert small.shape == (channels.size, SIDE, SIDE)
    prunekit.save(small, tmp_path / "small", plan)
    assert torch.equal(prunekit.load(tmp_path / "small", model=Generator)(*vector()), small(*vector()))
    small.train()(*vector()).square().sum().backward()
    assert all(parameter.grad is not None for parameter in small.parameters())


def test_against_a_narrow_generator_by_hand() -> None:
    def generator(width: int) -> Any:
        fc = nn.Linear(6, width * SIDE**2)
        return nn.Sequential(fc, nn.Unflatten(1, (width, SIDE, SIDE)), nn.ReLU(), nn.Conv2d(width, 3, 3)).double()

    net = randomized(generator(WIDTH)).eval()
    plan = settled_plan(net, vector())
    channels = plan.kept("3.weight", 1)
    narrow, rows = generator(channels.size), torch.from_numpy(rows_of(channels, SIDE**2))
    with torch.no_grad():
        narrow[0].weight.copy_(net[0].weight[rows])  # type: ignore[index]
        narrow[0].bias.copy_(net[0].bias[rows])  # type: ignore[index]
        narrow[3].weight.copy_(net[3].weight[:, channels])  # type: ignore[index]
        narrow[3].bias.copy_(net[3].bias)  # type: ignore[index]
        z = vector()[0].double()
        assert difference(narrow(z), compact(net, plan)(z)) <= 1e-12


def test_tokens_are_normalized_over_their_kept_channels() -> None:
    net: Any = randomized(Tokens(first=False)).eval().double()
    plan = settled_plan(net, (vector()[0].double(),))
    channels = plan.kept("norm.weight", 0)
    assert 0 < channels.size < WIDTH
    grid = plan.kept("fc.weight", 0).reshape(net.number, -1)
    assert np.array_equal(grid % WIDTH, np.tile(channels, (net.number, 1)))
    seen: list[Tensor] = []
    small: Any = compact(net, plan)
    small.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    x = vector()[0].double()
    with torch.no_grad():
        small(x)
        tokens = net.fc(x).view(-1, net.number, WIDTH)[..., channels]
        by_hand = F.layer_norm(tokens, (channels.size,), net.norm.weight[channels], net.norm.bias[channels])
    assert difference(by_hand, seen[0]) <= 1e-12


class DrawnState(nn.Module):
    """Begins with a random state of the size of an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = 8
        self.cell, self.out = nn.GRUCell(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(x, torch.randn(x.shape[0], self.hidden)))


def test_a_random_state_follows_its_layer() -> None:
    done = prunekit.prune(randomized(DrawnState()).eval(), vector(), channels=0.5)
    assert done.max_relative_difference <= TOLERANCE
    assert done.model.hidden == done.model.cell.hidden_size == 4


def test_what_lies_on_positions_alone_stays() -> None:
    class Shifted(Generator):
        def __init__(self) -> None:
            super().__init__()
            self.place = nn.Parameter(torch.zeros(1, 1, SIDE, SIDE))

        def forward(self, z: Tensor) -> Tensor:
            return self.up(self.fc(z).view(-1, 8, SIDE, SIDE) + self.place)

    net = randomized(Shifted()).eval()
    plan = settled_plan(net, vector())
    assert "place" not in plan.kept_indices
    assert plan.kept("up.weight", 0).size < WIDTH
    assert parity(net, plan, vector()) <= TOLERANCE
