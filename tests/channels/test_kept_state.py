"""State in attributes that are no buffers: it follows its width, or is made anew where forward does that."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prunekit as pk
from prunekit.channels.tracing.kept_state import kept_tensors
from prunekit.errors import VerificationError


class Stateful(nn.Module):
    """A recurrent layer whose state goes on where the last call left it, made where there is none for this batch."""

    def __init__(self, kind: type[nn.GRU | nn.LSTM] = nn.GRU) -> None:
        super().__init__()
        self.cell, self.head = kind(6, 16, batch_first=True), nn.Linear(16, 3)
        self.hidden: Any = None

    def forward(self, x: Tensor) -> Tensor:
        known = self.hidden[0] if isinstance(self.hidden, tuple) else self.hidden
        if known is not None and known.shape[1] != len(x):
            self.hidden = None
        out, new = self.cell(x, self.hidden)
        self.hidden = tuple(one.detach() for one in new) if isinstance(new, tuple) else new.detach()
        return self.head(out[:, -1])  # type: ignore[no-any-return]


class Spiking(nn.Module):
    """A neuron with a potential that is a number before the first call (as in SpikingJelly)."""

    def __init__(self) -> None:
        super().__init__()
        self.potential: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.potential, Tensor) and self.potential.shape != x.shape:
            self.potential = 0.0
        self.potential = self.potential + (x - self.potential) / 2
        fired = (self.potential >= 0.2).to(x.dtype)
        fired = fired + self.potential.sigmoid() - self.potential.sigmoid().detach()
        self.potential = (self.potential * (1 - fired)).detach()
        return fired


class Delayed(nn.Module):
    """A layer that adds its inputs of the two calls before, from a list."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.line = [torch.zeros(1, width) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.line[0]
        self.line = [self.line[1], x[:1].detach()]
        return out


class Centered(nn.Module):
    """A layer that takes off a running mean, which only train mode moves."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            new = x.mean(0).detach()
            self.mean = new if self.mean is None else 0.9 * self.mean + 0.1 * new
        return x if self.mean is None else x - self.mean


@dataclass
class Seen:
    """What a layer saw last."""

    features: list[Tensor] = field(default_factory=list)


class Watched(nn.Module):
    """A network that keeps its features and attention to look at them, in a dictionary, a dataclass and a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 12), nn.Linear(12, 3)
        self.by_name: dict[str, Tensor] = {}
        self.seen, self.last = Seen(), deque[Tensor](maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.by_name["a"] = self.a(x).relu()
        z = self.b(y).relu()
        self.seen = Seen([y, z])
        self.last.append(z)
        return self.c(z)  # type: ignore[no-any-return]


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gru": (Stateful, (2, 5, 6)),
    "lstm": (lambda: Stateful(nn.LSTM), (2, 5, 6)),
    "spiking": (lambda: nn.Sequential(nn.Linear(6, 16), Spiking(), nn.Linear(16, 3)), (4, 6)),
    "delayed": (lambda: nn.Sequential(nn.Linear(6, 16), Delayed(16), nn.ReLU(), nn.Linear(16, 3)), (4, 6)),
    "centered": (lambda: nn.Sequential(nn.Linear(6, 16), Centered(), nn.ReLU(), nn.Linear(16, 3)), (4, 6)),
    "watched": (Watched, (4, 6)),
}


@pytest.mark.parametrize("name", NETS)
def test_the_state_of_a_model_that_was_called_follows_its_width(name: str) -> None:
    torch.manual_seed(0)
    make, shape = NETS[name]
    model, x = make(), torch.randn(shape)
    model(x).sum().backward()
    before = {place: tensor.clone() for place, tensor in kept_tensors(model).items()}
    result = pk.prune(model, x, macs=0.6)
    assert result.max_relative_difference <= 1e-9
    assert any("begins with the kept channels of" in note for note in result.notes)
    left, small = kept_tensors(model), kept_tensors(result.model)
    assert {place: tensor.numel() for place, tensor in left.items()} != {p: t.numel() for p, t in small.items()}
    assert all(torch.equal(left[place], tensor) for place, tensor in before.items())
    for _ in range(2):
        assert result.model(x).shape == model(x).shape
    assert result.model(x[:1]).shape[0] == 1


