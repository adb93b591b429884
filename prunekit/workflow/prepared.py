"""What a job works on: its data, and the dense model before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from prunekit.data import Batches, Splits, batches
from prunekit.inputs import arguments
from prunekit.models import ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.training import MakeOptimizer, TrainSettings


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a job works on, before anything is trained.

    Attributes:
        job: the settings.
        splits: its data, with its task.
        model: the dense model as its constructor, weights file or factory gives it, on the CPU.
        device: where to train.
        structure: what the dense model is, as plain data, whatever its weights are.
        own_optimizer: makes the user's own optimizer, where one is given.
        optimizer_source, task_source: tell one own optimizer or task from another.
    """

    job: JobSettings
    splits: Splits
    model: nn.Module
    device: torch.device
    structure: Any
    own_optimizer: MakeOptimizer | None = None
    optimizer_source: str | None = None
    task_source: str | None = None

    def optimizer_for(self, settings: TrainSettings) -> MakeOptimizer | None:
        """The user's own optimizer where a section asks for it."""
        return self.own_optimizer if settings.optimizer == "own" else None

    @property
    def example_inputs(self) -> tuple[Any, ...]:
        """The inputs of one real training sample as a batch."""
        return example_of(self.model, self.splits)

    @property
    def build(self) -> ModelSettings | None:
        """How the dense model is built, with the number of classes filled in; None when only its owner's code can."""
        return build_of(self.job, self.splits)


def example_of(model: nn.Module, splits: Splits) -> tuple[Any, ...]:
    """The inputs of one training sample as a batch."""
    return arguments(model, next(iter(batches(splits.train, 1, shuffle_seed=None)))[0])


def build_of(job: JobSettings, splits: Splits) -> ModelSettings | None:
    """How the dense model of a job is built; None when only its owner's code can."""
    if job.model.zoo == "own":
        return None
    classes = {"num_classes": len(splits.classes)} if splits.classes else {}
    return replace(job.model, arguments=classes | job.model.arguments, origin=None)


def chosen_batches(job: JobSettings, splits: Splits) -> Batches:
    """Batches over the calibration samples of a job: a fixed random choice of training samples."""
    order = torch.randperm(len(splits.train), generator=torch.Generator().manual_seed(job.seed))
    chosen = order[: job.calibration.images]
    return batches(splits.train, job.data.batch, shuffle_seed=None, workers=job.data.reading, indices=chosen)
