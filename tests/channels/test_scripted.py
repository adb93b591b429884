"""Scripted and traced modules inside a model: followed by the operators in them, copied, and cut like others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import Net, image, randomized, settled_plan
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


def scripted(part: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning, match="deprecated"):
        return torch.jit.script(part)  # type: ignore[no-any-return]


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
    with prunekit.capture(model, ["part"]) as seen:
        model(images)
    assert seen is not None
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
