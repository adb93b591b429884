"""The training loop: one run from settings to a history, with the best weights left in the model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from prunekit.context import seeded, training_mode
from prunekit.data import Batches, Splits, batches
from prunekit.data.loading import Batch
from prunekit.errors import NonFiniteError
from prunekit.models import auxiliary, logits, require_trainable
from prunekit.training.best import BestWeights
from prunekit.training.checks import check_fits
from prunekit.training.clamping import Clamps
from prunekit.training.device import autocast, loss_scaler, one_device
from prunekit.training.history import EpochRow, History
from prunekit.training.nonfinite import first_non_finite, non_finite_tensor
from prunekit.training.optimizers import build_optimizer, build_schedule
from prunekit.training.progress import Progress
from prunekit.training.settings import TrainSettings
from prunekit.training.strides import LongStrides


def fit(
    model: nn.Module,
    splits: Splits,
    settings: TrainSettings,
    *,
    device: torch.device,
    seed: int,
    batch: int,
    workers: int = 0,
    wrap_optimizer: Callable[[Optimizer], AbstractContextManager[Any]] | None = None,
    describe: Callable[[], Mapping[str, Any]] | None = None,
    progress: bool = False,
    label: str = "training",
    on_epoch: Callable[[EpochRow], None] | None = None,
    checkpoint: Path | None = None,
) -> History:
    """Trains a classifier in place and leaves it with the weights of its best epoch by validation top-1.

    On the CPU two runs with the same arguments and thread count give bit-equal weights. The process's random state and
    the modules' train/eval modes are restored; the model stays on `device`.

    Args:
        model: returns logits (B, classes); GoogLeNet's and Inception's auxiliary heads take part in the loss.
        splits: `train` is trained on, `validation` chooses the epoch, `test` is not touched.
        settings: epochs, optimizer and schedule; zero epochs leave the model as it is.
        device: where to train.
        seed: of the order of images, of dropout and of everything else that is random.
        batch: images in a batch; a last batch that is not full is left out, and comes in another epoch.
        workers: processes that read images ahead.
        wrap_optimizer: gets the torch optimizer; the context it returns is entered around the whole training.
        describe: more figures for the progress bar, such as the sparsity; called once an epoch.
        progress: shows a bar on stderr.
        label: what the bar calls this run.
        on_epoch: called after every epoch.
        checkpoint: `.safetensors` file that holds the best weights so far; None keeps them in memory.

    Raises:
        ModelError: every parameter is frozen, or the model does not take these images or give these classes.
        UsageError: a gradient clamp's glob matches nothing.
        DataError: an image cannot be read.
        NonFiniteError: the loss or a weight became NaN or Inf; names the first module, the epoch and the step.
            Gradients that overflow under float16's loss scale are no error: the step is skipped, which
            `EpochRow.skipped` counts and the schedule does not, and the scale halved. An epoch of nothing else is an
            error.
    """
    require_trainable(model)
    model.to(device)
    check_fits(model, splits, device)
    full = len(splits.train) >= batch
    train = batches(splits.train, batch, shuffle_seed=seed, workers=workers, drop_last=full, augment=True)
    validation = batches(splits.validation, batch, shuffle_seed=None, workers=workers)
    optimizer = build_optimizer(model, settings)
    wrapped = nullcontext() if wrap_optimizer is None else wrap_optimizer(optimizer)
    scaler = loss_scaler(settings.precision, device)
    clamps = Clamps(model, optimizer, settings, scaler)
    best = BestWeights(model, checkpoint)
    bar = Progress(label, settings.epochs * len(train), describe, progress)
    exact = LongStrides(model) if settings.precision == "bf16" and device.type == "cpu" else nullcontext()
    with (
        seeded(seed), training_mode(model, True), one_device(device, scaler) as accelerator, wrapped, exact, clamps, bar
    ):  # fmt: skip
        steps = math.ceil(len(train) / settings.accumulate)
        schedule = build_schedule(optimizer, settings.epochs * steps, settings.warmup)
        ready = accelerator.prepare(model, optimizer, schedule)
        run = _Run(ready[0], ready[1], ready[2], accelerator, settings, device, train, validation, steps, bar)
        rows = run.epochs(best, on_epoch)
        best.restore()
    return History(rows, best.epoch, clamps.rows())


@dataclass
class _Sums:
    """Loss, hits and images of an epoch so far."""

    loss: float = 0.0
    correct: int = 0
    images: int = 0

    def add(self, loss: float, output: Tensor, labels: Tensor) -> None:
        self.loss += loss * len(labels)
        self.correct += int((output.argmax(1) == labels).sum())
        self.images += len(labels)

    @property
    def mean_loss(self) -> float:
        return self.loss / self.images

    @property
    def top1(self) -> float:
        return 100 * self.correct / self.images


@dataclass(frozen=True)
class _Run:
    """What stays the same from step to step; model, optimizer and schedule as Accelerate prepared them."""

    model: nn.Module
    optimizer: AcceleratedOptimizer
    schedule: LRScheduler
    accelerator: Accelerator
    settings: TrainSettings
    device: torch.device
    train: Batches
    validation: Batches
    steps: int  # of an epoch in which none is skipped
    bar: Progress

    def epochs(self, best: BestWeights, on_epoch: Callable[[EpochRow], None] | None) -> tuple[EpochRow, ...]:
        """Trains every epoch; `best` is offered each."""
        rows = []
        for epoch in range(1, self.settings.epochs + 1):
            rows.append(self._epoch(epoch))
            best.offer(epoch, rows[-1].validation_top1)
            if on_epoch is not None:
                on_epoch(rows[-1])
        if not rows:
            best.keep()
        return tuple(rows)

    def _epoch(self, epoch: int) -> EpochRow:
        start = time.perf_counter()
        self.bar.epoch(epoch, self.settings.epochs)
        trained, lr, made = self._train(epoch, start)
        training_s = time.perf_counter() - start
        validated = self._validate(f"epoch {epoch}")
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

    def _train(self, epoch: int, start: float) -> tuple[_Sums, float, int]:
        """Makes the steps of an epoch; with its sums the learning rate of the last one, and how many were not skipped.

        Raises:
            NonFiniteError: all were skipped, or the loss or a weight is not finite.
        """
        trained, lr, done, made = _Sums(), 0.0, 0, 0
        self.model.train()
        for group in _groups(self.train.at_epoch(epoch), self.settings.accumulate):
            lr = self.optimizer.param_groups[0]["lr"]
            images = sum(len(labels) for _, labels in group)
            for batch in group:
                done += 1
                self._add_gradient(batch, images, trained, f"epoch {epoch}, step {done}")
                self.bar.step(trained.mean_loss, trained.top1, trained.images / (time.perf_counter() - start))
            self.optimizer.step()
            made += not self.optimizer.step_was_skipped
            self.schedule.step()
            self.optimizer.zero_grad()
        if not made:
            raise NonFiniteError(
                f"epoch {epoch} made no step: no gradient was finite under float16's loss scale, which every skipped "
                "step halves; try `precision: bf16`, a lower learning rate, or more steps in an epoch"
            )
        if (tensor := non_finite_tensor(self.model)) is not None:  # the last step, which no loss was computed after
            raise NonFiniteError(f"{tensor} is NaN or Inf after epoch {epoch}; {self._advice()}")
        return trained, lr, made

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

    def _add_gradient(self, batch: Batch, of: int, sums: _Sums, when: str) -> None:
        """Adds a batch's part of the gradient of the mean loss over `of` images."""
        images, labels = (tensor.to(self.device) for tensor in batch)
        with autocast(self.settings.precision, self.device):
            output = self.model(images)
            loss = self._loss(output, labels)
            value = self._finite(loss, images, f"the loss is {{}} in {when}")
        self.accelerator.backward(loss * (len(labels) / of))
        sums.add(value, logits(output).detach(), labels)

    def _loss(self, output: Any, labels: Tensor) -> Tensor:
        smoothing = self.settings.label_smoothing
        loss = F.cross_entropy(logits(output), labels, label_smoothing=smoothing)
        for weight, head in auxiliary(output):
            loss = loss + weight * F.cross_entropy(head, labels, label_smoothing=smoothing)
        return loss

    def _validate(self, when: str) -> _Sums:
        sums = _Sums()
        with training_mode(self.model, False), torch.no_grad():
            for images, labels in self.validation:
                images, target = images.to(self.device), labels.to(self.device)
                output = logits(self.model(images))
                loss = self._finite(F.cross_entropy(output, target), images, f"the validation loss is {{}} in {when}")
                sums.add(loss, output, target)
        return sums


def _groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Batches whose gradients make one step; the last group of an epoch may have fewer."""
    rest = iter(batches)
    while group := list(islice(rest, size)):
        yield group
