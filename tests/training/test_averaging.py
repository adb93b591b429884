"""EMA and SWA: the recursion and the mean by hand, what validation sees, masks, BatchNorm, and the saved state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from training_models import CPU, net, splits

import prunekit
from prunekit.data.loader import batches
from prunekit.hooks.hook import count_hooks
from prunekit.masks.masked_model import masked
from prunekit.measure.accuracy import evaluate
from prunekit.planning.plan import Plan
from prunekit.repair.batchnorm_statistics import recalibrate_batchnorm
from prunekit.settings.train import AverageSettings, TrainSettings
from prunekit.training.callbacks.averaging import Average
from prunekit.training.callbacks.callback import Callback, ContextCallback, EpochRow, TrainingRun
from prunekit.training.callbacks.selection import CallbackInputs, build_callbacks
from prunekit.training.loop import fit

State = dict[str, torch.Tensor]


class Recorder(Callback):
    """Copies of the weights after every step, and of what validation saw."""

    def __init__(self) -> None:
        self.steps: list[State] = []
        self.seen: list[State] = []

    def active(self, training: TrainingRun) -> Any:
        self.model = training.model
        return super().active(training)

    def after_step(self, step: int, made: bool) -> None:
        self.steps.append(self.now())

    def eligible_for_best(self, epoch: int) -> bool:
        if epoch:
            self.seen.append(self.now())
        return bool(epoch)

    def now(self) -> State:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def train(
    model: nn.Module, average: AverageSettings, *parts: Callback, **changes: Any
) -> tuple[Average, Recorder, Any]:
    settings = TrainSettings(**{"epochs": 4, "lr": 0.05, "average": average} | changes)
    (part,) = build_callbacks(settings, CallbackInputs(splits(), 16))
    assert isinstance(part, Average)
    recorder = Recorder()
    history = fit(model, splits(), settings, device=CPU, seed=1, batch=16, callbacks=[*parts, recorder, part])
    return part, recorder, history


def close(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        if value.is_floating_point():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_ema_is_its_recursion_and_is_what_is_validated_and_kept() -> None:
    model = net()
    part, recorder, history = train(model, AverageSettings(decay=0.8))
    ema = {name: value.clone() for name, value in recorder.steps[0].items()}
    at_epochs = []
    for step, weights in enumerate(recorder.steps[1:], 2):
        d = min(0.8, step / (step + 9))  # n = step - 1 updates so far: (1 + n) / (10 + n)
        for name, value in weights.items():
            ema[name] = d * ema[name] + (1 - d) * value if value.is_floating_point() else value
        if step % 4 == 0:
            at_epochs.append({name: value.clone() for name, value in ema.items()})
    for seen, expected in zip(recorder.seen, at_epochs, strict=True):
        close(seen, expected)
    close(part.average.module.state_dict(), ema)
    close(model.state_dict(), at_epochs[history.best_epoch - 1])
    shown = history.rows[history.best_epoch - 1].validation_score
    found = evaluate(model, batches(splits().validation, 16, shuffle_seed=None), "image_classification", CPU)
    assert found.values["top1"] == pytest.approx(shown)
    assert count_hooks(model) == 0


def test_complex_weights_are_averaged_too() -> None:
    average = Average(AverageSettings("ema", decay=0.5), lambda: None)
    average.average = AveragedModel(nn.Linear(2, 2, dtype=torch.cfloat), multi_avg_fn=average._update)
    first = average.average.module.weight.detach().clone()
    average.average.update_parameters(nn.Linear(2, 2, dtype=torch.cfloat))
    second = nn.Linear(2, 2, dtype=torch.cfloat)
    before = average.average.module.weight.detach().clone()
    average.average.update_parameters(second)
    share = 1 - min(0.5, 2 / 11)
    assert torch.allclose(average.average.module.weight, before + share * (second.weight - before))
    assert not torch.equal(before, first)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_a_model_that_python_does_not_copy_is_averaged() -> None:
    """Its weights are computed from others by every forward pass: `copy.deepcopy` refuses them."""
    model = nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(192, 8)), nn.ReLU(), nn.Linear(8, 4))
    part, recorder, _ = train(model, AverageSettings("swa", start=0.75))
    close(part.average.module.state_dict(), recorder.steps[-1])


def test_training_goes_on_from_the_raw_weights() -> None:
    plain, averaged = Recorder(), net()
    settings = TrainSettings(epochs=4, lr=0.05)
    fit(net(), splits(), settings, device=CPU, seed=1, batch=16, callbacks=[plain])
    _, recorder, _ = train(averaged, AverageSettings("swa", start=0.0))
    for a, b in zip(plain.steps, recorder.steps, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_swa_is_the_mean_of_epoch_ends_with_statistics_of_its_own() -> None:
    model = net()
    rows: list[EpochRow] = []
    settings = TrainSettings(epochs=4, lr=0.05, average=AverageSettings("swa", start=0.5, lr=0.02))
    parts = [recorder := Recorder(), *build_callbacks(settings, CallbackInputs(splits(), 16))]
    history = fit(model, splits(), settings, device=CPU, seed=1, batch=16, callbacks=parts, on_epoch=rows.append)
    ends = [recorder.steps[index] for index in (11, 15)]
    mean = {name: (ends[0][name] + ends[1][name]) / 2 for name in ends[0] if "running" not in name}
    by_hand = net()
    by_hand.load_state_dict({**ends[1], **mean})
    recalibrate_batchnorm(by_hand, batches(splits().train, 16, shuffle_seed=None))
    close(recorder.seen[3], by_hand.state_dict())
    close(recorder.seen[0], recorder.steps[3])  # no average yet
    assert history.best_epoch in (3, 4)  # epochs before do not count, however good
    assert [row.lr for row in rows[2:]] == [0.02, 0.02]
    assert rows[1].lr != 0.02


@pytest.mark.parametrize("statistics", ["averaged", "recalibrated"])
def test_statistics_are_averaged_or_taken_anew(statistics: Any) -> None:
    _, recorder, _ = train(net(), AverageSettings(decay=0.5, statistics=statistics), epochs=1)
    by_hand = {}
    for name in ("1.running_mean", "1.running_var"):
        ema = recorder.steps[0][name]
        for step, weights in enumerate(recorder.steps[1:], 2):
            d = min(0.5, step / (step + 9))
            ema = d * ema + (1 - d) * weights[name]
        by_hand[name] = ema
    same = [torch.allclose(recorder.seen[0][name], value, rtol=1e-5) for name, value in by_hand.items()]
    assert same == [statistics == "averaged"] * 2


@pytest.mark.parametrize("method", ["ema", "swa"])
def test_a_state_that_was_saved_goes_on_where_it_was(method: Any) -> None:
    settings = TrainSettings(average=AverageSettings(method, decay=0.7, every=1, start=0.0))
    torch.manual_seed(0)
    steps = [[torch.randn(p.shape) for p in net().parameters()] for _ in range(6)]

    def run(model: nn.Module, part: Average, first: int, last: int) -> None:
        for index in range(first, last):
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), steps[index], strict=True):
                    parameter.copy_(value)
            part.after_step(index + 1, True)

    def made() -> Average:
        (part,) = build_callbacks(settings, CallbackInputs(splits(), 16))
        assert isinstance(part, Average)
        return part

    whole, halves, model = made(), (made(), made()), net()
    training = TrainingRun(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU, 3, 2)
    with whole.active(training):
        run(model, whole, 0, 6)
    with halves[0].active(training):
        run(model, halves[0], 0, 3)
        saved = halves[0].state_dict()
        run(model, halves[0], 3, 4)  # what was saved does not follow
    with halves[1].active(training):
        halves[1].load_state_dict(saved)
        run(model, halves[1], 3, 6)
    close(halves[1].average.state_dict(), whole.average.state_dict())
    assert int(halves[1].average.n_averaged) == 6


@pytest.mark.parametrize("method", ["ema", "swa"])
def test_channels_pruned_on_the_way_are_zero_in_the_average_at_once(method: Any) -> None:
    """A plan comes into force after averaging began: a mere average would keep a rest of what was there."""
    model = net()
    chart = prunekit.trace(model, (torch.zeros(2, 3, 8, 8),))
    keep = np.ones(chart.n_labels, bool)
    keep[chart.groups[0].labels[:3]] = False
    plan, in_force = Plan(chart, keep), []
    settings = TrainSettings(epochs=3, lr=0.05, average=AverageSettings(method, start=0.0))
    masks = lambda: plan if in_force else None  # noqa: E731

    class Late(Callback):
        def after_step(self, step: int, made: bool) -> None:
            if step == 5:
                in_force.append(masked(model, plan, restore=False))
                in_force[0].__enter__()

    class Looks(Callback):
        def after_step(self, step: int, made: bool) -> None:
            values = average.average.module[0].weight[~torch.from_numpy(keep[chart.labels["0.weight"][0]])]
            zeros.append(not bool(values.any()))

    (average,) = build_callbacks(settings, CallbackInputs(splits(), 16, masks=masks))
    assert isinstance(average, Average)
    zeros: list[bool] = []
    fit(model, splits(), settings, device=CPU, seed=1, batch=16, callbacks=[Late(), average, Looks()])
    in_force[0].__exit__(None, None, None)
    every = 4 if method == "swa" else 1
    assert zeros == [step >= 5 and step >= (8 if every == 4 else 5) for step in range(1, 13)]


def test_masks_are_entered_as_a_part_and_hold_in_what_is_kept() -> None:
    model = net()
    chart = prunekit.trace(model, (torch.zeros(2, 3, 8, 8),))
    keep = np.ones(chart.n_labels, bool)
    keep[chart.groups[0].labels[:3]] = False
    plan = Plan(chart, keep)
    train(
        model,
        AverageSettings("swa", start=0.0),
        ContextCallback(lambda run: masked(model, plan, run.optimizer, restore=False)),
    )
    gone = ~torch.from_numpy(keep[chart.labels["0.weight"][0]])
    for name in ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean"):
        assert not model.state_dict()[name][gone].any(), name
