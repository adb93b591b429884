"""Pruning during a training by ultralytics, by callbacks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from ultralytics.engine.model import Model
from ultralytics.nn.distill_model import DistillationModel
from ultralytics.nn.tasks import load_checkpoint
from ultralytics.utils.torch_utils import unwrap_model

from prunekit.compaction.compact_model import compact
from prunekit.errors import ArtifactError, ModelError, UsageError
from prunekit.hooks.hook import HOOK_TABLES, OwnedHook, count_hooks
from prunekit.integrations.yolo.pruned_trainer import STATE
from prunekit.integrations.yolo.pruned_yolo import (
    PrunedYOLO,
    channels_of,
    configuration,
    forget_image_size,
    left_by,
    marked,
    predictions,
    settings_of,
    training_examples,
)
from prunekit.measure.verification import Verification, verify
from prunekit.planning.plan import Plan, load_plan
from prunekit.pruning.pruner import Pruner
from prunekit.settings.pruning import ScheduleKind
from prunekit.utils.context import restored
from prunekit.utils.files import atomic_file

PLAN = "pruning_plan"
"""Name of the folder of the final plan, beside the checkpoints and the state that resuming needs."""
DECIDED = ("model", "optimizer", "example", "average", "outputs", "plain_classes", "steps", "scaler", "more_examples")
"""Arguments of `Pruner` that are given to it here."""


class PruneWhileTraining:
    """Pruning of a model while ultralytics' own `train` trains it: `attach`, `train`, `finish`.

    A `prunekit.Pruner` masks the model that the trainer trains, and its average of weights. `best.pt` is chosen among
    the epochs under the final plan alone, and the training does not end early before. Checkpoints hold the model in its
    dense size, with zeros, and load without prunekit; `finish` makes the pruned model of the best one. To resume,
    attach a new object with the same arguments: `YOLO("last.pt")`, `attach`, `train(resume=True)`.

    Args:
        epochs: that it takes until the budget is met, also fractions; None: half of those after `begin`. None too for
            the schedule `oneshot`.
        begin: epochs before it begins.
        schedule: `cubic`, `linear` or `exponential`, in 10 pruning steps; `iterative`, in 3; or `oneshot`, all at
            `begin`.
        arguments: of `prunekit.Pruner`: budgets (`macs=0.5`), of which at least one is given, `criterion`, `scope`,
            `ignore`, `calibration` and others. `gradient_masks` is False here: with their weights, norms and readers at
            zero, the gradients of pruned channels are zero by themselves. Blocks do not go as a whole (`depth`).

    Attributes:
        pruner: of the training that runs; None before and after it.
        plan: the final one; None before it is in force.
        verification: of masked and compact model, after `finish`.

    Raises:
        UsageError: no budget, or an argument that is decided here. From `train`, before the first epoch: the schedule
            does not fit the training, or the trainer trains another model than the one that this is attached to.

    Example:
        >>> from ultralytics import YOLO
        >>> from prunekit.integrations.ultralytics import PruneWhileTraining
        >>> yolo = YOLO("yolov8n.yaml")
        >>> pruning = PruneWhileTraining(macs=0.5, epochs=40).attach(yolo)
        >>> # yolo.train(data="coco8.yaml", epochs=100)
        >>> # small = pruning.finish()
    """

    prunes_while_training = True

    def __init__(
        self,
        *,
        epochs: float | None = None,
        begin: float = 0.0,
        schedule: ScheduleKind = "cubic",
        **arguments: Any,
    ) -> None:
        for name in DECIDED:
            if name in arguments:
                raise UsageError(f"{name}: PruneWhileTraining decides this itself, from the trainer; leave it out")
        for name, value in (("epochs", epochs), ("begin", begin)):
            if value is not None and not (isinstance(value, (int, float)) and value >= 0):
                raise UsageError(f"{name}: expected a number of epochs, at least 0, got {value!r}")
        if schedule == "oneshot" and epochs is not None:
            raise UsageError("epochs: expected none, as the schedule 'oneshot' prunes once, after `begin` epochs")
        self._epochs, self._begin, self._schedule = epochs, begin, schedule
        self._arguments = {"gradient_masks": False} | arguments
        self._yolo: Model | None = None
        self._structure = ""
        self._over = False
        self.pruner: Pruner | None = None
        self.plan: Plan | None = None
        self.verification: Verification | None = None

    def attach(self, yolo: Model) -> Self:
        """Prune during the next training of a model, and return this object.

        Args:
            yolo: object of ultralytics; gets callbacks.

        Raises:
            UsageError: it is none, or this object was attached before.
            ModelError: its model is under masks: `train` makes a model of its own, which they would not mask.
        """
        if not isinstance(yolo, Model) or not isinstance(yolo.model, nn.Module):
            raise UsageError(
                f"attach: expected an object of ultralytics with a model in torch, got {type(yolo).__name__}"
            )
        if self._structure:
            raise UsageError("attach: this PruneWhileTraining is attached already; make a new one for another training")
        if count_hooks(yolo.model):
            raise ModelError(
                "attach: hooks are on yolo.model, such as masks, but train() makes a model of its own, where they do "
                "nothing; leave the masks, PruneWhileTraining makes them on the model that is trained"
            )
        self._yolo, self._structure = yolo, _structure(yolo.model)
        for event, callback in self._callbacks().items():
            yolo.add_callback(event, callback)
        return self

    def finish(self) -> PrunedYOLO:
        """Return the pruned model of the best checkpoint, verified against the masked one.

        Raises:
            UsageError: there was no training yet, or it ended before the budget was met.
            VerificationError: masked and compact model differ.
        """
        trainer = getattr(self._yolo, "trainer", None)
        if self._yolo is None or trainer is None:
            raise UsageError("finish: expected a training before: pruning.attach(yolo), then yolo.train(...)")
        folder = Path(trainer.wdir)
        if self.plan is None and not (folder / PLAN).is_dir():
            raise UsageError(
                "finish: the training ended before the schedule, so the budget is not met; train for more epochs, or "
                "give a shorter schedule (epochs=)"
            )
        plan = self.plan or load_plan(folder / PLAN)
        file = Path(trainer.best) if Path(trainer.best).exists() else Path(trainer.last)
        masked, checkpoint = load_checkpoint(file)
        forget_image_size(masked)
        small = compact(masked, plan)
        self.verification = _verified(masked, small, plan)
        for event, callback in self._callbacks().items():
            self._yolo.callbacks[event] = [one for one in self._yolo.callbacks[event] if one != callback]
        made = PrunedYOLO.around(self._yolo, marked(masked, small, left_by(plan, masked)))
        made.plan = self.plan = plan
        made.ckpt["train_args"] = checkpoint.get("train_args", {})
        return made

    def _callbacks(self) -> dict[str, Callable[[Any], None]]:
        return {
            "on_train_start": self._start,
            "on_train_batch_start": self._keep_average,
            "on_train_batch_end": self._step,
            "on_train_epoch_end": self._end_epoch,
            "on_model_save": self._save,
            "teardown": self._leave,
        }

    def _start(self, trainer: Any) -> None:
        """Put the trainer's model under masks, before the first epoch."""
        if self._over or self.pruner is not None:
            raise UsageError("PruneWhileTraining: a training has ended with this one; attach a new one for the next")
        model = unwrap_model(trainer.model)
        if isinstance(model, DistillationModel):
            raise UsageError(
                "distill_model: a model is not pruned while it learns from a teacher; prune it first, and train the "
                "pruned one with the teacher: prune_yolo(...).train(distill_model=...)"
            )
        if _structure(model) != self._structure:
            name = Path(str(configuration(model).get("yaml_file", type(model).__name__))).stem
            raise ModelError(
                "PruneWhileTraining: the trainer trains another model than the one that this is attached to; it trains "
                f"{name}. Attach to the object whose train() is called; a model that was pruned by hand is rebuilt in "
                "its dense size by train(), so give it to load_yolo(yolo) first"
            )
        size = trainer.args.imgsz
        example = torch.zeros(2, channels_of(model), size, size, device=trainer.device)
        once = self._schedule == "oneshot"
        first, last = schedule_of(trainer, self._begin, 0.0 if once else self._epochs)
        forget_image_size(model)
        self.pruner = Pruner(
            trainer.model,
            trainer.optimizer,
            example,
            steps=None if once else last,
            begin=first,
            schedule=self._schedule,
            average=trainer.ema.ema,
            scaler=trainer.scaler if trainer.scaler.is_enabled() else None,
            outputs=predictions,
            more_examples=training_examples(model, example),
            plain_classes=True,
            **self._arguments,
        )
        forget_image_size(model)
        forget_image_size(trainer.ema.ema)
        if trainer.resume:
            self._resume(trainer, self.pruner)
        if not self.pruner.done:
            _forget_best(trainer)
        trainer.save_model = partial(_save_model, trainer, self.pruner, trainer.save_model)

    def _resume(self, trainer: Any, pruner: Pruner) -> None:
        """Go on from the state beside the checkpoint."""
        file = Path(trainer.wdir) / STATE
        if not file.exists():
            raise ArtifactError(
                f"{file}: expected the state of pruning beside the checkpoint, to resume from; not there"
            )
        state = torch.load(file, map_location="cpu", weights_only=True)
        if state["epoch"] != trainer.start_epoch - 1:
            raise ArtifactError(
                f"{file}: of epoch {state['epoch'] + 1}, but the checkpoint is of epoch {trainer.start_epoch}; start "
                "the training again"
            )
        pruner.load_state_dict(state["pruner"])

    def _keep_average(self, trainer: Any) -> None:
        """Keep the average of weights that is masked, where the trainer has made a new one after a NaN."""
        average = None if self.pruner is None else self.pruner.average
        if average is not None and trainer.ema.ema is not average:
            average.load_state_dict(trainer.ema.ema.state_dict())
            trainer.ema.ema, trainer.ema._pairs = average, None

    def _step(self, trainer: Any) -> None:
        pruner = self._running()
        before = pruner.done
        pruner.step()
        if pruner.done and not before:
            _forget_best(trainer)

    def _end_epoch(self, trainer: Any) -> None:
        if not self._running().done:
            _forget_best(trainer)

    def _save(self, trainer: Any) -> None:
        """Write the state that resuming needs, and the final plan."""
        pruner, folder = self._running(), Path(trainer.wdir)
        with atomic_file(folder / STATE) as file:
            torch.save({"epoch": trainer.epoch, "pruner": pruner.state_dict()}, file)
        if pruner.done and self.plan is None:
            self.plan = pruner.plan
            self.plan.save(folder / PLAN)

    def _leave(self, trainer: Any) -> None:
        if self.pruner is not None:
            if self.pruner.done:
                self.plan = self.pruner.plan
            self.pruner.close()
            self.pruner, self._over = None, True

    def _running(self) -> Pruner:
        if self.pruner is None:
            raise UsageError("PruneWhileTraining: the training has not begun")
        return self.pruner

    def __getstate__(self) -> dict[str, Any]:
        """Return what processes need that ultralytics starts for several devices."""
        return self.__dict__ | {"_yolo": None, "pruner": None}


