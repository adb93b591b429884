"""Epoch after epoch: steps, validation, and what is not finite."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from prunekit.context import training_mode
from prunekit.data import Batches
from prunekit.data.loading import Batch
from prunekit.distributed.exchange import total
from prunekit.distributed.group import size
from prunekit.errors import NonFiniteError
from prunekit.inputs import arguments, call, moved
from prunekit.masking import inner_optimizer
from prunekit.settings.training import TrainSettings
from prunekit.tasks import Loss, Task
from prunekit.training.history import EpochRow
from prunekit.training.nonfinite import (
    first_non_finite,
    first_non_finite_gradient,
    non_finite_gradient,
    non_finite_tensor,
)
from prunekit.training.position import Position, Sums
from prunekit.training.progress import Progress
from prunekit.training.replicas import kept_apart, share_buffers, share_corrupt
from prunekit.training.run_state import RunState
from prunekit.training.sharding import in_step
from prunekit.vocabulary import DtypeName

Numbered = tuple[int, Batch]
HALF: dict[DtypeName, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Epochs:
    """What stays the same from step to step of a run.

    `replica` is what is called to train the model: compiled, or where several processes train together their own, and
    `train` and `validation` are this one's shares then. `loss` is that of training.
    """

    model: nn.Module
    replica: Callable[..., Any]
    optimizer: Optimizer
    schedule: LRScheduler
    scaler: torch.amp.GradScaler | None
    settings: TrainSettings
    device: torch.device
    train: Batches
    validation: Batches
    steps: int  # of an epoch in which none is skipped
    state: RunState
    bar: Progress
    task: Task
    loss: Loss

    def run(self, on_epoch: Callable[[EpochRow], None] | None, until: Callable[[], bool]) -> bool:
        """Trains every epoch from where the run is; the best weights are offered each.

        Args:
            until: asked between two steps: whether to leave the run there.

        Returns:
            Whether it came to its end.
        """
        try:
            self._run(on_epoch, until)
        except _Left:
            self.state.keep_place()
            return False
        return True

    def _run(self, on_epoch: Callable[[EpochRow], None] | None, until: Callable[[], bool]) -> None:
        at, best = self.state.position, self.state.best
        if not self.settings.epochs:
            best.keep()
        self.bar.begin((at.epoch - 1) * len(self.train) + at.batch)
        over = at.epoch > self.settings.epochs  # in a process before this one
        while at.epoch <= self.settings.epochs:
            row = self._epoch(at, until)
            self.state.parts.after_epoch(row)
            at.next_epoch(row, self.steps)
            if on_epoch is not None:
                on_epoch(row)
            if at.epoch <= self.settings.epochs:
                self.state.keep_if_due()
        if not over:
            self.state.keep_result()

    def _epoch(self, at: Position, until: Callable[[], bool]) -> EpochRow:
        start = time.perf_counter() - at.seconds
        self.bar.epoch(at.epoch, self.settings.epochs)
        self._train(at, start, until)
        training_s = time.perf_counter() - start
        share_buffers(self.model)
        with self.state.parts.evaluating():
            share_buffers(self.model)  # those of averaged weights
            validated = self._validate(f"epoch {at.epoch}")
            reached = self.task.reached(validated.counts)
            self.state.best.offer(at.epoch, reached if self.state.parts.settled() else -1.0)
        return EpochRow(
            epoch=at.epoch,
            lr=at.lr,
            train_loss=at.sums.mean_loss,
            train_score=self.task.reached(at.sums.counts),
            validation_loss=validated.mean_loss,
            validation_score=reached,
            images_per_s=at.sums.samples / training_s,
            seconds=time.perf_counter() - start,
            skipped=self.steps - at.made,
            score=self.task.main.name,
        )

    def _train(self, at: Position, start: float, until: Callable[[], bool]) -> None:
        """Makes the steps of an epoch that are left.

        Raises:
            NonFiniteError: all were skipped, or the loss, a gradient or a weight is not finite.
        """
        parts, accumulate = self.state.parts, self.settings.accumulate
        self.model.train()
        if until():
            raise _Left
        for group in _groups(self.train.at_epoch(at.epoch, at.batch).numbered(), accumulate):
            self._add_gradients([batch for _, batch in group], at, start)
            at.step += 1
            parts.before_step(at.step)
            self._require_finite_gradients([batch for _, batch in group], at)
            at.lr = self.optimizer.param_groups[0]["lr"]
            stepped = self._step()
            at.made += stepped
            parts.after_step(at.step, stepped)
            if stepped:
                self.schedule.step()
            self.optimizer.zero_grad()
            at.batch, at.seconds = group[-1][0] + 1, time.perf_counter() - start
            self.state.keep_if_due()
            if until():
                raise _Left
        if not at.made:
            raise NonFiniteError(
                f"epoch {at.epoch} made no step: no gradient was finite under float16's loss scale, which every "
                "skipped step halves; try `precision: bf16`, a lower learning rate, or more steps in an epoch"
            )
        if (tensor := non_finite_tensor(self.model)) is not None:  # the last step, which no loss was computed after
            raise NonFiniteError(f"{tensor} is NaN or Inf after epoch {at.epoch}; {self._advice()}")
        share_corrupt(self.train, self.validation)
        at.sums = at.sums.of_all()

    def _step(self) -> bool:
        """Make a step; return whether it was made: under a loss scale it is skipped where gradients overflow."""
        if self.scaler is None:
            self.optimizer.step()
            return True
        made: list[None] = []
        counting = inner_optimizer(self.optimizer).register_step_post_hook(lambda *_: made.append(None))
        try:
            self.scaler.step(self.optimizer)
        finally:
            counting.remove()
        self.scaler.update()
        return bool(made)

    def _require_finite_gradients(self, batches: Sequence[Batch], at: Position) -> None:
        """Looks at gradients before they spoil the weights, but under a loss scale, which does so itself.

        Raises:
            NonFiniteError: one is NaN or Inf; names the first module on the way back.
        """
        clamp = self.settings.clamp_weight_grad
        clamped = clamp is not None and clamp.by == "value"  # which makes Inf the limit
        if self.scaler is not None or (found := non_finite_gradient(self.model, nan_only=clamped)) is None:
            return
        samples, again = sum(len(targets) for _, targets in batches), Position()

        def backward() -> None:
            for batch in batches:
                self._add_gradient(batch, samples, again.sums, f"epoch {at.epoch}, step {at.trained}")

        where = first_non_finite_gradient(self.model, backward) or f"that of parameter {found!r}"
        raise NonFiniteError(
            f"a gradient is NaN or Inf in epoch {at.epoch}, step {at.trained}, while the loss is finite; first not "
            f"finite on the way back: {where}; {self._advice()}"
        )

    def _finite(self, loss: Tensor, inputs: tuple[Any, ...], saying: str) -> float:
        """A loss as a number.

        Raises:
            NonFiniteError: it is none; says so with the number for `{}`, and names the first module to blame.
        """
        value = loss.item()
        if not math.isfinite(value):
            where = first_non_finite(self.model, inputs)
            raise NonFiniteError(f"{saying.format(value)}; first not finite: {where}; {self._advice()}")
        return value

    def _advice(self) -> str:
        checkpoints = self.state.checkpoints
        last = None if checkpoints is None else checkpoints.last
        kept = "" if checkpoints is None else f"; the last good checkpoint: {last or 'none yet'}"
        return f"try a lower learning rate (now {self.optimizer.param_groups[0]['lr']:.3g}) or a longer warm-up{kept}"

    def _add_gradients(self, batches: Sequence[Batch], at: Position, start: float) -> None:
        """Makes the gradient of a step."""
        samples = int(total(sum(len(targets) for _, targets in batches))[0])
        for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
            at.trained += 1
            with kept_apart(self.replica) if left else nullcontext():
                self._add_gradient(batch, samples, at.sums, f"epoch {at.epoch}, step {at.trained}")
            rate = size() * at.sums.samples / (time.perf_counter() - start)
            self.bar.step(at.sums.mean_loss, lambda: self.task.reached(at.sums.counts), rate)

    def _add_gradient(self, batch: Batch, of: int, sums: Sums, when: str) -> None:
        """Adds a batch's part of the gradient of the mean loss over `of` samples, those of all processes."""
        inputs, targets = moved(batch, self.device)
        given = arguments(self.model, inputs)
        with autocast(self.settings.precision, self.device):
            output = call(self.replica, given)
            loss = self.state.parts.added_to(self.loss(output, targets), inputs, output, targets)
            value = self._finite(loss, given, f"the loss is {{}} in {when}")
        loss = loss * (len(targets) / of)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            sums.add(value, self.task.counts(output, targets), len(targets))

    def _validate(self, when: str) -> Sums:
        sums = Sums()
        with training_mode(self.model, False), torch.no_grad():
            for batch, counts in in_step(self.model, self.validation):
                inputs, targets = moved(batch, self.device)
                given = arguments(self.model, inputs)
                output = call(self.model, given)
                loss = self.task.loss(output, targets)
                value = self._finite(loss, given, f"the validation loss is {{}} in {when}")
                if counts:
                    sums.add(value, self.task.counts(output, targets), len(targets))
        return sums.of_all()


def autocast(precision: DtypeName, device: torch.device) -> AbstractContextManager[None]:
    """Run what PyTorch deems safe in half precision; nothing for `fp32`."""
    return torch.autocast(device.type, dtype=HALF.get(precision), enabled=precision in HALF)


def loss_scaler(precision: DtypeName, device: torch.device) -> torch.amp.GradScaler | None:
    """Return what keeps small gradients from vanishing in float16, and skips steps whose gradients overflow."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None


class _Left(Exception):
    """The run is left between two steps."""


def _groups(batches: Iterable[Numbered], size: int) -> Iterator[list[Numbered]]:
    """Batches whose gradients make one step; the last group of an epoch may have fewer."""
    rest = iter(batches)
    while group := list(islice(rest, size)):
        yield group
