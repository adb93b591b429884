"""The training loop: one run from settings to a history, with the best weights left in the model."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from prunekit.data.augmentation import Mixing
from prunekit.data.loader import Batch, Batches, batches
from prunekit.data.splits import Splits
from prunekit.distributed.process_group import everyone, is_main, rank, size, total, wait_for_all
from prunekit.errors import NonFiniteError
from prunekit.hooks.step_hooks import inner_optimizer
from prunekit.hooks.wrappers import require_unfrozen
from prunekit.measure.memory_format import images_channels_last
from prunekit.repair.batchnorm_statistics import rebase_batchnorm
from prunekit.settings.inputs import Workers
from prunekit.settings.train import DistillSettings, TrainSettings
from prunekit.tasks.task import Loss, Measurement, Score, Task
from prunekit.training import execution, parallel, rate_search
from prunekit.training.adapters import require_adapted
from prunekit.training.callbacks.callback import (
    Callback,
    CallbackList,
    Compilation,
    EpochRow,
    History,
    PausedRun,
    StartRow,
    TrainingRun,
)
from prunekit.training.callbacks.selection import require_callbacks, task_loss, with_teacher
from prunekit.training.checkpoints import BestWeights, Checkpoints, CheckpointWarning
from prunekit.training.compatibility import check_fits, runs_channels_last
from prunekit.training.nonfinite import (
    finite_step,
    first_non_finite,
    first_non_finite_gradient,
    infinite_buffers,
    non_finite_gradient,
)
from prunekit.training.optimizers import GradientClamps, MakeOptimizer, build_optimizer, build_schedule
from prunekit.training.run_state import EpochSums, Position, RunState, identity_of
from prunekit.utils.context import same_draws, seeded, training_mode
from prunekit.utils.files import StrPath
from prunekit.utils.inputs import call, inputs_as_example, to_device
from prunekit.utils.progress import make_bar, make_counter, wanted

REBASED = 16
"""Batches before the first step whose statistics BatchNorms take."""
FIGURES_S = 0.5
"""Seconds between two looks at the figures that a bar shows."""
Numbered = tuple[int, Batch]


def fit(
    model: nn.Module,
    splits: Splits,
    settings: TrainSettings,
    *,
    device: torch.device,
    seed: int,  # of the order of images, of dropout and of everything else that is random
    batch: int,  # images in a batch, over all processes
    workers: int | Workers = 0,  # processes that read images ahead: their number, or how they read
    # features such as masks, and those that the settings ask for (`build_callbacks`), in the order of their entering
    callbacks: Sequence[Callback] = (),
    own_optimizer: MakeOptimizer | None = None,  # makes the optimizer if the settings say `own`
    progress: bool | None = False,  # whether to show a bar on stderr; None: on a terminal and in a notebook
    label: str = "training",  # the name of this run in the bar
    on_epoch: Callable[[EpochRow], None] | None = None,  # called after every epoch
    checkpoint: StrPath | None = None,  # `.safetensors` file for the best weights so far; None for none
    checkpoints: Checkpoints | None = None,
    until: Callable[[], bool] | None = None,  # called between two steps: whether to pause the run there
    begin: PausedRun | None = None,  # to continue, with as many epochs and the same callbacks; see `transfer_run`
) -> History:
    """Train a model in place, for the task of its data, and leave it with the weights of its best validation score.

    `splits.train` is trained on, `validation` chooses the epoch by the task's main score, `test` is not touched. The
    state before the first step is a candidate too, which an epoch has to beat: `History.best_epoch` is 0 where none
    did. Where labels have no weight, the loss that is trained is compared in place of the score: the distance from the
    teacher, on held-out images as they are and on blends of them, which no weights have memorized. Under a pruning
    schedule the start is a candidate only if its plan is final, and never if its loss is NaN or Inf. A last batch that
    is not full is left out, and its images come in another epoch. Auxiliary heads of GoogLeNet and Inception take part
    in a loss on labels. Zero epochs leave the model as it is.

    In a process group (`prunekit.distributed`) all processes call this alike and train the model together. Each has its
    share of every batch, so that together they compute what one process would, up to the order of floating-point sums;
    the exceptions are dropout, which is random in each process, and BatchNorm and fake quantization, which take their
    ranges from the share. Only the main process prints and writes. Under `sharding: full` a sharded copy is trained,
    which callbacks see as `TrainingRun.model`; the model itself waits on the CPU, and keeps its old weights if training
    fails.

    On the CPU two runs with the same arguments and thread count give bit-equal weights. The process's random state and
    the modules' train/eval modes are restored; the model stays on `device`.

    The state of the run is written to `checkpoints`, and resumed from there, bit-identical on the CPU with the same
    threads and processes. A run that is complete there returns its result again. In several processes the main one
    writes and reads, and either all are given checkpoints or none.

    A `NonFiniteError`, at a loss, a gradient or a weight that is NaN or Inf, names the first module, the epoch, the
    step and the last checkpoint. Gradients that overflow under float16's loss scale are no error: the step is skipped,
    counted by `EpochRow.skipped` and not by the schedule, and the scale is halved. An epoch in which every step is
    skipped is an error.
    """
    require_callbacks(settings, callbacks)
    if sharding := parallel.in_shards(settings):
        parallel.require_shardable(settings, callbacks, pauses=begin is not None or until is not None)
    if isinstance(settings.distill, DistillSettings):
        settings = with_teacher(settings, splits.task, model)
    loss = task_loss(splits.task, settings)
    require_unfrozen(model)
    require_adapted(model, settings)
    wait_for_all()  # the main process may have worked alone before
    model.to(device)
    check_fits(model, splits, device)
    laid = runs_channels_last(model, splits, device, settings.precision)
    full = len(splits.train) >= batch
    distill = settings.distill if isinstance(settings.distill, DistillSettings) else None
    mixup, cutmix = (1.0, 1.0) if distill is not None and distill.blend else (settings.mixup, settings.cutmix)
    mixing = Mixing(len(splits.classes), mixup, cutmix) if mixup or cutmix else None
    reading = partial(batches, batch_size=batch, workers=workers, device=device)
    validation = reading(splits.validation, shuffle_seed=None)
    chosen = torch.linspace(0, len(splits.validation) - 1, min(rate_search.HELD_OUT, len(splits.validation))).long()
    ways = (None,) if mixing is None else (None, mixing)
    held_out = [replace(validation, indices=chosen, mixing=way) for way in ways]  # read by the same workers
    train = reading(splits.train, shuffle_seed=seed, drop_last=full, augment=True, mixing=mixing)
    first = replace(train, indices=train.order()[: REBASED * batch]).split(rank(), size())
    train, validation = parallel.shares(train, validation)
    given = model
    if sharding:
        model = parallel.sharded_copy(given, train, device)
    steps = math.ceil(len(train) / settings.accumulate)
    rate_search.require_searchable(settings, splits, settings.epochs * steps)
    optimizer = build_optimizer(model, replace(settings, lr=rate_search.middle_rate(settings)), own_optimizer)
    called = CallbackList(callbacks)
    scaler = execution.loss_scaler(settings.precision, device)
    scale = (lambda: 1.0) if scaler is None else scaler.get_scale
    clamps = GradientClamps(model, optimizer, settings, scaler)
    run = TrainingRun(model, optimizer, device, steps, settings.epochs, clamps.counts, scale)
    active = called.active(run)
    facts: dict[str, Any] = {} if checkpoints is None else checkpoints.facts
    warn: Callable[[str], None] = partial(warnings.warn, category=CheckpointWarning)
    warn = warn if checkpoints is None else checkpoints.warn
    facts = {"device": device.type, "seed": seed, "batch": batch, "processes": size(), **facts}
    identity = identity_of(given, splits, settings, called, **facts)
    path, main = None if checkpoint is None else Path(checkpoint), splits.task.main
    labels = 1.0 if distill is None or distill.labels is None else distill.labels
    best = BestWeights(given, path, warn, model, lower_is_better=not labels or main.lower_is_better)
    shown = wanted(progress) and is_main()
    bar = ProgressBar(label, settings.epochs * len(train), called.progress_metrics, shown, main)
    exact = execution.LongStrides(model) if settings.precision == "bf16" and device.type == "cpu" else nullcontext()
    with ExitStack() as stack:
        stack.enter_context(seeded(seed + rank()))
        stack.enter_context(training_mode(model, True))
        stack.enter_context(
            execution.gradient_checkpointing(model) if settings.gradient_checkpointing else nullcontext()
        )
        replica = parallel.replica_of(
            model, train, None if labels else splits.task.logits
        )  # auxiliary heads are of labels
        for context in (active, exact, *clamps.contexts, closing(bar.bar)):
            stack.enter_context(context)
        restarts = called.learning_rate_restarts(run)
        rate_search.require_searchable(settings, splits, settings.epochs * steps, rewinds=bool(restarts))
        schedule = build_schedule(optimizer, settings.epochs * steps, settings.warmup, restarts)
        compiled = execution.CompiledForward(model) if settings.compile and size() == 1 else None
        position = Position()
        state = RunState(
            model, optimizer, schedule, scaler, clamps, called, best, splits, position, identity, checkpoints,
            None if begin is None else begin.state, infinite_buffers(model),
        )  # fmt: skip
        state.resume()
        loop = TrainingLoop(
            state, compiled or replica, settings, device, train, validation, steps, bar, splits.task, loss,
            labels, laid, [some.dealt(rank(), size()) for some in held_out], first,
        )  # fmt: skip
        with execution.naming_batch(batch, splits.sample_shape, device, position):
            complete = loop.run(on_epoch, until or (lambda: False))
        if compiled is not None:
            compilation: Compilation | None = compiled.compilation
        else:
            compilation = Compilation(0, 0.0, execution.SEVERAL) if settings.compile else None
        if not complete:
            return History(position.rows, 0, clamps.rows(), compilation, state.pause(), position.start)
        lr = rate_search.taken_rate(settings, position.rates) if settings.lr == "auto" and settings.epochs else None
        parallel.require_same_weights(model, f"after {label}")
        if sharding:
            parallel.give_back_buffers(model, given.to(device))
        best.restore()
    return History(position.rows, best.epoch, clamps.rows(), compilation, None, position.start, lr, position.rates)


@dataclass(frozen=True)
class TrainingLoop:
    """The epochs of a run: steps, validation, checkpoints."""

    state: RunState
    replica: Callable[..., Any]  # called to train the model: compiled, or this process's replica among several
    settings: TrainSettings
    device: torch.device
    train: Batches  # this process's share, as of `validation`
    validation: Batches
    steps: int  # of an epoch in which none is skipped
    bar: ProgressBar
    task: Task
    loss: Loss  # of training, on labels
    labels: float  # its weight
    channels_last: bool  # whether the channels of images are laid last, which is faster
    # the samples on which the loss that is trained is compared: as they are, and mixed as in training if it mixes
    held_out: Sequence[Batches]
    first: Batches  # those by whose statistics BatchNorms normalize before the first step
    # losses of the step, with what `_finite` takes, that were not looked at yet
    unread: list[tuple[Tensor, tuple[Any, ...], str]] = field(default_factory=list)

    def run(self, on_epoch: Callable[[EpochRow], None] | None, until: Callable[[], bool]) -> bool:
        """Train from the present position to the last epoch; return False if `until` paused the run before."""
        try:
            self._run(on_epoch, until)
        except _Paused:
            self.state.write_paused()
            return False
        return True

    def _run(self, on_epoch: Callable[[EpochRow], None] | None, until: Callable[[], bool]) -> None:
        at, best = self.state.position, self.state.best
        if not self.settings.epochs:
            best.keep()
        elif at.epoch == 1 and not at.step:
            self._set_train_mode()
            if not at.begun:
                self._offer_start(at)
                if self.settings.norms != "running":
                    with self.state.callbacks.around_trial():
                        rebase_batchnorm(self.state.model, (counts for _, counts in self._losses(self.first)))
                at.begun = True
            if self.settings.lr == "auto":
                self._search_rate()
        self.bar.begin((at.epoch - 1) * len(self.train) + at.batch)
        over = at.epoch > self.settings.epochs  # in a process before this one
        while at.epoch <= self.settings.epochs:
            row = self._epoch(at, until)
            for callback in self.state.callbacks:
                callback.after_epoch(row)
            at.next_epoch(row, self.steps)
            if on_epoch is not None:
                on_epoch(row)
            if at.epoch <= self.settings.epochs:
                self.state.write_if_due()
        if not over:
            self.state.write_result()

    def _set_train_mode(self) -> None:
        """Put the model into train mode, but norms that keep their running statistics."""
        for module in self.state.model.train().modules():
            if self.settings.norms == "running" and isinstance(module, _BatchNorm):
                module.eval()

    def _offer_start(self, at: Position) -> None:
        """Make the state before the first step a candidate for the best, if its loss is finite."""
        parallel.share_buffers(self.state.model)
        if not self.state.callbacks.eligible_for_best(0):
            return
        loss, score = self.validate(None)
        distance = self._distance()
        if all(math.isfinite(value) for value in (score, loss, distance) if value is not None):
            self.state.best.offer(0, score if distance is None else distance)
            at.start = StartRow(loss, score, distance)

    def _distance(self) -> float | None:
        """Return the held-out loss where a teacher alone is learned from, by which the best epoch is chosen then."""
        if self.labels:
            return None
        with self.state.callbacks.around_trial():
            return self._held_out_loss()

    def _held_out_loss(self) -> float:
        """Return the mean over the held-out samples of all processes, both ways, of the loss that is trained."""
        sums = EpochSums()
        for (loss, targets), counts in chain.from_iterable(map(self._losses, self.held_out)):
            if counts:
                sums.add(loss, None, len(targets), self.task.weighed(targets))
        return sums.of_all().mean_loss

    def _losses(self, batches: Batches) -> Iterator[tuple[tuple[float, Any], bool]]:
        """Yield the loss that is trained of each batch, its targets, and whether it counts, and change nothing."""
        model = self.state.model
        # with gradients, which a comparison of features asks for
        with same_draws(model), self.task.mode_for_loss(model), torch.enable_grad():
            for batch, counts in parallel.in_step(model, batches, together=True):
                yield (self._loss(model, batch)[0].item(), batch[1]), counts

    def _search_rate(self) -> None:
        """Set the learning rate that does best in short trials; see `rate_search`."""

        def batches_of(epoch: int) -> Iterator[list[Batch]]:
            for group in _groups(self.train.at_epoch(epoch).numbered(), self.settings.accumulate):
                yield [batch for _, batch in group]

        def add_gradients(batches: Sequence[Batch]) -> None:
            for batch, weight in self._apart(batches):
                self._add_gradient(batch, weight, EpochSums(), None)

        rate_search.RateSearch(
            self.state, self.settings, batches_of, add_gradients, self._step, self._held_out_loss,
            lambda tried: self.bar.bar.set_description(f"{self.bar.label}, trying {tried}"),
        ).run(self.settings.epochs * self.steps)  # fmt: skip

    def _epoch(self, at: Position, until: Callable[[], bool]) -> EpochRow:
        start = time.perf_counter() - at.seconds
        self.bar.epoch(at.epoch, self.settings.epochs)
        self._train(at, start, until)
        training_s = time.perf_counter() - start
        parallel.share_buffers(self.state.model)
        with self.state.callbacks.around_validation():
            parallel.share_buffers(self.state.model)  # those of averaged weights
            validation_loss, reached = self.validate(f"epoch {at.epoch}")
            distance = self._distance()
            merit = reached if distance is None else distance
            fit_to_keep = math.isfinite(merit) and self.state.callbacks.eligible_for_best(at.epoch)
            self.state.best.offer(at.epoch, merit if fit_to_keep else None)
        return EpochRow(
            epoch=at.epoch,
            lr=at.lr,
            train_loss=at.sums.mean_loss,
            train_score=self._train_score(at),
            validation_loss=validation_loss,
            validation_score=reached,
            images_per_s=at.sums.samples / training_s,
            seconds=time.perf_counter() - start,
            skipped=self.steps - at.made,
            held_out_loss=distance if distance is not None and math.isfinite(distance) else None,
            score=self.task.main.name,
        )

    def _train(self, at: Position, start: float, until: Callable[[], bool]) -> None:
        """Make the remaining steps of an epoch."""
        callbacks = self.state.callbacks
        self._set_train_mode()
        if until():
            raise _Paused
        for group in _groups(self.train.at_epoch(at.epoch, at.batch).numbered(), self.settings.accumulate):
            self._add_gradients([batch for _, batch in group], at, start)
            at.step += 1
            for callback in callbacks:
                callback.before_step(at.step)
            self._require_finite_gradients([batch for _, batch in group], at)
            at.lr = self.state.optimizer.param_groups[0]["lr"]
            stepped = self._step()
            at.made += stepped
            for callback in callbacks:
                callback.after_step(at.step, stepped)
            if stepped:
                self.state.schedule.step()
            self.state.optimizer.zero_grad()
            at.batch, at.seconds = group[-1][0] + 1, time.perf_counter() - start
            self.state.write_if_due()
            if until():
                raise _Paused
        if not at.made:
            raise NonFiniteError(
                f"epoch {at.epoch} made no step: no gradient was finite under float16's loss scale, which every "
                "skipped step halves; try `precision: bf16`, a lower learning rate, or more steps in an epoch"
            )
        if (tensor := self.state.non_finite_tensor()) is not None:  # the last step, which no loss was computed after
            raise NonFiniteError(f"{tensor} is NaN or Inf after epoch {at.epoch}; {self._advice()}")
        parallel.share_corrupt(self.train, self.validation)
        at.sums = at.sums.of_all()

    def _step(self) -> bool:
        """Make a step; return False if it was skipped because gradients overflow under the loss scale."""
        if self.state.scaler is None:
            self.state.optimizer.step()
            return True
        made: list[None] = []
        counting = inner_optimizer(self.state.optimizer).register_step_post_hook(lambda *_: made.append(None))
        try:
            self.state.scaler.step(self.state.optimizer)
        finally:
            counting.remove()
        self.state.scaler.update()
        return bool(made)

    def _require_finite_gradients(self, batches: Sequence[Batch], at: Position) -> None:
        """Raise NonFiniteError with the first module to blame, before a NaN or Inf gradient spoils the weights."""
        losses = [loss for loss, *_ in self.unread]
        # a loss scale checks gradients itself
        if losses and finite_step(self.state.model, losses, gradients=self.state.scaler is None):
            self.unread.clear()
            return
        while self.unread:
            self._finite(*self.unread.pop(0))
        clamp = self.settings.clamp_weight_grad
        clamped = clamp is not None and clamp.by == "value"  # which makes Inf the limit
        if self.state.scaler is not None or (found := non_finite_gradient(self.state.model, nan_only=clamped)) is None:
            return
        weight, sums = sum(self.task.weighed(targets) for _, targets in batches), EpochSums()

        def backward() -> None:
            for batch in batches:
                self._add_gradient(batch, weight, sums, f"epoch {at.epoch}, step {at.trained}")

        where = first_non_finite_gradient(self.state.model, backward) or f"that of parameter {found!r}"
        raise NonFiniteError(
            f"a gradient is NaN or Inf in epoch {at.epoch}, step {at.trained}, while the loss is finite; first not "
            f"finite on the way back: {where}; {self._advice()}"
        )

    def _read(self, loss: Tensor, inputs: tuple[Any, ...], saying: str) -> float | Tensor:
        """Return a loss for the sums of the epoch, and raise as `_finite` does, now or before the step."""
        # an accelerator is waited for once a step; of several processes each raises before others wait for gradients
        if self.device.type == "cpu" or size() > 1:
            return self._finite(loss, inputs, saying)
        self.unread.append((loss.detach(), inputs, saying))
        return loss.detach()

    def _finite(self, loss: Tensor, inputs: tuple[Any, ...], saying: str) -> float:
        """Return a loss as a number; raise NonFiniteError with the first module to blame if it is NaN or Inf."""
        value = loss.item()
        if not math.isfinite(value):
            where = first_non_finite(self.state.model, inputs)
            # in `saying`, `{}` stands for the number
            raise NonFiniteError(f"{saying.format(value)}; first not finite: {where}; {self._advice()}")
        return value

    def _advice(self) -> str:
        checkpoints = self.state.checkpoints
        last = None if checkpoints is None else checkpoints.last
        kept = "" if checkpoints is None else f"; the last good checkpoint: {last or 'none yet'}"
        rate = self.state.optimizer.param_groups[0]["lr"]
        return f"try a lower learning rate (now {rate:.3g}) or a longer warm-up{kept}"

    def _add_gradients(self, batches: Sequence[Batch], at: Position, start: float) -> None:
        """Add up the gradient of a step over its batches."""
        for batch, weight in self._apart(batches):
            at.trained += 1
            self._add_gradient(batch, weight, at.sums, f"epoch {at.epoch}, step {at.trained}")
            rate = size() * at.sums.samples / (time.perf_counter() - start)
            self.bar.step(lambda: at.sums.mean_loss, lambda: self._train_score(at), rate)

    def _apart(self, batches: Sequence[Batch]) -> Iterator[tuple[Batch, int]]:
        """Yield the batches of a step with the weight of all; gradients are exchanged in that of the last."""
        weight = int(total(sum(self.task.weighed(targets) for _, targets in batches))[0])
        for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
            with parallel.kept_apart(self.replica) if left else nullcontext():
                yield batch, weight

    def _add_gradient(self, batch: Batch, of: int, sums: EpochSums, when: str | None) -> None:
        """Add the gradient of a batch, for the mean loss of all processes, whose batches weigh `of` together.

        A loss that is not finite is an error, which says `when` it was; where that is None, in all processes alike.
        """
        weight = self.task.weighed(batch[1])
        loss, given, output, targets = self._loss(self.replica, batch)
        if when is not None:
            with execution.autocast(self.settings.precision, self.device):
                value = self._read(loss, given, f"the loss is {{}} in {when}")
        elif not everyone(math.isfinite(value := loss.item())):
            raise NonFiniteError("the loss of a trial is NaN or Inf")
        loss = loss * (weight / max(of, 1))
        (loss if self.state.scaler is None else self.state.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            known = self.task.counts if self.task.scores_of_loss_outputs else None
            sums.add(value, None if known is None else known(output, targets), len(targets), weight)

    def _loss(self, forward: Callable[..., Any], batch: Batch) -> tuple[Tensor, tuple[Any, ...], Any, Any]:
        """Return the loss that is trained of a batch, and the example, output and targets that it is of."""
        inputs, targets = self._there(batch)
        given = inputs_as_example(self.state.model, inputs)
        with execution.autocast(self.settings.precision, self.device):
            given = self.task.example_for_loss(self.state.model, given, targets)
            output = call(forward, given)
            own = self.labels * self.loss(output, targets) if self.labels else None
            return self.state.callbacks.total_loss(own, inputs, output, targets), given, output, targets

    def _there(self, batch: Batch) -> Batch:
        """Return a batch on the device, its images as they lie best."""
        inputs, targets = to_device(batch, self.device)
        return images_channels_last(inputs) if self.channels_last else inputs, targets

    def _train_score(self, at: Position) -> float | None:
        """Return the main score of the epoch's training batches so far; None if the loss's outputs have none."""
        return self.task.reached(at.sums.settle().counts) if self.task.scores_of_loss_outputs else None

    def validate(self, when: str | None) -> tuple[float | None, float]:
        """Return the mean loss of the validation samples, None if the task has none in eval mode, and the score.

        A loss that is not finite is an error, which says `when` it was; where that is None, it is returned.
        """
        sums, measured = EpochSums(), Measurement(self.task, together=True)
        with training_mode(self.state.model, False), torch.no_grad():
            for batch, counts in parallel.in_step(self.state.model, self.validation):
                inputs, targets = self._there(batch)
                given = inputs_as_example(self.state.model, inputs)
                output, value = call(self.state.model, given), 0.0
                if not self.task.loss_in_train_mode:
                    example = self.task.example_for_loss(self.state.model, given, targets)
                    for_loss = output if self.task.loss_inputs is None else call(self.state.model, example)
                    loss, saying = self.task.loss(for_loss, targets), f"the validation loss is {{}} in {when}"
                    value = loss.item() if when is None else self._finite(loss, example, saying)
                if counts:
                    sums.add(value, None, len(targets), self.task.weighed(targets))
                    measured.add(self.task.scored(self.state.model, given, output), targets)
        reached = self.task.reached(measured.of_all().result())
        return None if self.task.loss_in_train_mode else sums.of_all().mean_loss, reached


class _Paused(Exception):
    """The run is paused between two steps."""


def _groups(batches: Iterable[Numbered], size: int) -> Iterator[list[Numbered]]:
    """Yield batches whose gradients make one step; the last group of an epoch may have fewer."""
    rest = iter(batches)
    while group := list(islice(rest, size)):
        yield group


class ProgressBar:
    """A bar on stderr with epoch, loss, score, images per second, and what `metrics` returns, called once an epoch."""

    def __init__(
        self, label: str, steps: int, metrics: Callable[[], Mapping[str, Any]], shown: bool, score: Score
    ) -> None:
        self.label, self.metrics, self.score = label, metrics if shown else dict, score
        self.bar = make_bar(shown, total=steps, desc=label, unit="batch")
        self.begin(0)
        self.extra: Mapping[str, Any] = {}
        self.due = 0.0

    def begin(self, done: int) -> None:
        """Count on from batches that were done before the run was resumed; rates are those of the others."""
        self.done = self.bar.initial = self.bar.n = self.bar.last_print_n = done
        self.count = make_counter(self.label, self.bar.total, "batch", done)

    def epoch(self, number: int, epochs: int) -> None:
        """Begin an epoch."""
        self.bar.set_description(f"{self.label} {number}/{epochs}", refresh=False)
        self.extra = self.metrics()

    def step(self, loss: Callable[[], float], score: Callable[[], float | None], images_per_s: float) -> None:
        """Count a batch, and show the figures of the epoch so far, if some time has passed: reading them may wait."""
        if not self.bar.disable and time.monotonic() >= self.due:
            self.due = time.monotonic() + FIGURES_S
            reached = score()
            scored = {} if reached is None else {self.score.name: f"{reached:.1f}{self.score.unit}"}
            shown = {"loss": f"{loss():.3f}", **scored, "img/s": f"{images_per_s:.0f}", **self.extra}
            self.bar.set_postfix(shown, refresh=False)
        self.bar.update()
        self.done += 1
        self.count(self.done)
