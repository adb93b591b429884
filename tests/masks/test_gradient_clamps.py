"""Gradient clamps against references written by hand; loss scales; what is counted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from small_nets import SmallNet
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torchvision.models import resnet18

from prunekit.errors import ModelError, UsageError
from prunekit.hooks.hook import called_leaves, count_hooks
from prunekit.masks.gradient_clamps import clamp_activation_grad, clamp_weight_grad, limited, scaled

DOUBLE = torch.float64


def clamp(gradient: Tensor, limit: float, by: str) -> Tensor:
    if by == "value":
        return gradient.clamp(-limit, limit)
    norm = float(gradient.norm())
    return gradient * (limit / norm) if norm > limit else gradient


class Passing(torch.autograd.Function):
    """A copy forward, a clamped gradient backward: safe whatever is written in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float, by: str) -> Tensor:  # type: ignore[override]
        ctx.limit, ctx.by = limit, by
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return clamp(gradient, ctx.limit, ctx.by), None, None


def gradients(model: nn.Module, x: Tensor, factor: float = 1.0) -> list[Tensor]:
    model.zero_grad()
    (model(x).square().sum() * factor).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def reference(model: nn.Module, x: Tensor, limits: dict[str, float], by: str, side: str) -> list[Tensor]:
    """Gradients with the clamps as nodes of the graph."""
    handles = []
    for path, limit in limits.items():
        module = model.get_submodule(path)
        if side == "output":
            handles.append(module.register_forward_hook(lambda m, i, o, t=limit: Passing.apply(o, t, by)))
        else:
            handles.append(module.register_forward_pre_hook(lambda m, i, t=limit: Passing.apply(i[0], t, by)))
    found = gradients(model, x)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("side", ["output", "input"])
@pytest.mark.parametrize("by", ["value", "norm"])
def test_activation_gradients_on_a_net_that_writes_in_place(by: Any, side: Any) -> None:
    """Every leaf of resnet18: BatchNorm before an in-place ReLU, `out += identity`, a ReLU that runs twice."""
    torch.manual_seed(0)
    model = resnet18(num_classes=4).double().eval()
    x = torch.randn(2, 3, 32, 32, dtype=DOUBLE, requires_grad=True)
    tight = ("layer1.0.bn2", "layer2.0.conv1", "layer3.1.bn1", "layer4.0.downsample.1")
    limits = dict.fromkeys(called_leaves(model), 1e3) | dict.fromkeys(tight, 0.002 if by == "value" else 0.01)
    plain, expected = gradients(model, x), reference(model, x, limits, by, side)
    with clamp_activation_grad(model, limits, by=by, side=side) as clamps:
        found = gradients(model, x)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not torch.equal(found[0], plain[0])
    shares = clamps.shares()
    assert set(shares) == set(called_leaves(model))
    assert {path for path, share in shares.items() if share > 0} == set(tight)
    assert count_hooks(model) == 0


@pytest.mark.parametrize("by", ["value", "norm"])
def test_a_power_of_two_as_loss_scale_changes_no_bit(by: Any) -> None:
    torch.manual_seed(0)
    model = SmallNet().eval()
    x = torch.randn(4, 3, 8, 8)
    with clamp_activation_grad(model, {"bn*": 0.001, "twice": 0.002}, by=by) as clamps:
        expected = gradients(model, x)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    for scale in (2.0**14, scaler, lambda: 2.0**14, lambda: torch.tensor(2.0**14)):
        with clamp_activation_grad(model, {"bn*": 0.001, "twice": 0.002}, by=by, loss_scale=scale) as again:
            found = gradients(model, x, 2.0**14)
        assert all(torch.equal(one / 2.0**14, other) for one, other in zip(found, expected, strict=True))
        assert again.shares() == clamps.shares()
    assert any(share > 0 for share in clamps.shares().values())


