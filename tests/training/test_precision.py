"""Mixed precision: what runs in half, what is skipped, and zeros that stay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from training_models import CPU, net, splits

import prunekit
from prunekit.errors import NonFiniteError, UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.masks.masked_model import masked
from prunekit.planning.plan import Plan
from prunekit.settings.train import ClampSettings, TrainSettings
from prunekit.training import execution
from prunekit.training.callbacks.callback import ContextCallback, History
from prunekit.training.loop import fit

HALF = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SETTINGS = TrainSettings(epochs=2, lr=0.01)


def train(model: nn.Module, settings: TrainSettings, **options: Any) -> History:
    return fit(model, splits(), settings, device=CPU, seed=1, batch=16, **options)


@pytest.fixture
def overflowing(monkeypatch: pytest.MonkeyPatch) -> torch.amp.GradScaler:
    """A loss scale under which the first steps overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    monkeypatch.setattr(execution, "loss_scaler", lambda precision, device: scaler)
    return scaler


@contextmanager
def checked(model: nn.Module, plan: Plan, optimizer: Optimizer, steps: list[int]) -> Iterator[None]:
    """Masks that are looked at after every step."""

    def look(*_: Any) -> None:
        zeros = 0
        for name, parameter in model.named_parameters():
            mask = plan.mask(name)
            if mask is not None:
                pruned = parameter.detach()[~mask.expand(parameter.shape)]
                assert not pruned.view(torch.int32).any(), name
                zeros += pruned.numel()
        steps.append(zeros)

    with masked(model, plan, optimizer):
        handle = optimizer.register_step_post_hook(look)
        yield
        handle.remove()


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_pruned_weights_are_exactly_zero_after_every_step(optimizer: Any, precision: Any, accumulate: int) -> None:
    model, steps = net(), list[int]()
    example = (torch.rand(2, 3, 8, 8),)
    plan = prunekit.plan(model, example, channels=0.5)
    settings = replace(SETTINGS, optimizer=optimizer, precision=precision, accumulate=accumulate)
    before = model[5].weight.detach().clone()
    train(
        model, settings, callbacks=[ContextCallback(lambda training: checked(model, plan, training.optimizer, steps))]
    )
    assert steps == [steps[0]] * 2 * math.ceil(4 / accumulate)
    assert steps[0] > 200
    assert not torch.equal(model[5].weight, before)
    assert count_hooks(model) == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_runs_in_half_and_weights_and_validation_do_not(precision: Any) -> None:
    model = net()
    seen: set[tuple[bool, torch.dtype]] = set()
    handle = model[0].register_forward_hook(lambda m, i, o: seen.add((torch.is_grad_enabled(), o.dtype)))
    rows = train(model, replace(SETTINGS, epochs=4, lr=0.1, precision=precision)).rows
    handle.remove()
    assert seen == {(True, HALF[precision]), (False, torch.float32)}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert rows[-1].train_loss < 0.7 * rows[0].train_loss


def test_half_precision_stays_near_full_precision() -> None:
    models = {precision: net() for precision in HALF}
    for precision, model in models.items():
        model[3] = nn.Identity()
        train(model, replace(SETTINGS, precision=precision))  # type: ignore[arg-type]
    for name, value in models["fp32"].state_dict().items():
        torch.testing.assert_close(models["bf16"].state_dict()[name], value, rtol=0.05, atol=0.02)
        torch.testing.assert_close(models["fp16"].state_dict()[name], value, rtol=0.01, atol=0.003)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_steps_that_overflow_are_skipped_and_are_no_error(overflowing: torch.amp.GradScaler, optimizer: Any) -> None:
    model, steps = net(), list[int]()
    plan = prunekit.plan(model, (torch.rand(2, 3, 8, 8),), channels=0.5)
    settings = replace(SETTINGS, epochs=5, optimizer=optimizer, precision="fp16", clamp_weight_grad=ClampSettings(1e-3))
    before, after = model[5].weight.detach().clone(), list[torch.Tensor]()
    history = train(
        model,
        settings,
        callbacks=[ContextCallback(lambda training: checked(model, plan, training.optimizer, steps))],
        on_epoch=lambda row: after.append(model[5].weight.detach().clone()),
    )
    skipped = 20 - len(steps)
    assert skipped > 1
    assert [row.skipped for row in history.rows] == [skipped, 0, 0, 0, 0]
    assert history.rows[-1].lr > 0.0001  # the schedule waited for the skipped steps
    assert overflowing.get_scale() == 2.0 ** (18 - skipped)
    assert steps == [steps[0]] * len(steps)
    assert not torch.equal(after[-1], before)
    assert all(math.isfinite(row.train_loss) for row in history.rows)
    assert 0 < max(row.share for row in history.clamps) < 1


def test_an_epoch_without_a_step_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    monkeypatch.setattr(execution, "loss_scaler", lambda precision, device: scaler)
    model = net()
    with pytest.raises(NonFiniteError, match=r"epoch 1 made no step: .* float16's loss scale.*try `precision: bf16`"):
        train(model, replace(SETTINGS, precision="fp16"))
    assert count_hooks(model) == 0


def test_a_loss_that_is_not_finite_is_still_an_error() -> None:
    model = net()
    with torch.no_grad():
        model[5].weight[0] = math.inf
    with pytest.raises(NonFiniteError, match=r"the loss is nan in epoch 1, step 1; first not finite: parameter"):
        train(model, replace(SETTINGS, precision="fp16"))


def test_clamps_see_unscaled_gradients() -> None:
    """The same training with and without a loss scale, in full precision: a power of two changes no bit."""
    clamp = ClampSettings(2e-3)
    models = [net(), net()]
    settings = replace(SETTINGS, clamp_activation_grad=clamp, clamp_weight_grad=ClampSettings(1e-2, by="norm"))
    plain = train(models[0], settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            execution, "loss_scaler", lambda precision, device: torch.amp.GradScaler("cpu", init_scale=2.0**10)
        )
        scaled = train(models[1], settings)
    assert plain.clamps == scaled.clamps
    assert {row.clamp for row in plain.clamps} == {"clamp_activation_grad", "clamp_weight_grad"}
    assert any(0 < row.share < 1 for row in plain.clamps)
    for name, value in models[0].state_dict().items():
        assert torch.equal(models[1].state_dict()[name], value), name


def test_a_clamp_that_finds_no_module_stops_the_run_before_it_starts() -> None:
    model = net()
    before = model[5].weight.detach().clone()
    with pytest.raises(UsageError, match=r"clamp_weight_grad.*'conv' matches no module path; expected one of '0'"):
        train(model, replace(SETTINGS, clamp_weight_grad=ClampSettings(1.0, modules=("conv",))))
    assert torch.equal(model[5].weight, before)
    assert count_hooks(model) == 0