def _save_model(trainer: Any, pruner: Pruner, save: Callable[[], Any]) -> Any:
    """Save as the trainer does, but write no `best.pt` before the final plan, and no hooks into checkpoints."""
    with restored([trainer], "best_fitness"), without_own_hooks(trainer.ema.ema):
        if not pruner.done:
            trainer.best_fitness = float("nan")  # equals no fitness
        return save()


@contextmanager
def without_own_hooks(model: nn.Module) -> Iterator[None]:
    """Take prunekit's hooks from a model for the time of a copy, and put them back in their order."""
    tables = [getattr(module, name) for module in model.modules() for name in HOOK_TABLES if hasattr(module, name)]
    before = [(table, dict(table)) for table in tables if any(isinstance(hook, OwnedHook) for hook in table.values())]
    try:
        for table, hooks in before:
            table.clear()
            table.update((key, hook) for key, hook in hooks.items() if not isinstance(hook, OwnedHook))
        yield
    finally:
        for table, hooks in before:
            table.clear()
            table.update(hooks)


def _forget_best(trainer: Any) -> None:
    """Let the next epoch be the best so far, and count epochs without improvement from it."""
    trainer.best_fitness = None
    trainer.stopper.best_fitness, trainer.stopper.best_epoch = 0.0, trainer.epoch if hasattr(trainer, "epoch") else 0
    trainer.stopper.possible_stop = False


