"""Training steps through `torch.compile`: what eager does, under masks, or eager with the reason."""

from __future__ import annotations

import copy
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from torchvision.models.resnet import BasicBlock
from training_models import CPU, net, splits

from prunekit.channels.cut.narrow_norms import NarrowNorms
from prunekit.channels.trace import trace
from prunekit.errors import ModelError
from prunekit.masks.activation_masks import ActivationMasks
from prunekit.masks.gradient_masks import GradientMasks
from prunekit.masks.masked_model import ChangingMasks, masked
from prunekit.planning.plan import Plan
from prunekit.settings.train import ClampSettings, TrainSettings
from prunekit.training import execution
from prunekit.training.callbacks.callback import ContextCallback
from prunekit.training.execution import CompiledForward
from prunekit.training.loop import fit

WANTED = "PRUNEKIT_TEST_INDUCTOR"


def random_plan(model: nn.Module, x: Tensor, seed: int = 0) -> Plan:
    chart = trace(copy.deepcopy(model), (x,))
    keep = np.random.default_rng(seed).random(chart.n_labels) > 0.4
    keep[0] = True
    assert not keep.all()
    return Plan(chart, keep)


class SmallResNet(nn.Module):
    """A stem, a block that adds in place, a norm over all channels, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.block, self.norm, self.head = BasicBlock(8, 8), nn.GroupNorm(1, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(F.relu(self.bn(self.stem(x)), inplace=True))  # (N, 8, H, W)
        return self.head(self.norm(x).mean((2, 3)))  # type: ignore[no-any-return]


class Fixture(SimpleNamespace):
    """A model, images, a plan, and another plan of the same channel map."""

    model: nn.Module
    x: Tensor
    plan: Plan
    other: Plan


@pytest.fixture
def small() -> Iterator[Fixture]:
    torch.manual_seed(0)
    model, x = SmallResNet().double(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    plan = random_plan(model, x)
    yield Fixture(model=model, x=x, plan=plan, other=Plan(plan.channel_map, random_plan(model, x, 1).keep))
    torch._dynamo.reset()


def assert_zero(model: nn.Module, plan: Plan) -> None:
    for name, parameter in model.named_parameters():
        if (mask := plan.mask(name)) is not None:
            assert (parameter[~mask.expand(parameter.shape)] == 0).all(), name
            assert parameter.grad is not None
            assert (parameter.grad[~mask.expand(parameter.shape)] == 0).all(), name


def trained(small: Fixture, backend: str | None) -> tuple[list[float], nn.Module, CompiledForward | None]:
    """Five steps with momentum and weight decay, the plan changed after the third; every step is looked at."""
    model = copy.deepcopy(small.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    losses, plan = [], small.plan
    with ChangingMasks(model, plan, optimizer) as masks, ActivationMasks(model, {"block.relu": 0.1}, count=False):
        step = model if backend is None else CompiledForward(model, backend)
        for number in range(5):
            if number == 3:
                plan = small.other
                masks.update(plan)
            loss = F.cross_entropy(step(small.x), torch.arange(4))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            assert_zero(model, plan)
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model, step if isinstance(step, CompiledForward) else None


@pytest.mark.slow
def test_masked_training_compiled_is_what_it_is_in_eager(small: Fixture) -> None:
    expected, eager, _ = trained(small, None)
    losses, model, step = trained(small, "eager")
    assert step is not None
    assert step.compilation.fallback is None  # every step was one graph, without a break
    assert step.compilation.graphs == 2  # the second for the norms of the other plan, whose hooks are others
    assert step.compilation.seconds > 0
    assert losses == pytest.approx(expected, rel=1e-10)
    for one, two in zip(model.state_dict().values(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10)


class Roots(nn.Module):
    """Square roots, whose derivative at a pruned channel's zeros is infinite: NaN comes back through it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).relu()).abs().sqrt().mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_what_comes_back_through_pruned_channels_is_masked_in_the_graph() -> None:
    torch.manual_seed(0)
    model, x = Roots().double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    plan, found = random_plan(model, x), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with masked(model, plan, optimizer):
        for step in (model, CompiledForward(model, "aot_eager")):
            model.zero_grad()
            step(x).sum().backward()
            found.append([parameter.grad for parameter in model.parameters()])
        assert step.compilation.fallback is None
    for eager, compiled in zip(*found, strict=True):
        assert eager is not None
        assert eager.isfinite().all()
        torch.testing.assert_close(compiled, eager)


@pytest.mark.slow
def test_hooks_that_come_and_go_are_seen(small: Fixture) -> None:
    model, x = small.model, small.x
    step = CompiledForward(model, "eager")
    before = step(x)
    handle = model.stem.register_forward_hook(lambda module, inputs, output: output * 2)  # type: ignore[union-attr]
    model.bn.eval()  # type: ignore[union-attr]
    torch.testing.assert_close(step(x), model(x))
    handle.remove()
    model.bn.train()  # type: ignore[union-attr]
    torch.testing.assert_close(step(x), before)
    assert (step.compilation.graphs, step.compilation.fallback) == (2, None)
    assert "forward" not in vars(model)


