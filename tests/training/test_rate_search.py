"""The search for a learning rate: what it tries and takes. Training after it is as if the rate had been given."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_group import together
from test_resumed_schedule import Turning
from torch import Tensor, nn
from training_models import CPU, Ends, EndsAfter, net, splits

import prunekit
from prunekit.distributed.process_group import rank
from prunekit.errors import RecipeError, UsageError
from prunekit.masks.masked_model import masked
from prunekit.planning.plan import Plan
from prunekit.recipe.loading import load
from prunekit.settings.pruning import ScheduleSettings
from prunekit.settings.train import (
    AverageSettings,
    CheckpointSettings,
    ClampSettings,
    DistillSettings,
    FeatureSettings,
    RegularizerSettings,
    TrainSettings,
)
from prunekit.training import rate_search
from prunekit.training.callbacks.callback import Callback, ContextCallback, History, RateRow, TrainingRun
from prunekit.training.callbacks.pruning_schedule import LearningRateRewinding, PruningSchedule
from prunekit.training.callbacks.selection import CallbackInputs, build_callbacks
from prunekit.training.checkpoints import Checkpoints
from prunekit.training.loop import fit
from prunekit.training.optimizers import build_optimizer
from prunekit.training.rate_search import planned_trials, taken_rate

AUTO = TrainSettings(epochs=3, lr="auto")
"""Three epochs of four steps; with all of them as the budget, three rates of four steps."""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets trials take as many steps as the training has."""
    monkeypatch.setattr(rate_search, "SHARE", 1.0)
    monkeypatch.setattr(rate_search, "STEPS", 4)


class Odd(nn.Module):
    """Has a buffer in no state dict that it replaces, an attribute that it sets, and random numbers of its own."""

    def __init__(self, *, draws: bool = True) -> None:
        super().__init__()
        self.layers = net()
        self.register_buffer("passes", torch.zeros(1), persistent=False)
        self.draws = torch.Generator().manual_seed(3) if draws else None
        self.largest = 0.0

    def forward(self, images: Tensor) -> Any:
        if self.training:
            self.passes = self.passes + 1
            self.largest = max(self.largest, float(self.passes))
        if self.training and self.draws is not None:
            images = images + 0.01 * torch.randn(images.shape, generator=self.draws)
        return self.layers(images)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def figures(history: History) -> list[Any]:
    kept = ("lr", "train_loss", "train_score", "validation_loss", "validation_score", "skipped")
    return [[[getattr(row, name) for name in kept] for row in history.rows], history.clamps, history.start]


def run(model: nn.Module, settings: TrainSettings = AUTO, *parts: Callback, batch: int = 16, **more: Any) -> History:
    teacher = net(7)
    masks = next((lambda part=part: part.plan for part in parts if isinstance(part, PruningSchedule)), lambda: None)
    chart = None if settings.regularize is None else prunekit.trace(model, (torch.zeros(2, 3, 8, 8),))
    asked = build_callbacks(settings, CallbackInputs(splits(), batch, teacher, chart, masks=masks))
    return fit(model, splits(), settings, device=CPU, seed=1, batch=batch, callbacks=[*parts, *asked], **more)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_trials_take_a_twentieth_of_the_steps_and_span_two_decades(optimizer: Any) -> None:
    settings = TrainSettings(lr="auto", optimizer=optimizer)
    for steps in (0, 479, 480, 800, 1000, 30_000):
        rates, each = planned_trials(settings, steps)
        assert bool(rates) == (steps >= 480)
        assert len(rates) * each <= 0.05 * steps
        if rates:
            assert 3 <= len(rates) <= 6
            ratios = np.diff(np.log10(rates))
            assert ratios == pytest.approx(ratios[0], abs=0.05)
            assert 2 <= math.log10(rates[-1] / rates[0]) <= 2.53
            middle = taken_rate(settings, ())
            assert math.log10(middle) == pytest.approx(np.log10(rates).mean(), abs=0.02)
    assert planned_trials(TrainSettings(lr=0.1), 30_000) == ((), 0)


