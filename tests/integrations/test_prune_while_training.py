"""Pruning during a training by ultralytics: its average of weights, checkpoints, the best epoch, and resuming."""

from __future__ import annotations

import pickle
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_shapes import draw_shapes

pytest.importorskip("ultralytics")
from small_yolos import small_yolo
from ultralytics import YOLO

import prunekit as pk
from prunekit.errors import ArtifactError, ModelError, UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.integrations.ultralytics import PruneWhileTraining, load_yolo
from prunekit.integrations.yolo.prune_while_training import steps_after
from prunekit.integrations.yolo.pruned_yolo import predictions


def settings(folder: Path, data: Path, **more: Any) -> dict[str, Any]:
    quiet = {"plots": False, "verbose": False, "workers": 0, "device": "cpu", "exist_ok": True}
    return {"data": str(data), "imgsz": 64, "batch": 4, "nbs": 4, "project": str(folder), **quiet, **more}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_shapes(tmp_path_factory.mktemp("shapes"), images=12)


class Stopped(Exception):
    """A training that is interrupted."""


def watch(yolo: Any, pruning: PruneWhileTraining, *, stop: int | None = None) -> list[dict[str, Any]]:
    """Note at each epoch's end what holds then, and interrupt the training after an epoch."""
    seen: list[dict[str, Any]] = []

    def note(trainer: Any) -> None:
        if pruning.pruner is None or trainer.epoch >= trainer.epochs:  # the best model's final validation
            return
        plan, average = pruning.pruner.plan, trainer.ema.ema.state_dict()
        zero = all(
            not torch.any(state[name][(mask == 0).expand_as(state[name])])
            for state in (trainer.model.state_dict(), average)
            for name in average
            if (mask := plan.mask(name)) is not None and "running_var" not in name
        )
        row = {"final": pruning.pruner.done, "zero": zero, "best": trainer.best.exists(), "left": plan.totals()["MACs"]}
        seen.append(row)
        if trainer.epoch == stop:
            raise Stopped

    yolo.add_callback("on_fit_epoch_end", note)
    return seen


@pytest.mark.slow
def test_the_budget_is_met_while_it_trains_and_the_best_is_one_of_the_final_plan(data: Path, tmp_path: Path) -> None:
    yolo = small_yolo(tmp_path)
    fitness = iter([0.9, 0.8, 0.1, 0.3, 0.2])
    pruning = PruneWhileTraining(macs=0.5, epochs=2.5).attach(yolo)
    seen = watch(yolo, pruning)

    def judged(trainer: Any) -> None:  # the dense model is the better one, as always
        trainer.validate = types.MethodType(lambda own: validated(own, next(fitness, 0.1)), trainer)

    yolo.add_callback("on_train_start", judged)
    yolo.train(epochs=5, patience=1, **settings(tmp_path, data, name="run", val=True))
    assert [row["final"] for row in seen] == [False, False, True, True, True]
    assert [row["best"] for row in seen] == [False, False, True, True, True]
    assert all(row["zero"] for row in seen)
    assert seen[0]["left"][1] > seen[-1]["left"][1]
    small = pruning.finish()
    assert pruning.verification is not None
    assert pruning.verification.max_relative_difference < 1e-12
    macs = small.plan.totals()["MACs"]
    assert macs[1] <= 0.5 * macs[0]
    assert isinstance(small, YOLO)
    best = tmp_path / "run" / "weights" / "best.pt"
    assert b"prunekit" not in pickled(best)
    masked, image = YOLO(best).model, torch.rand(1, 3, 96, 64)
    with torch.no_grad():
        torch.testing.assert_close(small.model(image)[0], masked(image)[0], rtol=1e-3, atol=1e-3)
    small.save(tmp_path / "small.pt")
    load_yolo(tmp_path / "small.pt").train(epochs=1, **settings(tmp_path, data, name="tuned"))
    yolo.train(epochs=1, **settings(tmp_path, data, name="dense"))  # the callbacks are gone


def validated(trainer: Any, fitness: float) -> tuple[dict[str, float], float]:
    """What a trainer's `validate` does, with a given figure."""
    if trainer.best_fitness is None or trainer.best_fitness < fitness:
        trainer.best_fitness = fitness
    return {}, fitness


def pickled(path: Path) -> bytes:
    """The pickle in a file of torch."""
    return torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")  # type: ignore[attr-defined, no-any-return]


