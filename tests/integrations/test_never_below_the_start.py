"""Trainings of pruned models by ultralytics deliver the model as given, where no epoch was better."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_shapes import draw_shapes
from torch import Tensor

pytest.importorskip("ultralytics")
from small_yolos import small_yolo
from ultralytics.models.yolo.classify import ClassificationTrainer
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils import LOGGER

from prunekit.integrations.ultralytics import PruneWhileTraining, load_yolo, prune_yolo
from prunekit.integrations.yolo.pruned_trainer import pruned_trainer

ABSURD = {"lr0": 1.0, "optimizer": "SGD", "warmup_epochs": 0, "epochs": 2}


class Stopped(Exception):
    """A training that is interrupted."""


def settings(folder: Path, data: Path, **more: Any) -> dict[str, Any]:
    quiet = {"plots": False, "verbose": False, "workers": 0, "device": "cpu", "exist_ok": True}
    same = {"data": str(data), "imgsz": 64, "batch": 4, "nbs": 4, "project": str(folder), "name": "run"}
    return {**same, **quiet, **more}


def judging(base: Any, *fitness: float) -> Any:
    """A trainer whose fitness after each validation is given, as the figures of so small models are near zero."""
    given = iter(fitness)

    class Judged(base):  # type: ignore[misc]
        def validate(self) -> Any:
            before = self.best_fitness
            metrics, _ = super().validate()
            found = next(given)
            self.best_fitness = found if before is None or before < found else before
            return metrics, found

    Judged.left = given
    return Judged


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_shapes(tmp_path_factory.mktemp("shapes"), images=8)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return prune_yolo(small_yolo(tmp_path_factory.mktemp("dense")), macs=0.5, imgsz=64)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What ultralytics' log is told."""
    lines, level = list[str](), LOGGER.level

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    LOGGER.addHandler(keeping := Keeping())
    LOGGER.setLevel(logging.INFO)
    yield lines
    LOGGER.setLevel(level)
    LOGGER.removeHandler(keeping)


def start_of(yolo: Any) -> dict[str, Tensor]:
    """The weights, rounded as ultralytics saves them."""
    return copy.deepcopy(yolo.model).half().float().state_dict()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def notes(said: list[str]) -> list[str]:
    return [line for line in said if line.startswith("No epoch's fitness was above")]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["detect", "classify"])
def test_a_training_that_ruins_the_model_delivers_the_start(
    task: str, small: Any, data: Path, tmp_path: Path, said: list[str]
) -> None:
    yolo, kind = load_yolo(copy.copy(small)), DetectionTrainer
    if task == "classify":
        data, kind = draw_shapes(tmp_path / "data", task=task, images=8), ClassificationTrainer
        yolo = prune_yolo(small_yolo(tmp_path, task), macs=0.5, imgsz=64)
    start = start_of(yolo)
    yolo.train(trainer=judging(kind, 0.5, 0.2, 0.5), **ABSURD, **settings(tmp_path, data, save_period=1))
    assert same(yolo.model.state_dict(), start)
    weights = tmp_path / "run" / "weights"
    assert same(load_yolo(weights / "best.pt").model.state_dict(), start)
    assert not same(load_yolo(weights / "last.pt").model.state_dict(), start)
    assert {path.name for path in weights.iterdir()} == {"best.pt", "last.pt", "epoch0.pt", "epoch1.pt"}
    assert len(notes(said)) == 1
    assert (
        "above 0.5, that of the pruned model as it was given, so best.pt is that model, in the half" in notes(said)[0]
    )


@pytest.mark.slow
def test_training_begins_with_what_the_model_as_given_computes(small: Any, data: Path, tmp_path: Path) -> None:
    """With the statistics of the batches that it trains on."""
    given, apart = load_yolo(copy.copy(small)), list[bool]()
    expected = copy.deepcopy(given.model).double().eval()
    before = expected.state_dict()
    name = next(name for name in before if name.endswith("running_mean"))

    class Comparing(DetectionTrainer):  # type: ignore[misc]
        def optimizer_step(self) -> None:
            pass

        def validate(self) -> Any:
            found = copy.deepcopy(self.ema.ema).double().eval()
            apart.append(not torch.equal(found.state_dict()[name], before[name]))
            x = torch.rand(2, 3, 64, 64, dtype=torch.float64)
            torch.testing.assert_close(found(x)[0], expected(x)[0], rtol=1e-4, atol=1e-4)
            return super().validate()

    given.train(trainer=Comparing, epochs=1, **settings(tmp_path, data))
    assert apart[:2] == [False, True]  # the start, and an epoch without steps