def test_shares_count_exactly() -> None:
    net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Identity())
    x, upstream = torch.ones(1, 3), torch.tensor([[0.1, -0.5, 2.0, -3.0]])
    with clamp_activation_grad(net, {"0": 0.5}) as value, clamp_activation_grad(net, {"0": 1.0}, by="norm") as norm:
        net(x).backward(upstream)
        net(x).backward(upstream / 100)
    assert value.shares() == {"0": 2 / 8}
    assert norm.shares() == {"0": 0.0}  # it came second, on what was within 0.5 already: a norm of 0.87
    assert torch.equal(net[0].weight.grad, torch.tensor([0.101, -0.505, 0.52, -0.53])[:, None].expand(4, 3))


def test_nan_stays_and_inf_becomes_the_limit_or_stays() -> None:
    gradient = torch.tensor([math.nan, math.inf, -math.inf, 3.0, 0.1])
    clamped, beyond = limited(gradient, 1.0, "value")
    assert beyond == 3
    assert clamped is not None
    torch.testing.assert_close(clamped, torch.tensor([math.nan, 1.0, -1.0, 1.0, 0.1]), equal_nan=True)
    assert limited(gradient, 1.0, "norm") == (None, 0)
    assert limited(torch.full((4,), 1e30), 1.0, "norm") == (None, 0)  # the norm itself overflows
    half = torch.tensor([math.inf, 6e4, 1.0], dtype=torch.float16)
    assert limited(half, 1e6, "value") == (None, 0)  # a limit that float16 cannot hold
    clamped, beyond = limited(torch.full((1000,), 6e4, dtype=torch.float16), 10.0, "norm")
    assert beyond == 1
    assert clamped is not None
    assert float(clamped.float().norm()) == pytest.approx(10.0, rel=1e-3)


@pytest.mark.parametrize("layout", ["channels_last", "expanded", "empty", "scalar"])
@pytest.mark.parametrize("by", ["value", "norm"])
def test_gradients_of_any_layout(by: Any, layout: str) -> None:
    torch.manual_seed(0)
    gradient = {
        "channels_last": torch.randn(3, 5, 4, 4).to(memory_format=torch.channels_last),
        "expanded": torch.randn(3, 1, 1).expand(3, 4, 5),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.0),
    }[layout]
    before = gradient.clone()
    found, beyond = limited(gradient, 0.5, by)
    torch.testing.assert_close(gradient if found is None else found, clamp(before, 0.5, by))
    assert torch.equal(gradient, before)
    assert beyond == (int((before.abs() > 0.5).sum()) if by == "value" else int(float(before.norm()) > 0.5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("by", ["value", "norm"])
def test_cuda_agrees_with_the_cpu(by: Any) -> None:
    gradient = torch.randn(3, 5, 4, 4)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for limit in (0.1, 1e9):
        expected, beyond = limited(gradient, 4 * limit, by)
        where = gradient.cuda()
        found, again = limited(where, scaled(limit, scaler, where.device), by)
        assert int(again) == beyond
        assert found is not None
        torch.testing.assert_close(found.cpu(), gradient if expected is None else expected)


def stepped(optimizer: type[Optimizer], by: str | None, scale: float | None, *, fused: bool, unscale: bool) -> Any:
    """Three steps; with `scale` under a GradScaler."""
    torch.manual_seed(0)
    model = SmallNet().eval()
    steps = optimizer(model.parameters(), lr=0.01, fused=fused)  # type: ignore[call-arg]
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    clamps = clamp_weight_grad(model, steps, {"*": 10.0, "conv*": 0.05, "fc": 0.01}, by=by or "value")  # type: ignore[arg-type]
    with clamps:
        for seed in range(3):
            x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
            scaler.scale(model(x).square().sum()).backward()
            if unscale:
                scaler.unscale_(steps)
            scaler.step(steps)
            scaler.update()
            steps.zero_grad()
    return model.state_dict(), clamps.shares()


@pytest.mark.parametrize("optimizer", [SGD, Adam, AdamW])
@pytest.mark.parametrize("by", ["value", "norm"])
def test_weight_gradients_are_clamped_unscaled_under_every_scaler(optimizer: type[Optimizer], by: str) -> None:
    """Fused optimizers unscale in their step, others before it, and a user may do it by hand: no bit differs."""
    for fused in (False, True):
        expected, shares = stepped(optimizer, by, None, fused=fused, unscale=False)
        assert 0 < shares["conv1"] <= 1
        assert 0 < shares["fc"] <= 1
        for unscale in (False, True):
            found, again = stepped(optimizer, by, 2.0**12, fused=fused, unscale=unscale)
            assert again == shares
            assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_weight_gradients_against_a_reference() -> None:
    torch.manual_seed(0)
    model, by_hand = SmallNet().double(), SmallNet().double()
    by_hand.load_state_dict(model.state_dict())
    x = torch.randn(4, 3, 8, 8, dtype=DOUBLE)
    limits = {"conv1": 0.3, "fc": 0.05}
    optimizer = SGD(model.parameters(), lr=0.1)
    with clamp_weight_grad(model, optimizer, limits, by="norm") as clamps:
        gradients(model, x)
        optimizer.step()
    gradients(by_hand, x)
    with torch.no_grad():
        for name, parameter in by_hand.named_parameters():
            assert parameter.grad is not None
            limit = limits.get(name.rpartition(".")[0], math.inf)
            parameter -= 0.1 * clamp(parameter.grad, limit, "norm")
    for one, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-15)
    assert clamps.shares().keys() == limits.keys()
    gradients(model, x)
    again = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    optimizer.step()  # after leaving nothing is clamped
    assert all(torch.equal(one, parameter.grad) for one, parameter in zip(again, model.parameters(), strict=True))  # type: ignore[arg-type]


def test_a_step_that_fp16_skips_counts_for_nothing() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    optimizer = Adam(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with clamp_weight_grad(model, optimizer, 0.1) as clamps:
        scaler.scale(model(torch.full((1, 2), math.inf)).sum()).backward()
        scaler.step(optimizer)
    assert clamps.shares() == {}
    assert torch.equal(model.weight, before)


def test_frozen_shared_and_foreign_parameters() -> None:
    net = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2), "d": nn.ReLU()})
    net["b"].weight = net["a"].weight
    net["b"].bias.requires_grad_(False)
    optimizer = SGD(net["b"].parameters(), lr=0.0)
    with clamp_weight_grad(net, optimizer, 0.25) as clamps:
        (net["b"](torch.ones(1, 2)) + net["c"](torch.ones(1, 2))).sum().backward()
        optimizer.step()
    assert clamps.shares() == {"a": 1.0}
    assert torch.equal(net["a"].weight.grad, torch.full((2, 2), 0.25))
    assert torch.equal(net["c"].weight.grad, torch.ones(2, 2))


