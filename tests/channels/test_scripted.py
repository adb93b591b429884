"""Scripted and traced modules inside a model: followed by the operators in them, copied, and cut like others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import TOLERANCE, Net, image, parity, randomized, settled_plan
from torch import Tensor, nn

import prunekit
from prunekit.hooks.hook import count_hooks
from prunekit.measure.verification import verify


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.5 * x)


class Gated(nn.Module):
    """With parts, parameters and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(12, 20, 1), nn.BatchNorm2d(20), nn.Conv2d(20, 12, 1)
        self.register_buffer("scale", torch.ones(12, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.norm(self.a(x)))) * self.scale


def scripted(part: Any) -> Any:
    with pytest.warns(FutureWarning, match="deprecated"):
        return torch.jit.script(part)


def traced(part: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning, match="deprecated"):
        return torch.jit.trace(part.eval(), torch.randn(2, 12, 6, 6), check_trace=False)  # type: ignore[no-any-return]


def net(part: nn.Module) -> nn.Module:
    parts = {"stem": nn.Conv2d(3, 12, 3), "part": part, "head": nn.Conv2d(12, 4, 1)}
    return Net(lambda net, x: net.head(net.part(net.stem(x))).mean((2, 3)), **parts)


@pytest.mark.parametrize("make", [scripted, traced])
@pytest.mark.parametrize("part", [Swish, Gated])
def test_what_is_in_a_scripted_module_is_followed_and_cut(part: type[nn.Module], make: Any, tmp_path: Path) -> None:
    model = net(make(randomized(part()))).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = settled_plan(model, image())
    assert all(0 < kept < dense for kept, dense in plan.widths().values())
    assert len(plan.widths()) == (2 if part is Gated else 1)
    small = prunekit.compact(model, plan)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with prunekit.masked(model, plan, torch.optim.SGD(model.parameters(), lr=0.1)):
        model.train()(*image()).square().sum().backward()
    small = prunekit.compact(model.eval(), plan)
    assert verify(model, small, plan, [image()]).max_relative_difference <= 1e-9
    assert count_hooks(model) == 0
    prunekit.save(small, tmp_path / "small", plan)
    again = prunekit.load(tmp_path / "small", model=net(make(part())))
    assert torch.equal(again(*image()), small(*image()))


def test_everything_that_hooks_modules_takes_scripted_ones() -> None:
    model = net(scripted(randomized(Gated()))).eval()
    images = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    done = prunekit.prune(model, calibration=images, macs=0.7)
    assert done.max_relative_difference <= 1e-9
    assert done.repair is not None
    assert done.repair.after <= done.repair.before
    assert "part" in str(prunekit.summary(model, images[:2]))
    assert prunekit.calibrate(model, [images]) is not None
    assert count_hooks(model) == 0


def test_a_masked_scripted_module_in_float64_is_the_model_itself_in_float64() -> None:
    model = randomized(net(scripted(randomized(Gated())))).eval()
    plan = settled_plan(model, image())
    small = prunekit.compact(model, plan).double()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            mask = plan.mask(name)
            tensor.mul_(1 if mask is None else mask)
        want, got = model.double()(image()[0].double()), small(image()[0].double())
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


class Shaped(nn.Module):
    """With sizes in its code, where TorchScript keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(12, 20, 1), nn.Conv2d(20, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(x)).view(-1, 4, 5, 6, 6).transpose(1, 2)
        return self.b(y.transpose(1, 2).reshape(-1, 20, 6, 6))


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(12, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [scripted, traced])
def test_a_size_in_scripted_code_locks_what_it_counts_alone(make: Any) -> None:
    model = net(make(randomized(Shaped()))).eval()
    plan = settled_plan(model, image())
    assert set(plan.widths()) == {"stem", "part.b"}
    (lock,) = (lock for lock in plan.channel_map.locks if "trial" in lock.reason)
    assert "RuntimeError: shape '[-1, 4, 5, 6, 6]' is invalid" in lock.reason
    assert "prune the model before torch.jit or torch.fx" in lock.reason
    assert parity(model, plan, image()) <= TOLERANCE


def in_fives(x: Tensor) -> Tensor:
    return x.view(x.shape[0], 4, 5).flatten(1)


def test_a_difference_in_a_scripted_function_names_the_operator() -> None:
    fives = scripted(in_fives)
    parts = {"a": nn.Linear(6, 20), "b": nn.Linear(20, 20), "c": nn.Linear(20, 3)}
    model = randomized(Net(lambda net, x: net.c(fives(net.b(net.a(x).relu()))), **parts)).eval()
    plan = settled_plan(model, (torch.randn(2, 6),))
    assert set(plan.widths()) == {"a"}
    assert any("(the sizes in scripted, traced or exported code" in lock.reason for lock in plan.channel_map.locks)


def test_the_weights_of_a_scripted_lstm_come_from_the_folder(tmp_path: Path) -> None:
    def made(seed: int) -> nn.Module:
        return randomized(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 12), scripted(Reading())), seed).eval()

    model, x = made(0), torch.randn(2, 4, 6)
    plan = settled_plan(model, (x,))
    small = prunekit.compact(model, plan)
    prunekit.save(small, tmp_path / "small", plan)
    again = prunekit.load(tmp_path / "small", model=made(1))
    assert torch.equal(again(x), small(x))


def test_the_guards_of_an_exported_module_lock_what_it_reads() -> None:
    part = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 12)).eval()
    exported = torch.export.export(part, (torch.randn(2, 12),), dynamic_shapes=({0: torch.export.Dim.AUTO},)).module()
    model = randomized(Net(lambda net, x: net.head(net.part(net.stem(x))),
                           stem=nn.Linear(6, 12), part=exported, head=nn.Linear(12, 4)))  # fmt: skip
    plan = settled_plan(model, (torch.randn(2, 6),))
    assert list(plan.widths().values()) == [(13, 20)]
    assert any("Guard failed" in lock.reason and "prune the model" in lock.reason for lock in plan.channel_map.locks)
