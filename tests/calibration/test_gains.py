"""Gains of layers: measured on the output, equal to what is had by pruning and refitting by hand."""

from __future__ import annotations

import pytest
import torch
from equivalence import randomised, snapshot
from torch import Tensor, nn

from prunekit.calibration.gains import RIDGE, with_gains
from prunekit.calibration.patch_stats import collect_patches


def test_the_gain_is_what_the_output_makes_of_half_a_layer() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double(), torch.randn(512, 6).double() + 0.3
    found = with_gains(model, collect_patches(model, [x], rows=512, images=512), x)
    first, dense = model[0], model(x).detach()
    pull = (RIDGE * x.square().mean() * 512) ** 0.5 * torch.eye(7, 7, dtype=torch.float64)[:6]
    columns = [0, 2, 4, 6]
    rows = torch.cat([torch.cat([x, torch.ones(512, 1)], 1)[:, columns], pull[:, columns]])
    gone = torch.cat([x[:, 1::2], torch.zeros(6, 3)])
    instead = rows[:512] @ torch.linalg.lstsq(rows, gone).solution
    was = first(x).detach()
    now = was + (instead - x[:, 1::2]) @ first.weight.detach()[:, 1::2].T
    error = ((now - was).square().mean(0) / was.var(0)).sum()
    change = (model[1:](now).detach() - dense).square().mean() / (dense - dense.mean(0)).square().mean()
    assert found.layers[0].gain == pytest.approx(float(change / error), rel=1e-6)


class Pooled(nn.Module):
    """Two branches of the same size, of which one is pooled before it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.pooled, self.straight = nn.Conv2d(8, 4, 3, padding=1, groups=2), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        return torch.cat([self.pooled(x).mean((2, 3)), self.straight(x)[:, :, 2, 2]], 1)


@pytest.mark.parametrize("memory_bytes", [2**31, 1000])
def test_errors_that_are_averaged_away_count_less_and_the_model_stays(memory_bytes: int) -> None:
    model, x = randomised(Pooled()), torch.randn(256, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    before = snapshot(model)
    stats = collect_patches(model, [x], rows=4096, images=256, memory_bytes=memory_bytes)
    gains = {each.layer.weight: each.gain for each in with_gains(model, stats, x).layers}
    assert gains["pooled.weight"] < 0.3 * gains["straight.weight"]
    assert gains["stem.weight"] > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot(model).items())


def test_a_layer_of_one_channel_has_the_gain_of_the_others() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4), nn.Linear(4, 2)), torch.randn(64, 4)
    gains = [each.gain for each in with_gains(model, collect_patches(model, [x], rows=64, images=64), x).layers]
    assert gains[1] == pytest.approx((gains[0] + gains[2]) / 2)
