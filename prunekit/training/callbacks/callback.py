"""The callback of a training run: what a feature does in the run, and the history of epochs that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prunekit.planning.plan import Plan


@dataclass(frozen=True)
class History:
    """Result of a training run."""

    rows: tuple[EpochRow, ...]  # one for each epoch, in order
    best_epoch: int  # the epoch whose weights the model was left with; 0: those that it came with
    clamps: tuple[ClampRow, ...] = ()  # how often gradient clamps were needed
    compilation: Compilation | None = None  # what came of compiling; None if it was not asked for
    # the state of a run that was left before its end, see `transfer_run`; None if it came to its end
    paused: PausedRun | None = None
    start: StartRow | None = None  # the weights before the first step, if they were a candidate for the best
    lr: float | None = None  # the largest learning rate that `lr: auto` took; None if the settings say a number
    rates: tuple[RateRow, ...] = ()  # the rates that it tried, after the start itself; none if steps were too few

    def chosen(self) -> dict[str, Any]:
        """Return what `metrics.json` holds: which weights were delivered, and their score and the start's."""
        best = self.start if not self.best_epoch else self.rows[self.best_epoch - 1]
        return {
            "epochs": len(self.rows),
            "best_epoch": self.best_epoch,
            "validation": None if best is None else best.validation_score,
            "start": None if self.start is None else self.start.validation_score,
            "start_loss": None if self.start is None else self.start.validation_loss,
            "start_held_out_loss": None if self.start is None else self.start.held_out_loss,
            "held_out_loss": None if best is None else best.held_out_loss,
            **({} if self.lr is None else {"lr": self.lr, "rates": [asdict(row) for row in self.rates]}),
        }


@dataclass(frozen=True)
class StartRow:
    """The figures of the weights before the first step, like those of an epoch."""

    validation_loss: float | None  # None if the task has no loss in eval mode
    validation_score: float  # the task's main score, in its unit
    held_out_loss: float | None = None  # as of an epoch


@dataclass(frozen=True)
class RateRow:
    """One trial of a learning rate, or the state before all of them, whose rate is 0."""

    rate: float  # the largest of the trial
    steps: int  # steps of the trial
    held_out_loss: float | None  # the loss that is trained, mean over held-out samples; None if it is not finite


@dataclass(frozen=True)
class EpochRow:
    """The figures of one epoch."""

    epoch: int  # counted from 1
    lr: float  # learning rate of the epoch's last step
    train_loss: float  # mean over the images trained on, label smoothing, auxiliary heads and distillation included
    # the task's main score, percent, in train mode and while the weights change; of a mixed image (mixup, CutMix) the
    # share of the class that is predicted counts. None if what the model returns for the loss has no score.
    train_score: float | None
    # mean of the task's loss over the validation samples, without label smoothing, of the average of weights if there
    # is one; None if the task has no loss in eval mode
    validation_loss: float | None
    validation_score: float  # percent
    images_per_s: float  # training samples per second, validation left out
    seconds: float  # of the whole epoch
    skipped: int  # steps that were not made, because float16 gradients overflowed or whole batches could not be read
    # mean over held-out samples of the loss that is trained, which chooses the best epoch; None where the score does
    held_out_loss: float | None = None
    score: str = "top1"  # name of the score: `top1` for classifiers

    def figures(self) -> dict[str, Any]:
        """Return the row of a table, whose columns are named for the score: `train_top1`, `validation_top1`."""
        return dict(zip(columns(self.score), list(asdict(self).values())[:-1], strict=True))


def columns(score: str) -> tuple[str, ...]:
    """Return the columns of `EpochRow.figures`."""
    return tuple(each.name.replace("_score", f"_{score}") for each in fields(EpochRow) if each.name != "score")


@dataclass(frozen=True)
class ClampRow:
    """Share of gradients that a clamp changed at one module."""

    clamp: str  # which of the two clamps
    module: str  # path of the module
    by: str  # value or norm
    limit: float  # for the unscaled gradient
    share: float  # share of the values (by norm: of the gradients) that were beyond the limit, 0..1


@dataclass(frozen=True)
class Compilation:
    """Result of compiling the training steps of a run."""

    graphs: int  # how many graphs were compiled; more than one if shapes or hooks changed
    seconds: float  # what compiling took, the first pass through each graph included
    fallback: str | None  # why steps ran in eager from some step on; None if all ran compiled

    def __str__(self) -> str:
        if self.fallback is not None:
            return f"trained in eager, because steps could not be compiled: {self.fallback}"
        return f"steps were compiled, which took {self.seconds:.1f} s; graphs: {self.graphs}"


@dataclass(frozen=True)
class PausedRun:
    """A run that was left between two steps, from which another one can continue."""

    state: Mapping[str, Any]  # the whole state, as in a checkpoint
    parameters: tuple[str, ...]  # names of the optimizer's parameters, in its order
    callbacks: tuple[type, ...]  # types of the run's callbacks, in their order


CurrentPlan = Callable[[], Plan | None]
"""Returns the plan that masks a model now; None if the model is not masked."""

ClampCounts = Mapping[str, Mapping[str, tuple[int, int]]]
"""By clamp and module path: how many values (by norm: gradients) were beyond the limit so far, and of how many."""