@pytest.mark.parametrize("name", ["gru", "spiking", "delayed"])
def test_both_begin_with_the_state_of_the_masked_model(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape = NETS[name]
    model, x = make().eval(), torch.randn(shape)
    plan = pk.plan(model, x, macs=0.6)
    small = pk.compact(model, plan)
    with torch.no_grad():
        for _ in range(2):
            model(x + 1)
    assert pk.verify(model, small, plan, x).max_relative_difference <= 1e-9
    plan.save(tmp_path)
    known = pk.load_plan(tmp_path)
    later = pk.compact(model, known)
    assert pk.verify(model, later, known, [(x,), (x + 1,)]).max_relative_difference <= 1e-9
    with pk.masked(model, plan), torch.no_grad():
        assert torch.allclose(model(x), later(x), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm", "spiking"])
def test_a_pruner_finishes_with_state(name: str) -> None:
    torch.manual_seed(0)
    make, shape = NETS[name]
    model, x = make(), torch.randn(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pruner = pk.Pruner(model, optimizer, x, macs=0.6, steps=2)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()
    small, _ = pruner.finish()
    small(x).sum().backward()


class FirstBatch(nn.Module):
    """An LSTM whose state is made for one batch size in `__init__` and anew for any other, as in tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.batch = 16, 2
        self.cell, self.head = nn.LSTM(6, self.width, batch_first=True), nn.Linear(self.width, 3)
        self.hidden = self.init_hidden(self.batch)

    def init_hidden(self, batch: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, batch, self.width), torch.zeros(1, batch, self.width)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != self.batch:
            self.batch, self.hidden = len(x), self.init_hidden(len(x))
        out, hidden = self.cell(x, self.hidden)
        self.hidden = (hidden[0].detach(), hidden[1].detach())
        return self.head(out[:, -1])  # type: ignore[no-any-return]


class Leaky(nn.Module):
    """A layer with a memory of each sample, that a method of a part makes anew where their number changes."""

    class Memory(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.features, self.rate = width, nn.Parameter(torch.full((width,), 0.5))
            self.value = torch.zeros(2, width)

        def reset(self, like: Tensor) -> None:
            self.value = like.new_zeros(len(like), self.features)

        def forward(self, x: Tensor) -> Tensor:
            if self.value.size(0) != x.size(0):
                self.reset(x)
            self.value = (self.rate * self.value + x).detach()
            return self.rate * x + self.value

    def __init__(self) -> None:
        super().__init__()
        self.a, self.memory, self.b = nn.Linear(6, 16), Leaky.Memory(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.memory(self.a(x)).tanh())  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "shape"), [(FirstBatch, (5, 6)), (Leaky, (6,))], ids=["lstm", "memory"])
def test_state_is_begun_anew_for_another_number_of_samples(make: Callable[[], Any], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(2, *shape)
    result = pk.prune(model, x, macs=0.6)
    assert sum(parameter.numel() for parameter in result.model.parameters()) < 0.7 * sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert not any("no example runs it" in note for note in result.notes)
    assert all(2 in tensor.shape[:2] for tensor in kept_tensors(model).values())
    for batch in (3, 1, 4, 2):
        assert result.model(torch.randn(batch, *shape)).shape == (batch, 3)
    result = pk.prune(model, calibration=torch.randn(32, *shape), macs=0.6)
    assert result.max_relative_difference <= 1e-9
    other = torch.randn(8, *shape)
    with torch.no_grad():
        assert torch.allclose(result.masked(other), result.model(other), atol=1e-5)


class Positions(nn.Module):
    """A table that forward makes for the width and the length that it first sees."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            rates = torch.ones_like(x[0]).cumsum(0)
            self.table = torch.sin(rates)
        return x + self.table


def test_a_cache_is_made_again() -> None:
    make = lambda: nn.Sequential(nn.Linear(6, 16), Positions(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))  # noqa: E731
    torch.manual_seed(0)
    model, x = make(), torch.randn(2, 5, 6)
    fresh = pk.prune(model, x, macs=0.6)
    model(x)
    called = pk.prune(model, x, macs=0.6)
    assert called.plan.totals() == fresh.plan.totals()
    assert called.model[1].table is None
    assert any("None in 1.table, which forward makes where it is missing" in note for note in called.notes)
    assert model[1].table is not None
    with torch.no_grad():
        assert torch.allclose(called.model(x), fresh.model(x))
    assert pk.verify(model, called.model, called.plan, x).max_relative_difference <= 1e-9


def test_state_that_no_trace_saw_is_named() -> None:
    class Steered(nn.Module):
        """Adds what somebody set from outside."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.shift = nn.Linear(6, 16), nn.Linear(16, 3), None

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(y if self.shift is None else y + self.shift)  # type: ignore[no-any-return]

    model, x = Steered(), torch.randn(4, 6)
    plan = pk.plan(model, x, macs=0.6)
    model.shift = torch.ones(16)
    with pytest.raises(VerificationError, match=r"keeps tensors in attributes that are no buffers \(shift\)"):
        pk.verify(model, pk.compact(model, plan), plan, x)


class Penalized(nn.Module):
    """A network that leaves losses for the training loop: of its own, in a list, and of a layer in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.watch = nn.Linear(6, 16), nn.Linear(16, 12), nn.Linear(12, 3), Sparse()
        self.losses: list[Tensor] = []
        self.loss: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.watch(self.a(x).relu())
        self.loss = y.square().mean()
        z = self.b(y).relu()
        self.loss += z.abs().mean() + self.b.weight.square().sum()
        self.losses.append(z.var(-1).mean())
        return self.c(z)  # type: ignore[no-any-return]


class Sparse(nn.Module):
    """A layer that leaves the mean of what it passes on, in train mode."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.penalty = x.mean()
        return x


class Scaled(Penalized):
    """A network that divides by a mean over channels that the call before left."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        z = self.b(y if isinstance(self.loss, float) else y / self.loss).relu()
        self.loss = y.detach().abs().mean() + 1
        return self.c(z)  # type: ignore[no-any-return]


@pytest.mark.parametrize("called", [False, True])
def test_losses_that_only_the_training_loop_reads_lock_nothing(called: bool) -> None:
    torch.manual_seed(0)
    model, x = Penalized(), torch.randn(4, 6)
    if called:
        model(x).sum().backward()
    result = pk.prune(model, x, macs=0.6)
    small = result.model.train()
    assert small.a.out_features < 16
    assert small.b.out_features < 12
    (small(x).sum() + small.loss + small.losses[-1] + small.watch.penalty).backward()
    assert small.loss.shape == ()


def test_a_mean_that_the_next_call_reads_locks() -> None:
    chart = pk.trace(Scaled(), torch.randn(4, 6))
    assert not chart.labels["a.weight"][0].any()
    assert chart.labels["b.weight"][0].any()