def _verified(masked: nn.Module, small: nn.Module, plan: Plan) -> Verification:
    shape = next(iter(masked.parameters())).shape
    size = int(settings_of(masked)["imgsz"])
    example: Tensor = torch.rand(1, shape[1], size, size, generator=torch.Generator().manual_seed(0))
    return verify(masked, small, plan, [example], strict=True, outputs=predictions)


def _structure(model: nn.Module) -> str:
    """Return a digest of a model's modules and shapes, without those of its head, which follow from the classes."""
    head = f"model.{len(model.model) - 1}."  # type: ignore[arg-type]
    kinds = [f"{path} {type(module).__name__}" for path, module in model.named_modules() if not path.startswith(head)]
    shapes = [f"{path} {tuple(one.shape)}" for path, one in model.named_parameters() if not path.startswith(head)]
    return hashlib.sha256("\n".join([*kinds, *shapes]).encode()).hexdigest()


def steps_after(trainer: Any, epochs: float) -> int:
    """Return how many steps the optimizer has made after a number of epochs, from the first on.

    The trainer steps once `accumulate` batches have come since the last step, and raises `accumulate` from 1 during its
    warm-up.
    """
    batches = len(trainer.train_loader)
    warmup, nominal = trainer._get_warmup_iterations(batches), trainer.accumulate
    steps, last = 0, -1
    for batch in range(math.floor(epochs * batches)):
        rising = max(1, round(1 + (nominal - 1) * batch / warmup)) if batch <= warmup and warmup else nominal
        if batch - last >= rising:
            steps, last = steps + 1, batch
    return steps


def schedule_of(trainer: Any, begin: float, epochs: float | None) -> tuple[int, int]:
    """Return the steps of the optimizer before a schedule begins, after `begin` epochs, and until it ends.

    It takes `epochs`, 0 where it prunes once; None: half of those that remain.
    """
    total = trainer.epochs
    taken = (total - begin) / 2 if epochs is None else epochs
    if begin + taken > total:
        raise UsageError(
            f"epochs: the schedule begins after {begin:g} epochs and takes {taken:g}, but the training has {total}; "
            "train for more epochs, or give a shorter schedule"
        )
    first, last = steps_after(trainer, begin), steps_after(trainer, begin + taken)
    if taken and last <= first:
        raise UsageError(
            f"epochs: expected at least one step of the optimizer in {taken:g} epochs of {len(trainer.train_loader)} "
            f"batches, of which {trainer.accumulate} make a step (batch=, nbs=); train for more epochs, or set nbs to "
            "the batch size"
        )
    return first, last
