"""The training loop: one run from settings to a history, with the best weights left in the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from prunekit.context import seeded, training_mode
from prunekit.data import Splits, batches
from prunekit.distributed.exchange import wait_for_all
from prunekit.distributed.group import is_main, rank
from prunekit.models import require_trainable
from prunekit.training.best import BestWeights
from prunekit.training.checks import check_fits
from prunekit.training.clamping import Clamps
from prunekit.training.device import loss_scaler, this_group
from prunekit.training.epochs import Epochs
from prunekit.training.history import EpochRow, History
from prunekit.training.optimizers import build_optimizer, build_schedule
from prunekit.training.parts import Part, Parts, Training
from prunekit.training.progress import Progress
from prunekit.training.replicas import has_unused, prepared, require_same_weights, shares
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
    parts: Sequence[Part] = (),
    progress: bool = False,
    label: str = "training",
    on_epoch: Callable[[EpochRow], None] | None = None,
    checkpoint: Path | None = None,
) -> History:
    """Trains a classifier in place and leaves it with the weights of its best epoch by validation top-1.

    In a process group (`prunekit.distributed`) all processes call this alike, and train it together: each has its share
    of every batch, so that they do what one process would do, up to the order in which floating-point numbers are
    summed. Not so what is random in each, such as dropout, and BatchNorm, which normalises by the share. Only the main
    process shows and writes.

    On the CPU two runs with the same arguments and thread count give bit-equal weights. The process's random state and
    the modules' train/eval modes are restored; the model stays on `device`.

    Args:
        model: returns logits (B, classes); GoogLeNet's and Inception's auxiliary heads take part in the loss.
        splits: `train` is trained on, `validation` chooses the epoch, `test` is not touched.
        settings: epochs, optimizer and schedule; zero epochs leave the model as it is.
        device: where to train.
        seed: of the order of images, of dropout and of everything else that is random.
        batch: images in a batch, over all processes; a last one that is not full is left out, and comes in another
            epoch.
        workers: processes that read images ahead.
        parts: what takes part beside the loss, such as masks; entered in their order.
        progress: shows a bar on stderr.
        label: what the bar calls this run.
        on_epoch: called after every epoch.
        checkpoint: `.safetensors` file that holds the best weights so far; None keeps them in memory.

    Raises:
        ModelError: every parameter is frozen, or the model does not take these images or give these classes.
        UsageError: a gradient clamp's glob matches nothing, or a batch has too few images for the processes.
        DataError: an image cannot be read.
        NonFiniteError: the loss or a weight became NaN or Inf; names the first module, the epoch and the step.
            Gradients that overflow under float16's loss scale are no error: the step is skipped, which
            `EpochRow.skipped` counts and the schedule does not, and the scale halved. An epoch of nothing else is an
            error.
    """
    require_trainable(model)
    wait_for_all()  # the main process may have worked alone before
    model.to(device)
    check_fits(model, splits, device)
    full = len(splits.train) >= batch
    train = batches(splits.train, batch, shuffle_seed=seed, workers=workers, drop_last=full, augment=True)
    validation = batches(splits.validation, batch, shuffle_seed=None, workers=workers)
    train, validation = shares(train, validation)
    unused = has_unused(model, train, device)
    optimizer = build_optimizer(model, settings)
    steps = math.ceil(len(train) / settings.accumulate)
    taking = Parts(parts)
    entered = taking.active(Training(model, optimizer, device, steps, settings.epochs))
    scaler = loss_scaler(settings.precision, device)
    clamps = Clamps(model, optimizer, settings, scaler)
    best = BestWeights(model, checkpoint)
    bar = Progress(label, settings.epochs * len(train), taking.describe, progress and is_main())
    exact = LongStrides(model) if settings.precision == "bf16" and device.type == "cpu" else nullcontext()
    with (
        seeded(seed + rank()), training_mode(model, True), this_group(device, scaler) as accelerator, entered, exact,
        clamps, bar,
    ):  # fmt: skip
        schedule = build_schedule(optimizer, settings.epochs * steps, settings.warmup)
        ready = prepared(accelerator, model, optimizer, schedule, unused=unused)
        run = Epochs(model, *ready, accelerator, settings, device, train, validation, steps, taking, bar)
        rows = run.run(best, on_epoch)
        require_same_weights(model, f"after {label}")
        best.restore()
    return History(rows, best.epoch, clamps.rows())