@dataclass(frozen=True)
class TrainingRun:
    """The run that a callback belongs to."""

    # the model that is trained, on `device`; under `sharding: full` in several processes a sharded copy of the model
    # that was given, whose parameters, gradients and moments are DTensors
    model: nn.Module
    optimizer: Optimizer  # torch's own
    device: torch.device  # where the model is trained
    steps: int  # steps of an epoch in which none is skipped
    epochs: int  # epochs of the run
    # returns how often gradient clamps were needed so far, in all processes; all of them call it together
    clamped: Callable[[], ClampCounts] = dict
    # returns what gradients are multiplied by before a step: float16's loss scale
    scale: Callable[[], float] = lambda: 1.0


class Callback:
    """One feature of a training run; every method does nothing unless a subclass overrides it.

    `active` is entered before the first step and left after the last. Steps are counted from 1 over the whole run, and
    include those that float16's loss scale skips. State that a resumed run needs is returned by `state_dict`: tensors,
    numbers, text, and lists and dicts of them. In several processes all are given the main one's state.
    """

    def active(self, run: TrainingRun) -> AbstractContextManager[Any]:
        """Return the context in which the whole run takes place."""
        return nullcontext()

    def learning_rate_restarts(self, run: TrainingRun) -> Sequence[int]:
        """Return the steps before which the learning-rate schedule starts again, ascending; called once."""
        return ()

    def added_loss(self, inputs: Any, output: Any, targets: Any) -> Tensor | None:
        """Return a scalar that is added to the mean loss of a batch, within autocast; None adds nothing.

        Inputs and targets are those that the task unpacked. For classifiers these are images, and labels (B,) int64, or
        under mixup and CutMix the share of each class, (B, classes) float32.
        """
        return None

    def before_step(self, step: int) -> None:
        """Act before the optimizer's step: gradients are complete, and multiplied by float16's loss scale if any."""

    def after_step(self, step: int, made: bool) -> None:
        """Act after the optimizer's step; `made` says whether it was made or skipped."""

    def around_validation(self) -> AbstractContextManager[Any]:
        """Return the context in which the model is validated and its weights may be kept as the best."""
        return nullcontext()

    def after_epoch(self, row: EpochRow) -> None:
        """Act after an epoch and its validation."""

    def eligible_for_best(self, epoch: int) -> bool:
        """Return whether the weights that are validated now may be kept as the best; called during validation.

        Epoch 0 is the state before the first step. Where nothing is eligible, the last epoch's weights are kept.
        """
        return True

    def around_trial(self) -> AbstractContextManager[Any]:
        """Return the context of a trial of a learning rate, or of its measurement, which leaves the callback as it was.

        Inside, the optimizer may make steps of which `before_step` and `after_step` are not told.
        """
        return nullcontext()

    def progress_metrics(self) -> Mapping[str, Any]:
        """Return figures for the progress bar; called once an epoch."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as it is after a step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; called inside `active`, before model and optimizer get their states."""


@dataclass(frozen=True)
class ContextCallback(Callback):
    """A callback that is a context around the whole run, such as masks."""

    enter: Callable[[TrainingRun], AbstractContextManager[Any]]  # returns the context of a run
    metrics: Callable[[], Mapping[str, Any]] = dict  # returns further figures for the progress bar

    def active(self, run: TrainingRun) -> AbstractContextManager[Any]:
        """Return the context."""
        return self.enter(run)

    def progress_metrics(self) -> Mapping[str, Any]:
        """Return the further figures."""
        return self.metrics()


@contextmanager
def _entered(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter contexts one after the other, each made once those before it are entered."""
    with ExitStack() as entered:
        for context in contexts:
            entered.enter_context(context)
        yield


class CallbackList:
    """Several callbacks, whose contexts, losses and answers are put together."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = tuple(callbacks)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self.callbacks)

    def active(self, run: TrainingRun) -> AbstractContextManager[None]:
        """Enter every callback; if one raises, those before it are left."""
        return _entered(callback.active(run) for callback in self.callbacks)

    def around_validation(self) -> AbstractContextManager[None]:
        """Enter the validation context of every callback."""
        return _entered(callback.around_validation() for callback in self.callbacks)

    def around_trial(self) -> AbstractContextManager[None]:
        """Enter the context of a trial of every callback."""
        return _entered(callback.around_trial() for callback in self.callbacks)

    def learning_rate_restarts(self, run: TrainingRun) -> tuple[int, ...]:
        """Return the restarts of all callbacks, each once."""
        return tuple(sorted({step for callback in self.callbacks for step in callback.learning_rate_restarts(run)}))

    def total_loss(self, loss: Tensor | None, inputs: Any, output: Any, targets: Any) -> Tensor:
        """Return the loss, if there is one, plus the losses that callbacks add."""
        for callback in self.callbacks:
            if (added := callback.added_loss(inputs, output, targets)) is not None:
                loss = added if loss is None else loss + added
        assert loss is not None
        return loss

    def eligible_for_best(self, epoch: int) -> bool:
        """Return whether every callback agrees that the weights may be kept as the best."""
        return all(callback.eligible_for_best(epoch) for callback in self.callbacks)

    def progress_metrics(self) -> dict[str, Any]:
        """Return the figures of all callbacks for the progress bar."""
        return {name: value for each in self.callbacks for name, value in each.progress_metrics().items()}

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of every callback."""
        return [callback.state_dict() for callback in self.callbacks]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Give every callback its state."""
        for callback, state in zip(self.callbacks, states, strict=True):
            callback.load_state_dict(state)