@pytest.mark.slow
def test_a_training_that_stopped_is_resumed_with_its_schedule(data: Path, tmp_path: Path) -> None:
    def begun(yolo: Any) -> PruneWhileTraining:
        return PruneWhileTraining(macs=0.5, epochs=2.5, begin=1).attach(yolo)

    first = small_yolo(tmp_path)
    seen = watch(first, begun_first := begun(first), stop=1)
    with pytest.raises(Stopped):
        first.train(epochs=4, **settings(tmp_path, data, name="run"))
    assert begun_first.pruner is None
    last = tmp_path / "run" / "weights" / "last.pt"
    saved, state = last.read_bytes(), (last.parent / "pruning.pt").read_bytes()
    yolo = YOLO(last)
    pruning = begun(yolo)
    later = watch(yolo, pruning)
    yolo.train(resume=True)
    assert [row["final"] for row in later] == [False, True]
    assert all(row["zero"] for row in later)
    assert later[0]["left"][1] < seen[-1]["left"][1]
    assert pruning.finish().plan.totals()["MACs"][1] == later[-1]["left"][1]
    last.write_bytes(saved)
    (last.parent / "pruning.pt").write_bytes(state)
    with pytest.raises(UsageError, match=r"last\.pt: this training prunes while it trains, and would go on without"):
        YOLO(last).train(resume=True)
    other = YOLO(last)
    PruneWhileTraining(macs=0.4, epochs=2.5, begin=1).attach(other)
    with pytest.raises(ArtifactError, match="state of a pruner: of other settings"):
        other.train(resume=True)
    (last.parent / "pruning.pt").unlink()
    bare = YOLO(last)
    begun(bare)
    with pytest.raises(ArtifactError, match=r"pruning\.pt: expected the state of pruning beside the checkpoint"):
        bare.train(resume=True)


@pytest.mark.slow
def test_a_training_of_another_model_fails_before_its_first_epoch(data: Path, tmp_path: Path) -> None:
    one, other = small_yolo(tmp_path), small_yolo(tmp_path, end2end=True)
    other.add_callback("on_train_start", PruneWhileTraining(macs=0.5).attach(one)._start)
    wider = Path(other.overrides["model"])
    wider.write_text(wider.read_text().replace("C2f, [32, True]", "C2f, [40, True]"))
    with pytest.raises(
        ModelError, match="trains another model than the one that this is attached to; it trains small-"
    ):
        other.train(epochs=2, **settings(tmp_path, data))
    by_hand = small_yolo(tmp_path)
    by_hand.model = pk.prune(by_hand.model, torch.rand(2, 3, 64, 64), channels=0.8, outputs=predictions).model
    PruneWhileTraining(macs=0.5).attach(by_hand)
    with pytest.raises(ModelError, match=r"rebuilt in its dense size by train\(\), so give it to load_yolo\(yolo\)"):
        by_hand.train(epochs=2, **settings(tmp_path, data))


@pytest.mark.slow
def test_what_cannot_work_is_told_before_the_first_epoch(data: Path, tmp_path: Path) -> None:
    yolo = small_yolo(tmp_path)
    for call, kind, message in (
        (lambda: PruneWhileTraining(macs=0.5, steps=3), UsageError, "steps: PruneWhileTraining decides this itself"),
        (lambda: PruneWhileTraining(macs=0.5, epochs=-1), UsageError, "epochs: expected a number of epochs"),
        (lambda: PruneWhileTraining(macs=0.5, epochs=1, schedule="oneshot"), UsageError, "epochs: expected none"),
        (lambda: PruneWhileTraining(macs=0.5).attach(yolo.model), UsageError, "attach: expected an object of ultra"),
        (lambda: PruneWhileTraining(macs=0.5).finish(), UsageError, "finish: expected a training before"),
    ):
        with pytest.raises(kind, match=message):
            call()
    plan = pk.plan(yolo.model, torch.rand(2, 3, 64, 64), macs=0.5, outputs=predictions)
    with pk.masked(yolo.model, plan), pytest.raises(ModelError, match=r"hooks are on yolo\.model, such as masks"):
        PruneWhileTraining(macs=0.5).attach(yolo)
    pruning = PruneWhileTraining(macs=0.5, epochs=3).attach(yolo)
    with pytest.raises(UsageError, match="attached already"):
        pruning.attach(yolo)
    with pytest.raises(UsageError, match="takes 3, but the training has 2; train for more epochs"):
        yolo.train(epochs=2, **settings(tmp_path, data))
    assert not (tmp_path / "train" / "weights" / "last.pt").exists()
    assert count_hooks(yolo.model) == 0


def test_it_is_sent_to_other_processes_without_the_model(tmp_path: Path) -> None:
    pruning = PruneWhileTraining(macs=0.5).attach(small_yolo(tmp_path))
    sent = pickle.loads(pickle.dumps(pruning))
    assert sent._structure == pruning._structure
    assert sent._yolo is None


@pytest.mark.parametrize(("batches", "nominal", "warmup"), [(7, 1, 0), (7, 4, 0), (10, 4, 25), (3, 16, 9)])
def test_steps_are_those_that_the_trainer_makes(batches: int, nominal: int, warmup: int) -> None:
    trainer = types.SimpleNamespace(
        train_loader=range(batches), accumulate=nominal, _get_warmup_iterations=lambda _: warmup
    )
    import numpy as np

    made, last, accumulate = 0, -1, nominal
    for number in range(batches * 5):  # as in BaseTrainer._do_train
        if warmup and number <= warmup:
            accumulate = max(1, int(np.interp(number, [0, warmup], [1, nominal]).round()))
        if number - last >= accumulate:
            made, last = made + 1, number
    assert steps_after(trainer, 5) == made