def row(rate: float, loss: float | None) -> RateRow:
    return RateRow(rate, 4, loss)


def test_the_rate_of_the_lowest_loss_is_taken_and_the_lowest_rate_if_none_helps() -> None:
    tried = [row(0.1, 0.5), row(0.2, 0.3), row(0.3, None)]
    assert taken_rate(AUTO, [row(0, 0.4), *tried]) == 0.2
    assert taken_rate(AUTO, [row(0, None), *tried]) == 0.2
    assert taken_rate(AUTO, [row(0, 0.3), *tried]) == 0.1
    assert taken_rate(AUTO, [row(0, 0.3), row(0.1, None), row(0.2, None)]) == 0.1


FEATURES = DistillSettings(features=FeatureSettings(("0", "1", "5")))
CASES: dict[str, dict[str, Any]] = {
    "sgd": {"nesterov": True, "label_smoothing": 0.1},
    "adamw, accumulated": {"optimizer": "adamw", "accumulate": 2, "epochs": 6},
    "clamps, mixup": {
        "clamp_activation_grad": ClampSettings(0.002), "clamp_weight_grad": ClampSettings(0.1, by="norm"), "mixup": 0.5
    },
    "average": {"average": AverageSettings(decay=0.9)},
    "distilled": {"distill": FEATURES},
    "lasso": {"regularize": RegularizerSettings("group_lasso", 0.01)},
    "fp16": {"precision": "fp16"},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_training_is_as_if_the_rate_had_been_given(case: str, short: None) -> None:
    settings = replace(AUTO, **CASES[case])
    found, expected = (net(), net()) if settings.distill != "auto" or settings.regularize else (Odd(), Odd())
    history = run(found, settings)
    start, *tried = history.rates
    assert (start.rate, start.steps) == (0, 0)
    assert [each.rate for each in tried] == list(planned_trials(settings, 12)[0])
    assert len({each.held_out_loss for each in history.rates}) == len(history.rates)
    assert history.lr is not None
    given = run(expected, replace(settings, lr=history.lr))
    assert figures(history) == figures(given)
    assert same(values(found), values(expected))
    assert isinstance(found, nn.Sequential) or torch.equal(found.draws.get_state(), expected.draws.get_state())
    assert (given.lr, given.rates) == (None, ())


class Zeros(Callback):
    """Looks for what is pruned after each step of the optimizer, trials included."""

    def __init__(self, plan: Any) -> None:
        self.plan, self.looked, self.trials = plan, 0, 0

    @contextmanager
    def active(self, run: TrainingRun) -> Iterator[None]:
        def look(*_: Any) -> None:
            mask = self.plan().mask("0.weight")
            if mask is not None:
                assert not run.model.get_parameter("0.weight").detach()[~mask.expand(8, 3, 3, 3)].any()
                self.looked += 1

        handle = run.optimizer.register_step_post_hook(look)
        yield
        handle.remove()

    @contextmanager
    def around_trial(self) -> Iterator[None]:
        self.trials += 1
        yield


def test_masks_hold_in_trials(short: None) -> None:
    plan = prunekit.plan(net(), (torch.zeros(2, 3, 8, 8),), channels=0.5)
    models, histories = (net(), net()), []
    for model, lr in zip(models, ("auto", None), strict=True):
        under = ContextCallback(lambda run: masked(run.model, plan, run.optimizer, restore=False))
        settings = replace(AUTO, lr=lr or histories[0].lr)
        histories.append(run(model, settings, under, zeros := Zeros(lambda: plan)))
        assert (zeros.looked, zeros.trials) == ((24, 5) if lr else (12, 1))  # BatchNorms' statistics first
    assert same(values(models[0]), values(models[1]))


class Held(Callback):
    """Takes the values behind the masks after the first step."""

    def __init__(self, part: PruningSchedule) -> None:
        self.part = part

    def after_step(self, step: int, made: bool) -> None:
        if step == 1:
            self.values = {name: value.clone() for name, value in self.part.masks.held.values.items()}


@pytest.mark.parametrize("gradients", ["masked", "straight_through"])
def test_a_pruning_schedule_does_not_see_trials(gradients: Any, short: None) -> None:
    found = []
    for lr in ("auto", None):
        model = net()
        chart = prunekit.trace(model, (torch.zeros(2, 3, 8, 8),))
        schedule = ScheduleSettings("linear", unit="step", regrow=True, every=2, end=6, freeze=10, gradients=gradients)
        start = Plan(chart, np.ones(chart.n_labels, bool))
        start = replace(start, element_masks={"5.weight": (torch.arange(512) % 3 > 0).view(4, 128)})
        part = PruningSchedule(schedule, start, Turning(schedule))
        history = run(model, replace(AUTO, lr=lr or found[0][0].lr), part, held := Held(part))
        found.append((history, values(model), part.plan.keep, part.changes, held.values))
    (history, *one), (given, *other) = found
    assert figures(history) == figures(given)
    assert same(one[0], other[0])
    assert np.array_equal(one[1], other[1])
    assert one[2] == other[2]
    assert same(one[3], other[3])


def test_a_trial_that_is_not_finite_loses(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rate_search.RATES, "sgd", (1e-2, 1e30))
    model, settings = net(), replace(AUTO, clamp_weight_grad=ClampSettings(0.1, by="norm"))
    history = run(model, settings)
    assert [each.held_out_loss is None for each in history.rates] == [False, False, True, True]
    assert history.lr == 1e-2
    assert same(values(model), values(trained_with(settings, 1e-2)))


def trained_with(settings: TrainSettings, rate: float) -> nn.Module:
    model = net()
    run(model, replace(settings, lr=rate))
    return model


class EndsInTrial(Callback):
    def __init__(self, at: int) -> None:
        self.left = at

    @contextmanager
    def around_trial(self) -> Iterator[None]:
        self.left -= 1
        if not self.left:
            raise Ends
        yield


@pytest.mark.parametrize("at", [1, 2, 4, 0])
def test_resumed_is_uninterrupted(at: int, short: None, tmp_path: Path) -> None:
    """A run that ends where BatchNorms are made ready, in the first trial, in the third, or in the first epoch."""

    def checkpoints() -> Checkpoints:
        return Checkpoints(tmp_path / "run", CheckpointSettings(every_steps=1), log=lambda _: None)

    settings = replace(AUTO, average=AverageSettings(decay=0.9), distill=DistillSettings(labels=0.5))
    whole, again = Odd(draws=False), Odd(draws=False)  # no checkpoint has what a module draws from
    history = run(whole, settings, EndsInTrial(0), EndsAfter(-1))
    with pytest.raises(Ends):
        run(Odd(draws=False), settings, EndsInTrial(at), EndsAfter(-1 if at else 2), checkpoints=checkpoints())
    resuming = EndsInTrial(0)
    resumed = run(again, settings, resuming, EndsAfter(-1), checkpoints=checkpoints())
    assert -resuming.left == {1: 5, 2: 5, 4: 2, 0: 0}[at]
    assert (resumed.rates, resumed.lr) == (history.rates, history.lr)
    assert same(dict(again.named_parameters()), dict(whole.named_parameters()))
    assert figures(resumed) == figures(history)
    over = run(Odd(draws=False), settings, EndsInTrial(1), EndsAfter(-1), checkpoints=checkpoints())
    assert (over.rates, over.lr, over.best_epoch) == (history.rates, history.lr, history.best_epoch)


def in_processes(folder: Path) -> list[Any]:
    rate_search.SHARE, rate_search.STEPS, found = 1.0, 3, list[Any]()
    for sharding, distill in (("replicas", FEATURES), ("full", DistillSettings())):
        settings = replace(AUTO, sharding=sharding, distill=distill)  # type: ignore[arg-type]
        model, given = net(), net()
        history = run(model, settings, batch=22)
        run(given, replace(settings, lr=history.lr), batch=22)
        ended = net()
        for at in (3, 0):
            checkpoints = Checkpoints(
                folder / f"{len(found)}-{rank()}", CheckpointSettings(every_steps=1), log=lambda _: None
            )
            try:
                again = run(ended, settings, EndsInTrial(at), batch=22, checkpoints=checkpoints)
            except Ends:
                ended = net()
        losses = [each.held_out_loss for each in history.rates]
        found.append((losses, same(values(model), values(given)), same(values(model), values(ended)), again.rates))
    return found


@pytest.mark.slow
def test_processes_agree_with_each_other_and_with_one(
    short: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rate_search, "STEPS", 3)  # as in the processes: three epochs of three steps
    told = together(2, tmp_path, in_processes, tmp_path / "runs")
    for distill, one, other in zip((FEATURES, DistillSettings()), *told, strict=True):
        assert one == other
        assert one[1:3] == (True, True)
        assert one[0] == [each.held_out_loss for each in one[3]]
        alone = run(net(), replace(AUTO, distill=distill), batch=22)
        assert one[0][0] == pytest.approx(alone.rates[0].held_out_loss, rel=1e-5)


def test_the_held_out_loss_is_the_loss_that_is_trained(short: None) -> None:
    """Of the start, in eval mode, with smoothed labels; of at most 512 samples."""
    model = net()
    x, y = splits().validation.fetch(torch.arange(20))
    expected = nn.functional.cross_entropy(model.eval()(x), y, label_smoothing=0.2).item()
    history = run(net(), replace(AUTO, label_smoothing=0.2))
    assert history.rates[0].held_out_loss == pytest.approx(expected, rel=1e-5)


def test_with_too_few_steps_the_middle_rate_is_taken() -> None:
    model = net()
    history = run(model)
    assert (history.rates, history.lr) == ((), 0.0055)
    assert same(values(model), values(trained_with(AUTO, 0.0055)))
    assert run(net(), replace(AUTO, epochs=0)) == History((), 0)


def test_what_cannot_be_searched_is_refused(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="the number is passed on as `lr=`"):
        run(net(), replace(AUTO, optimizer="own"), own_optimizer=torch.optim.SGD)
    rewinding = LearningRateRewinding(ScheduleSettings("iterative", rounds=2, rewind_lr=True))
    with pytest.raises(UsageError, match="rewinds the learning rate"):
        run(net(), replace(AUTO, epochs=4), rewinding)
    monkeypatch.setattr(rate_search, "FEWEST", 21)
    with pytest.raises(UsageError, match=r"expected at least 21, got 20; raise data\.validation_share"):
        run(net())
    with pytest.raises(UsageError, match="expected a number here"):
        build_optimizer(net(), AUTO)
    assert rate_search.middle_rate(TrainSettings(lr=0.3, optimizer="own")) == 0.3


REWINDING = "prune: {budget: {macs: 0.5}, schedule: {kind: iterative, rewind_lr: true}}"


@pytest.mark.parametrize(
    ("more", "place", "says"),
    [
        ("finetune: {optimizer: own, lr: auto}", "4:32", "a scale of their own"),
        (f"finetune: {{lr: auto}}\n{REWINDING}", "4:16", "rewinds"),
        ("baseline: {epochs: 3, lr: auto}", "4:27", "from random weights"),
        ("finetune: {lr: fast}", "4:16", "auto"),
        ("finetune: {lr: 0}", "4:16", "0"),
    ],
)  # fmt: skip
def test_a_recipe_says_where_it_cannot_be(more: str, place: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: mine\nmodel: {{name: resnet8, zoo: cifar}}\ndevice: cpu\n{more}\n")
    with pytest.raises(RecipeError) as caught:
        load(path)
    (line,) = [line for line in str(caught.value).splitlines() if ".lr" in line]
    assert f":{place}" in line
    assert says in line


def test_a_recipe_may_leave_the_rate_open(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nmodel: {name: resnet8, zoo: cifar}\nbaseline: {epochs: 1}\nfinetune: {lr: auto, epochs: 0}\n"
    )
    assert load(path).finetune.lr == "auto"