@pytest.mark.slow
def test_an_epoch_that_is_better_is_delivered(small: Any, data: Path, tmp_path: Path, said: list[str]) -> None:
    yolo, epochs = load_yolo(copy.copy(small)), []
    start = start_of(yolo)
    yolo.add_callback("on_model_save", lambda trainer: epochs.append(start_of(load_yolo(trainer.last))))
    yolo.train(trainer=judging(DetectionTrainer, 0.5, 0.6, 0.6), epochs=2, **settings(tmp_path, data))
    assert same(yolo.model.state_dict(), epochs[0])
    assert not same(epochs[0], epochs[1])
    assert not same(epochs[0], start)
    assert not notes(said)


@pytest.mark.slow
def test_with_the_dense_model_as_teacher_too(small: Any, data: Path, tmp_path: Path, said: list[str]) -> None:
    """ultralytics' own `distill_model` compares features of the dense model with those of fewer channels."""
    small_yolo(tmp_path).save(tmp_path / "dense.pt")
    kinds, losses = set[str](), list[dict[str, Any]]()
    for fitness, kept in (((0.5, 0.2, 0.3), True), ((0.5, 0.2, 0.6), False)):
        yolo = load_yolo(copy.copy(small))
        start = start_of(yolo)
        yolo.add_callback("on_train_batch_end", lambda trainer: kinds.add(type(trainer.model).__name__))
        yolo.add_callback("on_train_batch_end", lambda trainer: losses.append(trainer.loss_items))
        trainer, teacher = judging(DetectionTrainer, *fitness), str(tmp_path / "dense.pt")
        yolo.train(trainer=trainer, distill_model=teacher, epochs=2, **settings(tmp_path, data))
        assert same(yolo.model.state_dict(), start) == kept
        assert {name: value.shape for name, value in start.items()} == {
            name: value.shape for name, value in yolo.model.state_dict().items()
        }
    assert kinds == {"DistillationModel"}
    assert all(float(items["dis_loss"]) > 0 for items in losses)
    assert len(notes(said)) == 1


@pytest.mark.slow
def test_a_resumed_training_still_delivers_the_start(small: Any, data: Path, tmp_path: Path, said: list[str]) -> None:
    def stop(trainer: Any) -> None:
        if trainer.epoch == 0:
            raise Stopped

    yolo = load_yolo(copy.copy(small))
    start = start_of(yolo)
    yolo.add_callback("on_fit_epoch_end", stop)
    with pytest.raises(Stopped):
        yolo.train(trainer=judging(DetectionTrainer, 0.5, 0.2), epochs=3, **settings(tmp_path, data))
    resumed = load_yolo(tmp_path / "run" / "weights" / "last.pt")
    trainer = judging(DetectionTrainer, 0.5, 0.4)
    resumed.train(trainer=trainer, resume=True)
    assert resumed.trainer.start_epoch == 1
    assert not [*trainer.left]
    assert same(resumed.model.state_dict(), start)
    assert notes(said)


@pytest.mark.slow
def test_the_training_itself_is_as_without(
    small: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = []
    for offered in (False, True):
        monkeypatch.setattr(pruned_trainer(DetectionTrainer), "_offered", offered)
        yolo = load_yolo(copy.copy(small))
        yolo.train(epochs=2, **settings(tmp_path / str(offered), data))
        last.append(start_of(load_yolo(yolo.trainer.last)))
    assert same(*last)


@pytest.mark.slow
@pytest.mark.parametrize("without", ["val", "save"])
def test_without_a_choice_of_epochs_nothing_changes(
    without: str, small: Any, data: Path, tmp_path: Path, said: list[str]
) -> None:
    yolo = load_yolo(copy.copy(small))
    trainer = judging(DetectionTrainer, *([0.1] if without == "val" else [0.2, 0.1]))
    yolo.train(trainer=trainer, epochs=2, **{without: False}, **settings(tmp_path, data))
    assert not [*trainer.left]
    assert same(yolo.model.state_dict(), load_yolo(yolo.trainer.last).model.state_dict())
    assert not notes(said)


@pytest.mark.slow
def test_a_model_that_is_pruned_while_it_trains_has_no_start(small: Any, data: Path, tmp_path: Path) -> None:
    yolo = load_yolo(copy.copy(small))
    pruning = PruneWhileTraining(macs=0.8, epochs=1).attach(yolo)
    trainer = judging(DetectionTrainer, 0.9, 0.2)
    yolo.train(trainer=trainer, epochs=2, **settings(tmp_path, data))
    assert not [*trainer.left]
    assert pruning.plan is not None
    assert not same(yolo.model.state_dict(), start_of(small))
