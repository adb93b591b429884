"""Gradient flow: percentiles of the gradients that training has, when, and through a resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from training_models import CPU, net, splits

import prunekit
from prunekit.report.figures.charts import MOST_LAYERS, flow_figures, shown_layers
from prunekit.settings.train import TrainSettings
from prunekit.training.callbacks.callback import Callback, ContextCallback, TrainingRun
from prunekit.training.callbacks.gradient_flow import MOST, GradientFlow, flow_weights, gradient_percentiles
from prunekit.training.loop import fit

SETTINGS = TrainSettings(epochs=2, lr=0.01)


def test_percentiles_are_of_what_is_not_zero() -> None:
    weight = nn.Parameter(torch.zeros(5, 21))
    random = np.random.default_rng(0)
    values = random.normal(size=105) * (random.random(105) > 0.3)
    weight.grad = torch.from_numpy(values).reshape(5, 21).float()
    p10, median, p90, zeros = gradient_percentiles([weight], scale=4.0)[0].tolist()
    left = np.abs(values[values != 0]) / 4
    expected = np.percentile(left, (10, 50, 90), method="nearest")
    assert (p10, median, p90) == pytest.approx(expected, rel=1e-6)
    assert zeros == pytest.approx(np.mean(values == 0))


def test_large_gradients_are_sampled_at_all_places_of_a_kernel() -> None:
    weight = nn.Parameter(torch.zeros(MOST // 16, 16, 3, 3))
    weight.grad = torch.arange(9.0).reshape(3, 3).expand(weight.shape).clone()
    p10, median, p90, zeros = gradient_percentiles([weight])[0].tolist()
    assert (p10, median, p90) == (1, 4.0, 8) or (p10, median, p90) == (1, 5.0, 8)  # of 1 to 8, the median lies between
    assert zeros == pytest.approx(1 / 9, rel=0.05)


def test_layers_without_a_gradient_count_as_zeros() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    assert gradient_percentiles([weight])[0, 3] == 1
    weight.grad = torch.zeros(2, 2)
    assert torch.equal(gradient_percentiles([weight])[0].isnan(), torch.tensor([True, True, True, False]))
    assert list(flow_weights(net())) == ["0", "5"]
    assert list(flow_weights(nn.BatchNorm2d(3))) == ["weight", "bias"]


class Medians(Callback):
    """The medians of all gradients before each step, taken in another way."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, str], float] = {}

    def active(self, training: TrainingRun) -> Any:
        self.model = training.model
        return super().active(training)

    def before_step(self, step: int) -> None:
        for path in ("0", "5"):
            gradient = self.model.get_submodule(path).weight.grad.abs().numpy()
            self.found[step, path] = float(np.percentile(gradient[gradient > 0], 50, method="nearest"))


def train(model: nn.Module, *parts: Callback, settings: TrainSettings = SETTINGS) -> None:
    fit(model, splits(), settings, device=CPU, seed=1, batch=16, callbacks=parts)


def test_what_is_recorded_is_what_training_has() -> None:
    flow, medians = GradientFlow(), Medians()
    plain, watched = net(), net()
    train(plain)
    train(watched, flow, medians)
    assert {(row.step, row.layer): pytest.approx(row.median, rel=1e-6) for row in flow.records()} == medians.found
    assert [row.epoch for row in flow.records()][::2] == [step / 4 for step in range(1, 9)]
    pairs = zip(plain.state_dict().values(), watched.state_dict().values(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    few = GradientFlow(records=3)
    train(net(), few)
    assert [row.step for row in few.records() if row.layer == "5"] == [1, 4, 7]
    assert few.records() == tuple(row for row in flow.records() if row.step in (1, 4, 7))


def test_the_loss_scale_of_float16_is_taken_out_and_skipped_steps_are_left_out() -> None:
    flow, half = GradientFlow(), GradientFlow()
    train(net(), flow)
    train(net(), half, settings=TrainSettings(epochs=2, lr=0.01, precision="fp16"))
    first, halved = flow.records()[1], half.records()[1]
    assert (halved.step, halved.layer, halved.median) == (1, "5", pytest.approx(first.median, rel=0.05))
    part = GradientFlow()
    model = net()
    with part.active(TrainingRun(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU, 2, 1)):
        for step, made in ((1, False), (2, True)):
            part.before_step(step)
            part.after_step(step, made)
    assert {row.step for row in part.records()} == {2}


def test_records_go_on_from_a_state() -> None:
    whole = GradientFlow()
    train(net(), whole)
    model = net()
    training = TrainingRun(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU, 4, 2)
    again = GradientFlow()
    with again.active(training):
        again.load_state_dict(whole.state_dict())
    assert again.records() == whole.records()


def test_pruned_entries_are_the_zeros() -> None:
    model, flow = net(), GradientFlow(records=1)
    settings = prunekit.PruneSettings(prunekit.BudgetSettings(channels=0.5))
    plan = prunekit.plan(model, (torch.rand(2, 3, 8, 8),), settings=settings)
    train(model, ContextCallback(lambda training: prunekit.masked(model, plan, training.optimizer)), flow)
    mask = plan.mask("0.weight")
    assert mask is not None
    kept = float(mask.expand(model[0].weight.shape).float().mean())
    (row,) = (row for row in flow.records() if row.layer == "0")
    assert row.zeros == pytest.approx(1 - kept, abs=0.02)
    assert 0 < row.p10 < row.median < row.p90


def test_figures_of_few_many_and_dead_layers() -> None:
    def rows(layers: int, steps: int, dead: int = 0) -> pd.DataFrame:
        nans, numbers = (float("nan"),) * 3, (1e-6, 1e-4, 1e-2)
        return pd.DataFrame(
            [
                ("net", step, step / 4, f"layer{layer}.conv", *(nans if layer < dead else numbers), 0.5)
                for step in range(1, steps + 1)
                for layer in range(layers)
            ],
            columns=["run", "step", "epoch", "layer", "p10", "median", "p90", "zeros"],
        )

    for layers, steps, dead in ((3, 1, 0), (90, 2, 1), (2, 2, 2)):
        ((name, figure, shown, every),) = flow_figures(rows(layers, steps, dead))
        assert (name, shown, every) == ("net", min(layers, MOST_LAYERS), layers)
        assert "layer0.conv" in figure
    assert shown_layers(rows(90, 1))[:: MOST_LAYERS - 1] == ["layer0.conv", "layer89.conv"]
