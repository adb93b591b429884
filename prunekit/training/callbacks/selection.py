"""The parts that a run's settings ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from prunekit.channels.channel_map import ChannelMap
from prunekit.data.loader import batches
from prunekit.data.sources import Splits
from prunekit.errors import UsageError
from prunekit.planning.plan import Plan
from prunekit.settings.train import TrainSettings
from prunekit.tasks.classification import IMAGE_CLASSIFICATION
from prunekit.tasks.task import Loss, Task, training_loss
from prunekit.training.callbacks.averaging import Average
from prunekit.training.callbacks.callback import Part
from prunekit.training.callbacks.distillation import Distillation, PlanInForce
from prunekit.training.callbacks.regularizers import Sparsifying

STATISTICS_IMAGES = 2048
"""Training images that an average's BatchNorm statistics are taken from, at most; the calibration's many times over."""


@dataclass(frozen=True, eq=False)
class Sources:
    """What parts need beside settings.

    Attributes:
        splits: the images.
        batch: images in a batch.
        teacher: the dense model, with its weights, for distillation.
        channel_map: of the model, for regularizers.
        removed: the plan whose channels `growing` shrinks; the model is not masked by it.
        masks: the plan that masks the model.
        cut: the plan that the model was made compact by, for features of a teacher that is not.
    """

    splits: Splits
    batch: int
    teacher: nn.Module | None = None
    channel_map: ChannelMap | None = None
    removed: Plan | None = None
    masks: PlanInForce = lambda: None
    cut: Plan | None = None


def asked_parts(settings: TrainSettings, sources: Sources) -> list[Part]:
    """Distillation, regularizer and average, as far as the settings ask for them; enter them after masks.

    Raises:
        UsageError: there is no teacher, channel map or plan for what is asked for.
    """
    parts: list[Part] = []
    if settings.distill is not None:
        if sources.teacher is None:
            raise UsageError("distill: expected a trained model to learn from, and there is none here; leave it out")
        kept = sources.masks if sources.cut is None else lambda: sources.cut
        parts.append(Distillation(sources.teacher, settings.distill, kept, task=sources.splits.task))
    if settings.regularize is not None:
        if sources.channel_map is None:
            raise UsageError("regularize: expected the channel map of the model (prunekit.trace), got none")
        parts.append(Sparsifying(settings.regularize, sources.channel_map, sources.removed))
    if settings.average is not None:
        train = sources.splits.train
        chosen = torch.linspace(0, len(train) - 1, min(STATISTICS_IMAGES, len(train))).long()
        images = batches(train, sources.batch, shuffle_seed=None, indices=chosen)
        parts.append(Average(settings.average, images, sources.masks))
    return parts


def needs_plan(settings: TrainSettings) -> bool:
    """Return whether training shrinks what a plan removes, and so comes after the plan."""
    return settings.regularize is not None and settings.regularize.method == "growing"


def task_loss(task: Task, settings: TrainSettings) -> Loss:
    """Return the loss of training.

    Raises:
        UsageError: the settings ask for what the task cannot do.
    """
    if (settings.mixup or settings.cutmix) and task is not IMAGE_CLASSIFICATION:
        raise UsageError(f"mixup and cutmix mix the labels of images, and the task is {task.name!r}; leave them out")
    if settings.distill is not None and task.logits is None:
        raise UsageError(f"distill compares class scores, and task {task.name!r} has none (`logits`); leave it out")
    return training_loss(task, settings.label_smoothing)


def require_asked(settings: TrainSettings, parts: Sequence[Part]) -> None:
    """Checks that nothing which settings ask for is silently left out.

    Raises:
        UsageError: the part for it is not among the parts.
    """
    for name, kind in (("distill", Distillation), ("regularize", Sparsifying), ("average", Average)):
        if getattr(settings, name) is not None and not any(isinstance(part, kind) for part in parts):
            raise UsageError(f"{name} is set, and no {kind.__name__} is among the parts: see training.asked_parts")
