"""Regularizers: their gradients against formulas written by hand, on channels that a shortcut ties."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from training_models import CPU, net, splits

import prunekit
from prunekit.errors import UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.planning.plan import Plan
from prunekit.settings.train import RegularizerSettings, TrainSettings
from prunekit.training.callbacks.callback import TrainingRun
from prunekit.training.callbacks.regularizers import SparsityRegularizer
from prunekit.training.loop import fit


class Residual(nn.Module):
    """Two convolutions and their BatchNorms that a shortcut ties to the stem, and a head behind a flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_bn = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.inner, self.inner_bn = nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.outer, self.outer_bn = nn.Conv2d(6, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem_bn(self.stem(x)))
        x = torch.relu(x + self.outer_bn(self.outer(torch.relu(self.inner_bn(self.inner(x))))))
        return self.head(nn.functional.adaptive_avg_pool2d(x, 2).flatten(1))  # type: ignore[no-any-return]


def residual() -> Residual:
    torch.manual_seed(0)
    model = Residual().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def slices(model: Residual, scales: bool) -> list[list[Tensor]]:
    """For each channel of the shortcut (4) and of the block (6) everything that carries it, by hand."""
    m, found = model, []
    for c in range(4):
        norms = [m.stem_bn.weight[c], m.outer_bn.weight[c]]
        reads = m.head.weight[:, 4 * c : 4 * c + 4]
        others = [m.stem_bn.bias[c], m.outer_bn.bias[c], m.stem.weight[c], m.stem.bias[c]]  # type: ignore[index]
        found.append(norms if scales else [*norms, *others, m.outer.weight[c], m.inner.weight[:, c], reads])
    for c in range(6):
        norm = [m.inner_bn.weight[c]]
        others = [m.inner_bn.bias[c], m.inner.weight[c], m.outer.weight[:, c]]
        found.append(norm if scales else [*norm, *others])
    return found


def added(
    model: nn.Module, settings: RegularizerSettings, plan: Plan | None = None, step: int = 1
) -> dict[str, Tensor]:
    """What a regularizer adds to gradients of zero, by parameter."""
    chart = prunekit.trace(model.float(), (torch.zeros(1, 3, 8, 8),)) if plan is None else plan.channel_map
    model.double()
    optimizer = SGD(model.parameters(), lr=0.0)
    part = SparsityRegularizer(settings, chart, plan)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with part.active(TrainingRun(model, optimizer, CPU, steps=20, epochs=2)):
        part.before_step(step)
        optimizer.step()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("method", ["group_lasso", "bn_l1"])
def test_lasso_by_labels_is_the_formula_on_coupled_channels(method: Any) -> None:
    model = residual()
    found = added(model, RegularizerSettings(method, strength=0.3))
    model.zero_grad()
    penalty = torch.zeros((), dtype=torch.float64)
    for parts in slices(model, method == "bn_l1"):
        entries = sum(part.numel() for part in parts)
        penalty = penalty + 0.3 * math.sqrt(entries) * sum((part.square().sum() for part in parts), penalty * 0).sqrt()
    penalty.backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-9)
    assert sum(float(gradient.abs().sum()) for gradient in found.values()) > 0


def test_the_penalty_shown_is_the_one_whose_gradient_is_added() -> None:
    model = residual()
    chart = prunekit.trace(residual().float(), (torch.zeros(1, 3, 8, 8),))
    part = SparsityRegularizer(RegularizerSettings("bn_l1", strength=0.5), chart)
    with part.active(TrainingRun(model, SGD(model.parameters(), lr=0.1), CPU, 1, 1)):
        shown = float(part.progress_metrics()["penalty"])
    shared = (model.stem_bn.weight.square() + model.outer_bn.weight.square()).sqrt().sum() * math.sqrt(2)
    assert shown == pytest.approx(0.5 * (shared + model.inner_bn.weight.abs().sum()).item(), rel=1e-2)


def test_one_norm_alone_gets_the_sign_that_network_slimming_gives_it() -> None:
    model = residual()
    found = added(model, RegularizerSettings("bn_l1", strength=0.02))
    torch.testing.assert_close(found["inner_bn.weight"], 0.02 * model.inner_bn.weight.detach().sign())
    assert not found["inner.weight"].any()


def test_channels_at_zero_stay_there() -> None:
    model = residual()
    with torch.no_grad():
        for part in slices(model, False)[0]:
            part.zero_()
    found = added(model, RegularizerSettings("group_lasso"))
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert not found["stem.weight"][0].any()


