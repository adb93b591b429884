"""Norms over channels: known by what they compute, and what errors behind them count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.channels.trace import trace
from prunekit.criteria.elimination import eliminations
from prunekit.statistics.gram_matrices import collect_patches
from prunekit.statistics.layer_graph import find_layers
from prunekit.statistics.row_norms import row_norm_of


def written_out(x: Tensor, gain: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + gain)


GAIN = torch.linspace(-1, 2, 6, dtype=torch.float64)
CASES: dict[str, tuple[Callable[[Tensor], Tensor], bool, Tensor]] = {
    "LayerNorm": (lambda x: F.layer_norm(x, (6,), GAIN, GAIN + 3), True, GAIN),
    "RMSNorm": (lambda x: F.rms_norm(x, (6,), GAIN), False, GAIN),
    "written out": (lambda x: written_out(x, GAIN), False, 1 + GAIN),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_norms_are_known_by_what_they_compute(case: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    function, centered, gain = CASES[case]
    x = torch.randn(40, 6, dtype=torch.float64) * torch.rand(40, 1, dtype=torch.float64).exp() + 0.3
    found = row_norm_of(x.to(dtype), function(x.to(dtype).double()).to(dtype))
    assert found is not None
    assert found.centered == centered
    torch.testing.assert_close(found.gain, gain.double(), rtol=0, atol=1e-5 if dtype == torch.float64 else 2e-2)
    sizes = x.std(1, correction=0) if centered else x.square().mean(1).sqrt()
    torch.testing.assert_close(found.squared_sizes(x), sizes.square())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 2 * x + 1,
        torch.relu,
        lambda x: x.softmax(1),
        lambda x: x / x.square().mean(0).sqrt(),
        lambda x: x + torch.randn_like(x),
        lambda x: F.layer_norm(x, (6,))[:, [1, 0, 2, 3, 4, 5]],
        torch.zeros_like,
    ],
)
def test_other_functions_are_no_norms(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 6) * torch.rand(40, 1).exp()
    assert row_norm_of(x, function(x)) is None


class Block(nn.Module):
    """A stream, to which two neurons write so much at a few positions that the norm behind is made of it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(16, 16, bias=False), norm
        self.up, self.down, self.head = nn.Linear(16, 12), nn.Linear(12, 16), nn.Linear(16, 4)
        with torch.no_grad():
            self.stem.weight.copy_(torch.eye(16))
            self.up.weight[5:7] = 0
            self.up.weight[5:7, 0] = 40
            self.up.bias[5:7] = -100  # only where the first channel of the input is large
            self.down.weight[:, 5:7] = 0
            self.down.weight[3, 5:7] = 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.norm(x + self.down(self.up(x).relu())))  # type: ignore[no-any-return]


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.RMSNorm(16)])
def test_what_makes_the_norm_is_removed_last(norm: nn.Module) -> None:
    torch.manual_seed(0)
    model = Block(norm).eval()
    x = torch.randn(64, 20, 16)
    x[:, 0, 0] = 6
    x[:, 1:, 0].clamp_(max=2)
    chart = trace(model, (x[:2],))
    layer = next(one for one in find_layers(model, (x[:2],), chart.norms) if one.weight == "down.weight")
    assert layer.row_norm is not None
    assert layer.row_norm.centered == isinstance(norm, nn.LayerNorm)
    stats = collect_patches(model, [x], norms=chart.norms)
    group = next(group for group in chart.groups if group.name == "up")
    order = eliminations(model, chart, stats)["up"].labels
    places = {int(label): place for place, label in enumerate(order)}
    massive = [places[int(group.labels[index])] for index in (5, 6)]
    assert max(massive) == 11  # one of the two can stand for both
    assert find_layers(model, (x[:2],))[0].row_norm is None


def test_moments_of_batches_are_those_of_all() -> None:
    torch.manual_seed(0)
    model = Block(nn.LayerNorm(16)).double().eval()
    x = torch.randn(32, 8, 16, dtype=torch.float64)
    whole, parts = collect_patches(model, [x], rows=10**6), collect_patches(model, list(x.split(5)), rows=10**6)
    for one, other in zip(whole.layers, parts.layers, strict=True):
        assert one.rows == other.rows == 256
        torch.testing.assert_close(one.grams, other.grams)
        torch.testing.assert_close(one.variance, other.variance)
