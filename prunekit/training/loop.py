"""The training loop: one run from settings to a history, with the best weights left in the model.

Epoch after epoch: steps, validation, and what is not finite.

A progress bar on stderr for a whole training run.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from prunekit.data.augmentation import Mixing
from prunekit.data.loader import Batch, Batches, batches
from prunekit.data.sources import Splits
from prunekit.distributed.process_group import is_main, rank, size, total, wait_for_all
from prunekit.errors import NonFiniteError
from prunekit.hooks.optimizer_step import inner_optimizer
from prunekit.models.outputs import require_trainable
from prunekit.registries import DtypeName
from prunekit.settings.inputs import Workers
from prunekit.settings.train import TrainSettings
from prunekit.tasks.task import Loss, Task
from prunekit.training.callbacks.callback import Part, Parts, Training
from prunekit.training.callbacks.clamping import Clamps
from prunekit.training.callbacks.selection import require_asked, task_loss
from prunekit.training.checkpoints import BestWeights, Checkpoints, CheckpointWarning
from prunekit.training.checks import check_fits
from prunekit.training.compilation import SEVERAL, CompiledForward
from prunekit.training.history import Compilation, EpochRow, History, LeftRun, Position, Sums, naming_batch
from prunekit.training.nonfinite import (
    first_non_finite,
    first_non_finite_gradient,
    non_finite_gradient,
    non_finite_tensor,
)
from prunekit.training.optimizers import MakeOptimizer, build_optimizer, build_schedule
from prunekit.training.precision import LongStrides
from prunekit.training.replicas import (
    kept_apart,
    replica_of,
    require_same_weights,
    share_buffers,
    share_corrupt,
    shares,
)
from prunekit.training.run_state import RunState, identity_of
from prunekit.training.sharding import give_back_buffers, in_shards, in_step, require_shardable, sharded_copy
from prunekit.utils.context import seeded, training_mode
from prunekit.utils.files import StrPath
from prunekit.utils.inputs import call, inputs_as_example, to_device
from prunekit.utils.progress import make_bar, wanted


class Progress:
    """Shows epoch, loss, score and img/s, and whatever `describe` adds (asked once an epoch: it may be slow)."""

    def __init__(
        self, label: str, steps: int, describe: Callable[[], Mapping[str, Any]], shown: bool, score: str = "top1"
    ) -> None:
        self.label, self.describe, self.score = label, describe if shown else dict, score
        self.bar = make_bar(shown, total=steps, desc=label, unit="batch")
        self.extra: Mapping[str, Any] = {}

    def epoch(self, number: int, epochs: int) -> None:
        """Say which epoch begins."""
        self.bar.set_description(f"{self.label} {number}/{epochs}", refresh=False)
        self.extra = self.describe()

    def begin(self, done: int) -> None:
        """So many batches were done before this run went on."""
        self.bar.update(done)

    def step(self, loss: float, score: Callable[[], float], images_per_s: float) -> None:
        """One batch is done; the figures are the epoch's so far."""
        if not self.bar.disable:
            shown = {"loss": f"{loss:.3f}", self.score: f"{score():.1f}%", "img/s": f"{images_per_s:.0f}", **self.extra}
            self.bar.set_postfix(shown, refresh=False)
        self.bar.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()


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
        """Train every epoch from where the run is; the best weights are offered each.

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
        """Make the steps of an epoch that are left.

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
        """Look at gradients before they spoil the weights, but under a loss scale, which does so itself.

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
        """Return a loss as a number.

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
        """Make the gradient of a step."""
        samples = int(total(sum(len(targets) for _, targets in batches))[0])
        for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
            at.trained += 1
            with kept_apart(self.replica) if left else nullcontext():
                self._add_gradient(batch, samples, at.sums, f"epoch {at.epoch}, step {at.trained}")
            rate = size() * at.sums.samples / (time.perf_counter() - start)
            self.bar.step(at.sums.mean_loss, lambda: self.task.reached(at.sums.counts), rate)

    def _add_gradient(self, batch: Batch, of: int, sums: Sums, when: str) -> None:
        """Add a batch's part of the gradient of the mean loss over `of` samples, those of all processes."""
        inputs, targets = to_device(batch, self.device)
        given = inputs_as_example(self.model, inputs)
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
                inputs, targets = to_device(batch, self.device)
                given = inputs_as_example(self.model, inputs)
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
    """Yield batches whose gradients make one step; the last group of an epoch may have fewer."""
    rest = iter(batches)
    while group := list(islice(rest, size)):
        yield group


