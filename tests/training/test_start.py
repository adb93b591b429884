"""The state before the first step, which training has to beat: where no epoch does, it is delivered bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from process_group import together
from torch import Tensor, nn
from torch.nn import functional
from training_models import CPU, Ends, EndsAfter, net, splits

import prunekit
from prunekit.data.augmentation import Mixing
from prunekit.data.loader import batches
from prunekit.distributed.process_group import rank
from prunekit.masks.scheduled_masks import Planner
from prunekit.planning.plan import Plan
from prunekit.settings.pruning import BudgetSettings, PruneSettings, ScheduleSettings
from prunekit.settings.train import AverageSettings, CheckpointSettings, DistillSettings, TrainSettings
from prunekit.training.callbacks.callback import History
from prunekit.training.callbacks.pruning_schedule import PruningSchedule
from prunekit.training.callbacks.selection import CallbackInputs, build_callbacks
from prunekit.training.checkpoints import BestWeights, Checkpoints
from prunekit.training.loop import TrainingLoop, fit
from prunekit.training.optimizers import transfer_run

WORSE = TrainSettings(epochs=2, lr=5.0, momentum=0.0)
"""A rate at which nothing is learnt."""


class Counting(nn.Module):
    """Counts its passes in train mode, in a buffer that is in no state dict and that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()
        self.register_buffer("passes", torch.zeros(1), persistent=False)

    def forward(self, images: Tensor) -> Any:
        if self.training:
            self.passes = self.passes + 1
        return self.layers(images)


def trained() -> Counting:
    """A model that tells the images apart; one whose start nothing beats."""
    model = Counting()
    fit(model, splits(), TrainSettings(epochs=6, lr=0.1), device=CPU, seed=1, batch=16)
    return model


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def run(model: nn.Module, settings: TrainSettings = WORSE, teacher: nn.Module | None = None, **options: Any) -> History:
    parts = [*options.pop("parts", ()), *build_callbacks(settings, CallbackInputs(splits(), 16, teacher))]
    return fit(model, splits(), settings, device=CPU, seed=1, **{"batch": 16, "callbacks": parts} | options)


AVERAGES = {"none": None, "ema": AverageSettings("ema"), "swa": AverageSettings("swa", start=0.0)}


@pytest.mark.parametrize("average", AVERAGES)
def test_where_no_epoch_is_better_the_start_is_delivered_bit_for_bit(average: str) -> None:
    model = trained()
    before = values(model)
    history = run(model, TrainSettings(epochs=2, lr=5.0, momentum=0.0, average=AVERAGES[average]))
    assert (history.best_epoch, len(history.rows)) == (0, 2)
    assert same(values(model), before)
    assert history.start is not None
    assert values(model).keys() > model.state_dict().keys()
    assert history.chosen()["validation"] == history.chosen()["start"] == history.start.validation_score


def test_the_best_epoch_has_its_buffers_too() -> None:
    """Those in no state dict are as they were at the end of that epoch."""
    model, seen = Counting(), {}
    history = fit(
        model, splits(), TrainSettings(epochs=3, lr=0.1), device=CPU, seed=1, batch=16,
        on_epoch=lambda row: seen.update({row.epoch: values(model)}),
    )  # fmt: skip
    assert model.passes.item() == 4 * history.best_epoch
    assert same(values(model), seen[history.best_epoch])


@pytest.mark.parametrize(
    ("start", "top1", "best"), [(90, [90, 90], 0), (50, [90, 90], 2), (50, [90, 70], 1), (math.nan, [10, 5], 1)]
)
def test_an_epoch_has_to_be_better_than_the_start(
    monkeypatch: pytest.MonkeyPatch, start: float, top1: list[float], best: int
) -> None:
    left = [start, *top1]
    monkeypatch.setattr(TrainingLoop, "validate", lambda self, when: (0.01, float(left.pop(0))))
    history = run(net(), TrainSettings(epochs=2, lr=0.1))
    assert history.best_epoch == best
    assert (history.start is None) == math.isnan(start)


