"""The diagnosis of a model on the samples that it is trained on."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from prunekit.data.datasets import SampleDataset
from prunekit.data.loader import batches
from prunekit.data.splits import Splits
from prunekit.inspection.diagnosis.data_checks import Pool
from prunekit.inspection.diagnosis.diagnose_model import diagnose, require_kinds
from prunekit.inspection.diagnosis.findings import Diagnosis
from prunekit.jobs.run.command_subject import RECIPE_ONLY, Own, Subject
from prunekit.settings.inputs import DataSettings
from prunekit.settings.train import TrainSettings
from prunekit.tasks.task import pair
from prunekit.training.callbacks.pruning_schedule import steps_per_epoch
from prunekit.training.optimizers import build_optimizer, build_schedule

LOOKED_AT = 1024
"""Samples of the training split, and of the validation split, that are compared to find copies."""
BATCHES = 3


def diagnose_target(
    target: Subject,
    data: DataSettings | None,
    training: TrainSettings | None,
    *,
    device: torch.device,
    count: int = BATCHES,
    ignore: Sequence[str] = (),
    own: Own = RECIPE_ONLY,
    seed: int = 0,
    task: str | None = None,
) -> Diagnosis:
    """Diagnose a model on a fixed random choice of training samples without augmentation."""
    require_kinds(ignore)
    splits = target.data(data, own, "run it on", task)
    settings = data or DataSettings()
    order = torch.randperm(len(splits.train), generator=torch.Generator().manual_seed(seed))
    seen = min(count * settings.batch, len(order))
    full = len(order) >= settings.batch
    shown = batches(splits.train, settings.batch, shuffle_seed=None, drop_last=full, indices=order[:seen])
    pool = Pool(
        more=_some(splits.train, settings, order[seen:LOOKED_AT]),
        held_out=_some(splits.validation, settings, torch.arange(len(splits.validation))[:LOOKED_AT]),
        total=len(splits.train),
    )
    model = target.model.to(device)
    optimizer = None if training is None else first_step(model, training, splits, settings.batch)
    known = replace(splits.task, unpack=pair)  # the batches are unpacked
    return diagnose(model, shown, task=known, optimizer=optimizer, ignore=ignore, pool=pool, seed=seed)


def first_step(model: nn.Module, training: TrainSettings, splits: Splits, batch: int) -> Optimizer | None:
    """Return the optimizer at its first step, with warm-up; None for the user's own, whose steps are unknown."""
    if training.optimizer == "own" or not any(parameter.requires_grad for parameter in model.parameters()):
        return None
    optimizer = build_optimizer(model, training)
    steps = training.epochs * steps_per_epoch(training, len(splits.train), batch)
    build_schedule(optimizer, steps, training.warmup)
    return optimizer


def _some(dataset: SampleDataset, settings: DataSettings, indices: torch.Tensor) -> Any:
    return batches(dataset, settings.batch, shuffle_seed=None, indices=indices) if len(indices) else ()
