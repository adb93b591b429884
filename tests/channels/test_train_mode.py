"""Layers of the user's own that compute something else in train mode: what they do there is traced and tried too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import prunekit as pk


class Noisy(nn.Module):
    """Weights with factorized noise in train mode, drawn by a method (Fortunato et al. 2018)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.mean = nn.Parameter(torch.randn(outputs, inputs) * 0.2)
        self.spread = nn.Parameter(torch.full((outputs, inputs), 0.1))
        self.register_buffer("noise", torch.zeros(outputs, inputs))
        self.draw()

    def draw(self) -> None:
        self.noise.copy_(torch.randn(self.outputs).outer(torch.randn(self.inputs)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.mean + self.spread * self.noise if self.training else self.mean)


class Bayes(nn.Module):
    """Weights drawn anew in each pass of train mode (Blundell et al. 2015): a removed weight has no spread either."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.randn(outputs, inputs) * 0.2)
        self.rho = nn.Parameter(torch.full((outputs, inputs), -3.0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.linear(x, self.mean)
        return F.linear(x, self.mean + F.softplus(self.rho) * torch.randn_like(self.mean))


class Noise(nn.Module):
    """Noise of a width that an attribute says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(len(x), self.width) if self.training else x


class Gumbel(nn.Module):
    """Noise whose logarithm is taken twice."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x - torch.log(-torch.log(torch.rand_like(x))) if self.training else x)


class Codebook(nn.Module):
    """A codebook of vectors that follow the mean of what is nearest (van den Oord et al. 2017)."""

    def __init__(self, entries: int, width: int) -> None:
        super().__init__()
        self.register_buffer("entries", torch.randn(entries, width))
        self.register_buffer("counts", torch.ones(entries))

    def forward(self, x: Tensor) -> Tensor:
        far = x.square().sum(1, keepdim=True) - 2 * x @ self.entries.T + self.entries.square().sum(1)
        nearest = far.argmin(1)
        found = F.embedding(nearest, self.entries)
        if self.training:
            ones = F.one_hot(nearest, len(self.entries)).to(x.dtype)
            self.counts.mul_(0.9).add_(ones.sum(0), alpha=0.1)
            self.entries.data.mul_(0.9).add_(ones.T @ x.detach() / self.counts[:, None], alpha=0.1)
        return x + (found - x).detach()


class Dropped(nn.Linear):
    """A layer of torch whose forward is the user's: its weight is dropped in part (Merity et al. 2018)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.dropout(self.weight, 0.5, self.training), self.bias)


def chain(cls: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(cls(6, 16), nn.ReLU(), cls(16, 12), nn.ReLU(), cls(12, 3))


NETS = {
    "noisy": lambda: chain(Noisy),
    "bayes": lambda: chain(Bayes),
    "noise": lambda: nn.Sequential(nn.Linear(6, 16), Noise(16), nn.ReLU(), nn.Linear(16, 3)),
    "gumbel": lambda: nn.Sequential(nn.Linear(6, 16), Gumbel(), nn.Linear(16, 3)),
    "codebook": lambda: nn.Sequential(nn.Linear(6, 16), Codebook(10, 16), nn.Linear(16, 3)),
    "dropped": lambda: chain(Dropped),
}


@pytest.mark.parametrize("name", NETS)
def test_the_compact_model_trains(name: str) -> None:
    x = torch.randn(4, 6)
    result = pk.prune(NETS[name](), x, macs=0.6)
    assert {run.training for run in result.plan.channel_map.traced.trace.runs} == {False, True}
    assert result.max_relative_difference <= 1e-9
    small = result.model.train()
    small(torch.randn(8, 6)).square().sum().backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in small.parameters())
    for module in small.modules():
        if isinstance(module, Noisy):  # by a method that no example runs
            module.draw()
            assert (module.outputs, module.inputs) == tuple(module.mean.shape)
    assert small(x).shape == (4, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["noisy", "codebook"])
def test_a_pruner_finishes_such_a_training(name: str) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(4, 6), NETS[name]().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pruner = pk.Pruner(model, optimizer, x, macs=0.6, steps=2)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()
    small, _ = pruner.finish()
    small.train()(x).square().mean().backward()
    optimizer.step()


class Asking(nn.Module):
    """A layer that reads a further tensor only in train mode, which takes eight samples, or if it is told to."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.randn(outputs, inputs))
        self.spread = nn.Parameter(torch.ones(outputs, inputs))
        self.told = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) < 8:
            raise ValueError("too few samples")
        return F.linear(x, self.mean + self.spread if self.training or self.told else self.mean)


def test_what_is_beside_an_unread_tensor_stays_with_it() -> None:
    model = nn.Sequential(Asking(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))
    result = pk.prune(model, torch.randn(4, 6), macs=0.8)
    assert result.model[0].mean.shape == (16, 6)
    assert result.model[2].out_features < 12
    assert any("beside a tensor of this size" in lock.reason for lock in result.plan.channel_map.locks)
    result.model.eval()[0].told = True
    result.model(torch.randn(2, 6))
    result.model.train()(torch.randn(8, 6))


class Optional(nn.Module):
    """Has a parameter that neither mode uses, as of a variant that was not chosen."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.step = nn.Parameter(torch.randn(outputs, inputs)), nn.Parameter(torch.ones(outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.dropout(x, 0.1, self.training), self.weight)


def test_what_no_mode_reads_stays_alone() -> None:
    model = nn.Sequential(Optional(6, 16), nn.ReLU(), nn.Linear(16, 3))
    small = pk.prune(model, torch.randn(4, 6), channels=0.5).model
    assert small[0].weight.shape == (8, 6)
    assert small[0].step.shape == (16, 1)
    small.train()(torch.randn(2, 6)).sum().backward()