def test_who_learns_from_a_teacher_alone_is_compared_by_the_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that fall, as on images that the weights have memorized, choose nothing."""
    scores, teacher = [99.0, 50.0, 40.0, 30.0], trained().eval()
    monkeypatch.setattr(TrainingLoop, "validate", lambda self, when: (0.01, scores.pop(0)))
    settings = TrainSettings(epochs=3, lr=0.05, distill=DistillSettings())
    history = run(net(3), settings, teacher=teacher)
    assert history.start is not None
    losses = [history.start.held_out_loss, *(row.held_out_loss for row in history.rows)]
    assert None not in losses
    assert history.best_epoch == losses.index(min(losses)) > 0
    assert history.chosen()["held_out_loss"] == min(losses)


def test_the_distance_is_of_images_as_they_are_and_of_blends() -> None:
    """What comes closer on blends alone may answer whole images worse."""
    student, teacher, data = net(3).eval(), trained().eval(), splits()
    history = run(student, TrainSettings(epochs=1, lr=0.05, distill=DistillSettings()), teacher=teacher)
    assert history.start is not None
    student, blends = net(3).eval(), Mixing(len(data.classes), 1.0, 1.0)
    read = [batches(data.validation, 16, shuffle_seed=None, mixing=way) for way in (None, blends)]
    each = [torch.cat([images for images, _ in some]) for some in read]
    assert not torch.equal(*each)
    with torch.no_grad():
        logs = [(student(images).log_softmax(1), teacher(images).log_softmax(1)) for images in each]
    apart = [functional.kl_div(*log, reduction="batchmean", log_target=True).item() for log in logs]
    assert history.start.held_out_loss == pytest.approx(sum(apart) / 2, rel=1e-5)


def test_a_student_that_is_its_teacher_stays_it_bit_for_bit() -> None:
    student, teacher = trained(), trained().eval()
    student.load_state_dict(teacher.state_dict())
    before = values(student)
    history = run(student, TrainSettings(epochs=1, lr=0.5, distill=DistillSettings()), teacher=teacher)
    assert history.start is not None
    assert (history.best_epoch, history.start.held_out_loss) == (0, pytest.approx(0, abs=1e-6))
    assert same(values(student), before)


def test_training_begins_with_what_the_start_computes_of_its_own_images() -> None:
    """Blends have other statistics than the images of BatchNorm's, and a rate near zero does not leave the start."""
    teacher = trained().layers
    student = net()
    student.load_state_dict(teacher.state_dict())
    settings = TrainSettings(epochs=2, lr=1e-9, distill=DistillSettings())
    history = run(student, settings, teacher=teacher)
    assert history.start is not None
    assert all(
        row.held_out_loss is not None and row.held_out_loss < 1e-4 for row in history.rows
    )  # else ten times that


def test_less_may_be_better() -> None:
    kept = BestWeights(nn.Linear(1, 1), None, print, lower_is_better=True)
    for epoch, score in enumerate([5.0, 7.0, 5.0]):
        kept.offer(epoch, score)
    assert kept.epoch == 0
    kept.offer(3, 4.0)
    assert kept.epoch == 3


def test_a_start_whose_loss_is_not_finite_is_no_candidate() -> None:
    model = net()
    with torch.no_grad():
        model[1].running_var.fill_(-1.0)
        model[1].momentum = 1.0  # the first step sets it right
    history = run(model, TrainSettings(epochs=2, lr=0.05))
    assert history.start is None
    assert history.best_epoch > 0