@pytest.mark.slow
def test_what_was_compiled_of_the_class_before_is_not_used(small: Fixture) -> None:
    torch.compile(small.model, backend="eager")(small.x)
    with ActivationMasks(small.model, 0.3, count=False):
        torch.testing.assert_close(CompiledForward(small.model, "eager")(small.x), small.model(small.x))


class Flipping(SmallResNet):
    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result if float(result.detach().sum()) < 1e9 else -result


def backward_hook(model: nn.Module) -> RemovableHandle:
    return model.head.register_full_backward_hook(lambda module, given, taken: (given[0] * 2,))  # type: ignore


def writing_hook(model: nn.Module) -> RemovableHandle:
    return model.head.register_forward_hook(lambda *_: sys.stdout.write("head\n") and None)  # type: ignore


def hook_on_all(model: nn.Module) -> RemovableHandle:
    return nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 1.5)


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (backward_hook, "Module-level backwards hooks"),
        (writing_hook, r"method `write` .*test_compilation\.py\", line \d+"),
        (hook_on_all, r"hooks on all modules \(register_module_forward_hook"),
    ],
)
def test_what_cannot_be_compiled_runs_in_eager_and_says_why(
    small: Fixture, hook: Callable[[nn.Module], RemovableHandle], reason: str
) -> None:
    model = small.model
    step, handle = CompiledForward(model, "eager"), hook(model)
    found = []
    try:
        for run in (model, step, step):
            model.zero_grad()
            run(small.x).sum().backward()
            found.append(model.head.weight.grad)  # type: ignore[union-attr]
    finally:
        handle.remove()
    assert torch.equal(found[0], found[1])  # type: ignore[arg-type]
    assert torch.equal(found[0], found[2])  # type: ignore[arg-type]
    assert step.compilation.graphs == 0
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(step.compilation)


def test_a_model_that_cannot_be_compiled_names_its_line() -> None:
    step = CompiledForward(Flipping(), "eager")
    step(torch.randn(2, 3, 8, 8))
    assert str(step.compilation).startswith("trained in eager, because steps could not be compiled: ")
    assert "test_compilation.py" in str(step.compilation)
    assert "in forward" in str(step.compilation)


@pytest.mark.slow
def test_hooks_that_a_compiled_model_leaves_out_are_an_error(small: Fixture) -> None:
    model, plan = small.model, small.plan
    compiled = torch.compile(model, backend="eager")
    compiled(small.x)
    for owner in (
        ActivationMasks(model, {"block.relu": 0.1}, count=False),
        GradientMasks(model, plan),
        NarrowNorms(model, plan.channel_map, plan.keep),
    ):
        with owner:
            expected = f"{type(owner).__name__}: its hooks did not run, because .* compiled before"
            with pytest.raises(ModelError, match=expected):
                compiled(small.x)
            model(small.x)  # by itself it is hooked
    with NarrowNorms(model, plan.channel_map, plan.keep):
        torch._dynamo.reset()
        torch.testing.assert_close(compiled(small.x), model(small.x))


def test_a_run_trains_compiled_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "CompiledForward", partial(CompiledForward, backend="eager"))
    runs = []
    for settings in (
        TrainSettings(epochs=2),
        TrainSettings(epochs=2, compile=True),
        TrainSettings(epochs=1, compile=True, clamp_activation_grad=ClampSettings(0.01)),
    ):
        model = net()
        plan = random_plan(model, torch.zeros(2, 3, 8, 8))
        parts = [ContextCallback(lambda training, plan=plan: masked(training.model, plan, training.optimizer))]
        history = fit(model, splits(), settings, device=CPU, seed=0, batch=16, callbacks=parts)
        runs.append((history, model))
    (eager, one), (compiled, two), (clamped, _) = runs
    assert eager.compilation is None
    assert compiled.compilation is not None
    assert (compiled.compilation.graphs, compiled.compilation.fallback) == (1, None)
    assert [row.train_loss for row in compiled.rows] == pytest.approx([row.train_loss for row in eager.rows], rel=1e-5)
    for first, second in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
    assert clamped.compilation is not None
    expected = "ActivationGradientClamp: gradients go through Python while the backward pass runs"
    assert clamped.compilation.fallback == expected
    assert clamped.clamps


@pytest.mark.skipif(WANTED not in os.environ, reason=f"half a minute of a C++ compiler's time; set {WANTED}=1")
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not there")
def test_by_inductor() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(8, 6)
    plan = random_plan(model, x)
    found = []
    with masked(model, plan):
        for step in (model, CompiledForward(model)):
            model.zero_grad()
            loss = F.cross_entropy(step(x), torch.arange(8) % 4)
            loss.backward()  # type: ignore[no-untyped-call]
            assert_zero(model, plan)
            found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
        assert step.compilation.fallback is None
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(eager, compiled)


def test_a_backend_that_fails_leaves_steps_in_eager() -> None:
    def broken(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        raise RuntimeError("no compiler here")

    model, x = nn.Linear(6, 4), torch.randn(9, 6)
    step = CompiledForward(model, broken)
    assert torch.equal(step(x), model(x))
    expected = "trained in eager, because steps could not be compiled: RuntimeError: no compiler here"
    assert str(step.compilation) == expected