def removing(model: nn.Module) -> Plan:
    chart = prunekit.trace(model, (torch.zeros(1, 3, 8, 8),))
    keep = np.ones(chart.n_labels, bool)
    for group in chart.groups:
        keep[group.labels[:2]] = False
    return Plan(chart, keep)


@pytest.mark.parametrize(("step", "share"), [(1, 0), (10, 0), (11, 1 / 3), (21, 2 / 3), (31, 1), (40, 1)])
def test_growing_adds_lambda_w_where_the_plan_removes(step: int, share: float) -> None:
    model = residual()
    plan = removing(model.float())
    settings = RegularizerSettings("growing", strength=0.6, rise=0.75, every=10)
    found = added(model.double(), settings, plan, step)
    for name, parameter in model.named_parameters():
        mask = plan.mask(name)
        gone = torch.zeros_like(parameter) if mask is None else (~mask).double().expand(parameter.shape)
        torch.testing.assert_close(found[name], 0.6 * share * parameter.detach() * gone)


def removed_size(model: nn.Module, plan: Plan) -> float:
    """Root mean square of what the plan removes."""
    gone = [p.detach()[~m.expand(p.shape)] for n, p in model.named_parameters() if (m := plan.mask(n)) is not None]
    return float(torch.cat(gone).square().mean().sqrt())


def test_a_run_shrinks_what_is_to_go_and_keeps_the_end() -> None:
    sizes = []
    for strength in (1e-6, 5.0):
        model = net()
        plan = removing(model)
        settings = TrainSettings(epochs=4, lr=0.05, regularize=RegularizerSettings("growing", strength, every=1))
        part = SparsityRegularizer(settings.regularize, plan.channel_map, plan)  # type: ignore[arg-type]
        history = fit(model, splits(), settings, device=CPU, seed=1, batch=16, callbacks=[part])
        assert history.best_epoch == 4  # the only one at the ceiling from its first step to its last
        assert count_hooks(model) == 0
        sizes.append(removed_size(model, plan))
    assert sizes[1] < 0.3 * sizes[0]


@pytest.mark.parametrize("method", ["group_lasso", "bn_l1"])
def test_lasso_makes_channels_small_in_training(method: Any) -> None:
    smallest = []
    for strength in (1e-9, 0.3):
        model = net()
        chart = prunekit.trace(model, (torch.zeros(1, 3, 8, 8),))
        settings = TrainSettings(epochs=6, lr=0.1, regularize=RegularizerSettings(method, strength))
        part = SparsityRegularizer(settings.regularize, chart)  # type: ignore[arg-type]
        assert fit(model, splits(), settings, device=CPU, seed=1, batch=16, callbacks=[part]).best_epoch == 6
        smallest.append(model[1].weight.detach().abs().min().item())
    assert smallest[1] < 0.5 * smallest[0]


def test_the_loss_scale_does_not_change_a_penalty() -> None:
    """Under float16 the gradient is unscaled when the penalty comes to it."""
    weights = []
    for precision in ("fp32", "fp16"):
        model = net()
        chart = prunekit.trace(model, (torch.zeros(1, 3, 8, 8),))
        settings = TrainSettings(
            epochs=1,
            lr=0.1,
            warmup=0.0,
            precision=precision,
            regularize=RegularizerSettings("bn_l1", 0.5),  # type: ignore[arg-type]
        )
        fit(
            model,
            splits(),
            settings,
            device=CPU,
            seed=1,
            batch=16,
            callbacks=[SparsityRegularizer(settings.regularize, chart)],
        )  # type: ignore[arg-type]
        weights.append(model[1].weight.detach())
    assert float(weights[0].mean()) < 0.95
    torch.testing.assert_close(weights[0], weights[1], rtol=0.02, atol=0.02)


def test_what_cannot_be_regularized_is_said() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    chart = prunekit.trace(plain, (torch.zeros(1, 3, 8, 8),))
    part = SparsityRegularizer(RegularizerSettings("bn_l1"), chart)
    with (
        pytest.raises(UsageError, match="lies on the scale of a norm; use 'group_lasso'"),
        part.active(TrainingRun(plain, SGD(plain.parameters(), lr=0.1), CPU, 1, 1)),
    ):
        pass
    with pytest.raises(UsageError, match="'growing' shrinks the channels that a plan removes"):
        SparsityRegularizer(RegularizerSettings("growing"), chart)