def never() -> bool:
    """Leave no run."""
    return False


def fit(
    model: nn.Module,
    splits: Splits,
    settings: TrainSettings,
    *,
    device: torch.device,
    seed: int,
    batch: int,
    workers: int | Workers = 0,
    parts: Sequence[Part] = (),
    own_optimizer: MakeOptimizer | None = None,
    progress: bool | None = False,
    label: str = "training",
    on_epoch: Callable[[EpochRow], None] | None = None,
    checkpoint: StrPath | None = None,
    checkpoints: Checkpoints | None = None,
    until: Callable[[], bool] = never,
    begin: LeftRun | None = None,
) -> History:
    """Train a model in place, for the task of its data, and leave it with the weights of its best validation score.

    In a process group (`prunekit.distributed`) all processes call this alike, and train it together: each has its share
    of every batch, so that they do what one process would do, up to the order in which floating-point numbers are
    summed. Not so what is random in each, such as dropout, and BatchNorm, which normalizes by the share. Only the main
    process shows and writes. Under `sharding: full` it is a sharded copy that is trained, which parts see as
    `Training.model`; the model itself waits on the CPU, and has its old weights where training fails.

    On the CPU two runs with the same arguments and thread count give bit-equal weights. The process's random state and
    the modules' train/eval modes are restored; the model stays on `device`.

    Args:
        model: returns what the task of `splits` knows: a classifier's logits (B, classes) by default, where GoogLeNet's
            and Inception's auxiliary heads take part in the loss.
        splits: `train` is trained on, `validation` chooses the epoch by the task's main score, `test` is not touched.
        settings: epochs, optimizer and schedule; zero epochs leave the model as it is.
        device: where to train.
        seed: of the order of images, of dropout and of everything else that is random.
        batch: images in a batch, over all processes; a last one that is not full is left out, and comes in another
            epoch.
        workers: processes that read images ahead, their number or how.
        parts: what takes part beside the loss, such as masks, and what the settings ask for (`asked_parts`); entered
            in their order.
        own_optimizer: what makes the optimizer, where the settings say `own`.
        progress: whether to show a bar on stderr; None: on a terminal and in a notebook.
        label: what the bar calls this run.
        on_epoch: called after every epoch.
        checkpoint: `.safetensors` file that holds the best weights so far; None: none.
        checkpoints: where the run is written down as it goes, and resumed from, bit-identical on the CPU with the same
            threads and processes: model, optimizer, schedule, loss scale, random states, place in the epoch, parts. A
            run that is over there gives its result again. Of several processes the main one writes and reads, the
            others' folders are not touched; all give one or none does. None: nowhere.
        until: asked between two steps: whether to leave the run there, with the weights of that moment in the model.
        begin: a run of as many epochs and the same parts that was left, to go on with; see `transfer_run`.

    Raises:
        ModelError: every parameter is frozen, or the model does not take these inputs or give what the task knows.
        UsageError: a gradient clamp's glob matches nothing, a part or an optimizer that the settings ask for is
            missing, the task cannot do what they ask for, or a batch has too few images for the processes.
        DataError: an image cannot be read.
        ResumeError: the checkpoints are of another run; says what differs.
        NonFiniteError: the loss, a gradient or a weight became NaN or Inf; names the first module, the epoch, the step
            and the last checkpoint.
            Gradients that overflow under float16's loss scale are no error: the step is skipped, which
            `EpochRow.skipped` counts and the schedule does not, and the scale halved. An epoch of nothing else is an
            error.
        MemoryShortageError: a batch does not fit into memory.
    """
    require_asked(settings, parts)
    if sharding := in_shards(settings):
        require_shardable(settings, parts, left=begin is not None or until is not never)
    loss = task_loss(splits.task, settings)
    require_trainable(model)
    wait_for_all()  # the main process may have worked alone before
    model.to(device)
    check_fits(model, splits, device)
    full = len(splits.train) >= batch
    mixes = settings.mixup > 0 or settings.cutmix > 0
    mixing = Mixing(len(splits.classes), settings.mixup, settings.cutmix) if mixes else None
    reading = partial(batches, batch_size=batch, workers=workers, device=device)
    train, validation = shares(
        reading(splits.train, shuffle_seed=seed, drop_last=full, augment=True, mixing=mixing),
        reading(splits.validation, shuffle_seed=None),
    )
    given = model
    if sharding:
        model = sharded_copy(given, train, device)
    optimizer = build_optimizer(model, settings, own_optimizer)
    steps = math.ceil(len(train) / settings.accumulate)
    taking = Parts(parts)
    scaler = loss_scaler(settings.precision, device)
    scale = (lambda: 1.0) if scaler is None else scaler.get_scale
    clamps = Clamps(model, optimizer, settings, scaler)
    training = Training(model, optimizer, device, steps, settings.epochs, clamps.counts, scale)
    entered = taking.active(training)
    facts, warn = ({}, _warn) if checkpoints is None else (checkpoints.facts, checkpoints.warn)
    facts = {"device": device.type, "seed": seed, "batch": batch, "processes": size(), **facts}
    identity = identity_of(given, splits, settings, taking, **facts)
    best = BestWeights(given, None if checkpoint is None else Path(checkpoint), warn, trained=model)
    score = splits.task.main.name
    bar = Progress(label, settings.epochs * len(train), taking.describe, wanted(progress) and is_main(), score)
    exact = LongStrides(model) if settings.precision == "bf16" and device.type == "cpu" else nullcontext()
    with ExitStack() as stack:
        stack.enter_context(seeded(seed + rank()))
        stack.enter_context(training_mode(model, True))
        replica = replica_of(model, train)
        for context in (entered, exact, clamps, bar):
            stack.enter_context(context)
        schedule = build_schedule(optimizer, settings.epochs * steps, settings.warmup, taking.restarts(training))
        compiled = CompiledForward(model) if settings.compile and size() == 1 else None
        position = Position()
        state = RunState(
            model, optimizer, schedule, scaler, clamps, taking, best, splits, position, identity, checkpoints,
            None if begin is None else begin.state,
        )  # fmt: skip
        state.resume()
        run = Epochs(
            model, compiled or replica, optimizer, schedule, scaler, settings, device, train, validation, steps,
            state, bar, splits.task, loss,
        )  # fmt: skip
        with naming_batch(batch, splits.sample_shape, device, position):
            whole = run.run(on_epoch, until)
        compilation = _came_of(compiled, settings)
        if not whole:
            return History(position.rows, 0, clamps.rows(), compilation, state.left())
        require_same_weights(model, f"after {label}")
        if sharding:
            give_back_buffers(model, given.to(device))
        best.restore()
    return History(position.rows, best.epoch, clamps.rows(), compilation)


def _came_of(compiled: CompiledForward | None, settings: TrainSettings) -> Compilation | None:
    if compiled is not None:
        return compiled.compilation
    return Compilation(0, 0.0, SEVERAL) if settings.compile else None


def _warn(message: str) -> None:
    warnings.warn(message, CheckpointWarning, stacklevel=2)
