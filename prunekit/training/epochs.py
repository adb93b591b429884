"""Epoch after epoch: steps, validation, and what is not finite."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler

from prunekit.context import training_mode
from prunekit.data import Batches
from prunekit.data.loading import Batch
from prunekit.distributed.exchange import total
from prunekit.distributed.group import size
from prunekit.errors import NonFiniteError
from prunekit.models import auxiliary, logits
from prunekit.training.best import BestWeights
from prunekit.training.device import autocast
from prunekit.training.history import EpochRow
from prunekit.training.nonfinite import first_non_finite, non_finite_tensor
from prunekit.training.parts import Parts
from prunekit.training.progress import Progress
from prunekit.training.replicas import kept_apart, share_buffers, share_corrupt
from prunekit.training.settings import TrainSettings


@dataclass
class Sums:
    """Loss, hits and images of an epoch so far."""

    loss: float = 0.0
    correct: int = 0
    images: int = 0

    def add(self, loss: float, output: Tensor, labels: Tensor) -> None:
        self.loss += loss * len(labels)
        self.correct += int((output.argmax(1) == labels).sum())
        self.images += len(labels)

    def of_all(self) -> Sums:
        """The sums over all processes."""
        loss, correct, images = total(self.loss, self.correct, self.images)
        return Sums(loss, int(correct), int(images))

    @property
    def mean_loss(self) -> float:
        return self.loss / self.images

    @property
    def top1(self) -> float:
        return 100 * self.correct / self.images


@dataclass(frozen=True)
class Epochs:
    """What stays the same from step to step of a run; optimizer and schedule as Accelerate prepared them.

    Where several processes train together `replica` is what they call to train the model, and `train` and `validation`
    are this one's shares.
    """

    model: nn.Module
    replica: nn.Module
    optimizer: AcceleratedOptimizer
    schedule: LRScheduler
    accelerator: Accelerator
    settings: TrainSettings
    device: torch.device
    train: Batches
    validation: Batches
    steps: int  # of an epoch in which none is skipped
    parts: Parts
    bar: Progress

    def run(self, best: BestWeights, on_epoch: Callable[[EpochRow], None] | None) -> tuple[EpochRow, ...]:
        """Trains every epoch; `best` is offered each."""
        rows = []
        for epoch in range(1, self.settings.epochs + 1):
            rows.append(self._epoch(epoch, best))
            if on_epoch is not None:
                on_epoch(rows[-1])
        if not rows:
            best.keep()
        return tuple(rows)

    def _epoch(self, epoch: int, best: BestWeights) -> EpochRow:
        start = time.perf_counter()
        self.bar.epoch(epoch, self.settings.epochs)
        trained, lr, made = self._train(epoch, start)
        training_s = time.perf_counter() - start
        with self.parts.evaluating():
            validated = self._validate(f"epoch {epoch}")
            best.offer(epoch, validated.top1)
        return EpochRow(
            epoch=epoch,
            lr=lr,
            train_loss=trained.mean_loss,
            train_top1=trained.top1,
            validation_loss=validated.mean_loss,
            validation_top1=validated.top1,
            images_per_s=trained.images / training_s,
            seconds=time.perf_counter() - start,
            skipped=self.steps - made,
        )

    def _train(self, epoch: int, start: float) -> tuple[Sums, float, int]:
        """Makes the steps of an epoch; with its sums the learning rate of the last one, and how many were not skipped.

        Raises:
            NonFiniteError: all were skipped, or the loss or a weight is not finite.
        """
        trained, lr, done, made = Sums(), 0.0, 0, 0
        step = (epoch - 1) * self.steps
        self.model.train()
        for group in _groups(self.train.at_epoch(epoch), self.settings.accumulate):
            lr = self.optimizer.param_groups[0]["lr"]
            images = int(total(sum(len(labels) for _, labels in group))[0])
            for number, batch in enumerate(group, 1):
                done += 1
                with nullcontext() if number == len(group) else kept_apart(self.replica):
                    self._add_gradient(batch, images, trained, f"epoch {epoch}, step {done}")
                speed = size() * trained.images / (time.perf_counter() - start)  # the others' shares are as large
                self.bar.step(trained.mean_loss, trained.top1, speed)
            step += 1
            self.parts.before_step(step)
            self.optimizer.step()
            stepped = not self.optimizer.step_was_skipped
            made += stepped
            self.parts.after_step(step, stepped)
            self.schedule.step()
            self.optimizer.zero_grad()
        if not made:
            raise NonFiniteError(
                f"epoch {epoch} made no step: no gradient was finite under float16's loss scale, which every skipped "
                "step halves; try `precision: bf16`, a lower learning rate, or more steps in an epoch"
            )
        if (tensor := non_finite_tensor(self.model)) is not None:  # the last step, which no loss was computed after
            raise NonFiniteError(f"{tensor} is NaN or Inf after epoch {epoch}; {self._advice()}")
        share_buffers(self.model)
        share_corrupt(self.train, self.validation)
        return trained.of_all(), lr, made

    def _finite(self, loss: Tensor, images: Tensor, saying: str) -> float:
        """A loss as a number.

        Raises:
            NonFiniteError: it is none; says so with the number for `{}`, and names the first module to blame.
        """
        value = loss.item()
        if not math.isfinite(value):
            where = first_non_finite(self.model, images)
            raise NonFiniteError(f"{saying.format(value)}; first not finite: {where}; {self._advice()}")
        return value

    def _advice(self) -> str:
        return f"try a lower learning rate (now {self.optimizer.param_groups[0]['lr']:.3g}) or a longer warm-up"

    def _add_gradient(self, batch: Batch, of: int, sums: Sums, when: str) -> None:
        """Adds a batch's part of the gradient of the mean loss over `of` images, those of all processes."""
        images, labels = (tensor.to(self.device) for tensor in batch)
        with autocast(self.settings.precision, self.device):
            output = self.replica(images)
            loss = self.parts.added_to(self._loss(output, labels), images, output, labels)
            value = self._finite(loss, images, f"the loss is {{}} in {when}")
        self.accelerator.backward(loss * (len(labels) / of))
        sums.add(value, logits(output).detach(), labels)

    def _loss(self, output: Any, labels: Tensor) -> Tensor:
        smoothing = self.settings.label_smoothing
        loss = F.cross_entropy(logits(output), labels, label_smoothing=smoothing)
        for weight, head in auxiliary(output):
            loss = loss + weight * F.cross_entropy(head, labels, label_smoothing=smoothing)
        return loss

    def _validate(self, when: str) -> Sums:
        sums = Sums()
        with training_mode(self.model, False), torch.no_grad():
            for images, labels in self.validation:
                images, target = images.to(self.device), labels.to(self.device)
                output = logits(self.model(images))
                loss = self._finite(F.cross_entropy(output, target), images, f"the validation loss is {{}} in {when}")
                sums.add(loss, output, target)
        return sums.of_all()


def _groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Batches whose gradients make one step; the last group of an epoch may have fewer."""
    rest = iter(batches)
    while group := list(islice(rest, size)):
        yield group