def test_bad_limits_and_globs_are_refused() -> None:
    net = SmallNet()
    optimizer = SGD(net.parameters(), lr=0.1)
    for bad in (-1.0, math.nan, "1"):
        with pytest.raises(UsageError, match="clamp_activation_grad: expected a number of at least 0"):
            clamp_activation_grad(net, bad)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="of 'fc': expected a number of at least 0"):
            clamp_weight_grad(net, optimizer, {"fc": bad})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match=r"clamp_activation_grad: 'bn3' matches no module path; did you mean 'bn2'"):
        clamp_activation_grad(net, {"bn3": 1.0})
    with pytest.raises(UsageError, match=r"parameters of their own: 'relu' matches no module path"):
        clamp_weight_grad(net, optimizer, {"relu": 1.0})


def test_clamps_are_removed_on_an_error() -> None:
    net = SmallNet()
    optimizer = SGD(net.parameters(), lr=0.1)
    x = torch.randn(2, 3, 8, 8)
    clamps = clamp_weight_grad(net, optimizer, 1.0), clamp_activation_grad(net, 1.0)
    with pytest.raises(RuntimeError, match="must match the size"), clamps[0], clamps[1]:
        (net(x) - torch.zeros(3, 3)).sum().backward()
    assert count_hooks(net) == 0
    assert not optimizer._optimizer_step_pre_hooks