def test_a_resumed_run_knows_its_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whens: list[str | None] = []
    validate = TrainingLoop.validate

    def noted(self: TrainingLoop, when: str | None) -> tuple[float | None, float]:
        whens.append(when)
        return validate(self, when)

    monkeypatch.setattr(TrainingLoop, "validate", noted)
    trained_model = trained()
    before = values(trained_model)
    whens.clear()

    def checkpoints() -> Checkpoints:
        return Checkpoints(tmp_path / "run", CheckpointSettings(every_steps=1), log=lambda _: None)

    with pytest.raises(Ends):
        run(trained_model, parts=[EndsAfter(2)], checkpoints=checkpoints())
    assert whens == [None]
    again = trained()
    whens.clear()
    history = run(again, parts=[EndsAfter(-1)], checkpoints=checkpoints())
    assert whens == ["epoch 1", "epoch 2"]
    whole = run(expected := trained(), parts=[EndsAfter(-1)])
    assert (history.best_epoch, history.start) == (0, whole.start)
    assert same(values(again), before)
    assert same(values(expected), before)
    over = run(finished := trained(), parts=[EndsAfter(-1)], checkpoints=checkpoints())
    assert (over.best_epoch, over.start) == (0, whole.start)
    assert same(values(finished), before)


class ToFinal(Planner):
    def __init__(self, final: Plan) -> None:
        self.final = final

    def plan(self, model: nn.Module, stage: Any, before: Plan) -> Plan:
        return self.final if stage.progress >= 1 else before


@pytest.mark.parametrize("final_at_once", [True, False])
def test_under_a_schedule_the_start_counts_if_its_plan_is_final(final_at_once: bool) -> None:
    model = trained().layers
    plan = prunekit.plan(model, (torch.zeros(2, 3, 8, 8),), settings=PruneSettings(BudgetSettings(channels=0.8)))
    settings = (
        ScheduleSettings("oneshot") if final_at_once else ScheduleSettings("linear", unit="step", end=3, rounds=1)
    )
    part = PruningSchedule(settings, Plan(plan.channel_map, plan.keep | True), ToFinal(plan))
    history = run(model, parts=[part])
    assert (history.start is not None) == (history.best_epoch == 0) == final_at_once
    assert (
        model[0].weight.detach().flatten(1).any(1).tolist()
        == plan.keep[plan.channel_map.labels["0.weight"][0]].tolist()
    )


def test_a_compact_model_goes_on_from_the_start_of_the_masked_one() -> None:
    model = trained().layers
    plan = prunekit.plan(model, (torch.zeros(2, 3, 8, 8),), settings=PruneSettings(BudgetSettings(channels=0.8)))
    whole = Plan(plan.channel_map, plan.keep | True)
    part = PruningSchedule(ScheduleSettings("oneshot"), whole, ToFinal(plan))
    before = values(prunekit.compact(model, plan))
    paused = run(model, parts=[part], until=lambda: True).paused
    assert paused is not None
    small = prunekit.compact(model, plan)
    history = run(small, begin=transfer_run(paused, plan), parts=[])
    assert history.best_epoch == 0
    assert history.start is not None
    assert same(values(small), before)


def in_processes(folder: Path) -> dict[str, Any]:
    found = {}
    for sharding in ("replicas", "full"):
        model = trained()
        before = values(model)
        settings = TrainSettings(epochs=2, lr=5.0, momentum=0.0, sharding=sharding)  # type: ignore[arg-type]

        def checkpoints(sharding: str = sharding) -> Checkpoints:
            settings = CheckpointSettings(every_steps=1, keep=1)
            return Checkpoints(folder / sharding / str(rank()), settings, log=lambda _: None)

        history = run(model, settings, batch=22)
        ended = trained()
        try:
            run(ended, settings, batch=22, parts=[EndsAfter(2)], checkpoints=checkpoints())
        except Ends:
            again = run(ended, settings, batch=22, parts=[EndsAfter(-1)], checkpoints=checkpoints())
        found[sharding] = [history.best_epoch, again.best_epoch, history.start == again.start] + [
            same(values(each), before) for each in (model, ended)
        ]
    return found


@pytest.mark.slow
def test_several_processes_deliver_the_start_too(tmp_path: Path) -> None:
    for found in together(2, tmp_path, in_processes, tmp_path / "runs"):
        assert found == {"replicas": [0, 0, True, True, True], "full": [0, 0, True, True, True]}
