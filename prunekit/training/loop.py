"""The training loop: one run from settings to a history, with the best weights left in the model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import nn

from prunekit.artifacts import StrPath
from prunekit.context import seeded, training_mode
from prunekit.data import Mixing, Splits, Workers, batches
from prunekit.distributed.exchange import wait_for_all
from prunekit.distributed.group import is_main, rank, size
from prunekit.models import require_trainable
from prunekit.progress import wanted
from prunekit.settings.training import TrainSettings
from prunekit.training.asked import require_asked, task_loss
from prunekit.training.best import BestWeights
from prunekit.training.checkpoints import Checkpoints, CheckpointWarning
from prunekit.training.checks import check_fits
from prunekit.training.clamping import Clamps
from prunekit.training.compiling import SEVERAL, CompiledForward
from prunekit.training.epochs import Epochs, loss_scaler
from prunekit.training.history import Compilation, EpochRow, History, LeftRun
from prunekit.training.optimizers import MakeOptimizer, build_optimizer, build_schedule
from prunekit.training.parts import Part, Parts, Training
from prunekit.training.position import Position
from prunekit.training.progress import Progress
from prunekit.training.replicas import replica_of, require_same_weights, shares
from prunekit.training.run_state import RunState, identity_of
from prunekit.training.sharding import give_back_buffers, in_shards, require_shardable, sharded_copy
from prunekit.training.shortage import naming_batch
from prunekit.training.strides import LongStrides


def never() -> bool:
    """Leaves no run."""
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
    """Trains a model in place, for the task of its data, and leaves it with the weights of its best validation score.

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