def test_second_order_gradients_pass_a_clamp() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(5, 3, dtype=DOUBLE, requires_grad=True)

    def penalty() -> Tensor:
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return second

    weight = model[2].weight.detach()
    limit = float(weight.abs().median())  # clamps some of what flows into Tanh's backward
    with clamp_activation_grad(model, {"1": limit}) as owner:
        clamped = penalty()
    assert 0 < owner.shares()["1"] < 1
    with torch.no_grad():
        model[2].weight.clamp_(-limit, limit)  # a linear layer's backward is its weight: the same, without hooks
    torch.testing.assert_close(clamped, penalty(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("by", ["value", "norm"])
def test_the_sparse_gradient_of_an_embedding_is_clamped(by: Any) -> None:
    torch.manual_seed(0)
    found = []
    for sparse in (True, False):
        table = nn.Embedding.from_pretrained(torch.arange(12.0).view(4, 3), freeze=False, sparse=sparse)
        optimizer = SGD(table.parameters(), lr=1.0)
        table(torch.tensor([1, 3, 3])).square().sum().backward()
        with clamp_weight_grad(table, optimizer, 15.0, by=by):
            optimizer.step()
        found.append(table.weight.detach())
    torch.testing.assert_close(found[0], found[1])
    assert not torch.equal(found[0], torch.arange(12.0).view(4, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, DOUBLE])
@pytest.mark.parametrize("by", ["value", "norm"])
def test_every_precision_is_clamped(dtype: torch.dtype, by: Any) -> None:
    gradient = torch.linspace(-2, 2, 41).to(dtype).view(1, 41)
    found, beyond = limited(gradient, 0.5, by)
    assert found is not None
    assert found.dtype == dtype
    torch.testing.assert_close(found, clamp(gradient.double(), 0.5, by).to(dtype))
    assert beyond == (int((gradient.double().abs() > 0.5).sum()) if by == "value" else 1)


def test_a_closure_makes_the_gradient_that_is_clamped() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    for kind in (SGD, torch.optim.LBFGS):
        optimizer = kind(model.parameters(), lr=1.0)
        before = [parameter.detach().clone() for parameter in model.parameters()]

        def closure(optimizer: Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = 100 * model(x).square().sum()
            loss.backward()
            return loss

        with clamp_weight_grad(model, optimizer, 1e-3) as owner:
            optimizer.step(closure)
        assert owner.shares()[""] == 1.0
        if kind is SGD:
            moved = [(p.detach() - b).abs().max() for p, b in zip(model.parameters(), before, strict=True)]
            torch.testing.assert_close(torch.stack(moved), torch.full((2,), 1e-3), rtol=1e-3, atol=0.0)


def test_wrong_words_and_wrong_optimizers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="side: expected 'input' or 'output', got 'outputs'"):
        clamp_activation_grad(model, 1.0, side="outputs")  # type: ignore[arg-type]
    for call in (
        lambda by: clamp_activation_grad(model, 1.0, by=by),
        lambda by: clamp_weight_grad(model, optimizer, 1.0, by=by),
    ):
        with pytest.raises(UsageError, match="by: expected 'value' or 'norm', got 'Value'"):
            call("Value")
    other = SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(UsageError, match="expected an optimizer of this model's parameters, but this SGD steps none"):
        clamp_weight_grad(model, other, 1.0).__enter__()


def test_a_module_without_floating_point_tensors_is_named() -> None:
    class Index(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(1)

    model = nn.Sequential(nn.Linear(3, 3), Index())
    with (
        clamp_activation_grad(model, {"1": 1.0}),
        pytest.raises(ModelError, match=r"output of 1: .* got Tensor with a tensor of torch\.int64"),
    ):
        model(torch.randn(2, 3))
    assert count_hooks(model) == 0


def test_one_limit_for_all_passes_over_modules_without_activations() -> None:
    optional, layer = nn.Identity(), nn.Linear(3, 3)
    for side in ("output", "input"):
        with clamp_activation_grad(nn.ModuleList([optional, layer]), 0.1, side=side) as clamp:  # type: ignore[arg-type]
            assert optional(None) is None
            optional(torch.tensor([1, 2]))
            layer(torch.ones(3, requires_grad=True)).sum().backward()
        assert clamp.counts().keys() == {"1"}
