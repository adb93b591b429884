"""The masked model of a result: called as it is, it computes what the compact model does."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import prunekit as pk
from prunekit.hooks.model_copy import copied


class Tokens(nn.Module):
    """A small transformer, whose encoder makes nested tensors of padded batches."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.inward, self.encoder = nn.Linear(6, 16), nn.TransformerEncoder(layer, 1)
        self.norm, self.head = nn.RMSNorm(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.encoder(self.inward(x))).mean(1))  # type: ignore[no-any-return]


NETS = {
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 3)),
        (32, 6),
    ),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3)),
        (32, 3, 6, 6),
    ),
    "transformer": (Tokens, (32, 5, 6)),
}


def gap(got: Tensor, want: Tensor) -> float:
    return float(((got - want).abs().max() / want.abs().max()).detach())


def loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_it_computes_what_the_compact_model_does(name: str) -> None:
    torch.manual_seed(0)
    make, shape = NETS[name]
    model, x = make().eval(), torch.randn(shape)
    result = pk.prune(model, calibration=x, macs=0.35)
    masked = result.masked
    assert masked is not None
    assert {name: tensor.shape for name, tensor in masked.state_dict().items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }
    for training in (True, False):
        want = result.model.train(training)(x)
        forms = (masked.train(training), copy.deepcopy(masked), loaded(masked), copied(masked), copied(loaded(masked)))
        assert [gap(form(x), want) < 1e-5 for form in forms] == [True] * 5
    with pk.masked(masked, result.plan):
        assert gap(masked(x), want) < 1e-5
        inside = copy.deepcopy(masked)
    assert gap(inside(x), want) < 1e-5
    small = pk.compact(masked, result.plan)
    assert not any(module._forward_hooks for module in small.modules())
    assert gap(small(x), want) < 1e-5
    assert pk.verify(masked, small, result.plan, x).max_relative_difference <= 1e-9
    plain = make()
    plain.load_state_dict(masked.state_dict())
    assert gap(plain(x), want) > 1e-2  # its norms count the zeros


@pytest.mark.slow
def test_another_plan_takes_the_place_of_its_norms() -> None:
    torch.manual_seed(0)
    make, shape = NETS["layer norm"]
    x = torch.randn(shape)
    result = pk.prune(make(), calibration=x, macs=0.7)
    masked = result.masked
    assert masked is not None
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.01)
    pruner = pk.Pruner(masked, optimizer, x, macs=0.4, steps=1)
    for _ in range(2):
        masked(x).square().mean().backward()
        optimizer.step()
        pruner.step()
    with torch.no_grad():
        inside = masked(x)
    small, _ = pruner.finish()
    assert gap(inside, small(x)) < 1e-5
