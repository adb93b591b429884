"""Callbacks of a training by its settings: distillation, regularizer, average of weights, fake quantization."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.data.loader import batches
from prunekit.data.splits import Splits
from prunekit.errors import ModelError, UsageError
from prunekit.planning.plan import Plan
from prunekit.repair.batchnorm_statistics import is_trained
from prunekit.settings.train import DistillSettings, TrainSettings
from prunekit.tasks.task import Loss, Task, training_loss
from prunekit.training.callbacks.averaging import Average
from prunekit.training.callbacks.callback import Callback, CurrentPlan
from prunekit.training.callbacks.distillation import Distillation, suited, takes_shares
from prunekit.training.callbacks.fake_quantization import FakeQuantization
from prunekit.training.callbacks.regularizers import SparsityRegularizer

STATISTICS_IMAGES = 2048
"""Training images, at most, from which an average's BatchNorm statistics are taken: many times a calibration's."""


@dataclass(frozen=True, eq=False)
class CallbackInputs:
    """Objects that callbacks need besides their settings."""

    splits: Splits  # the data
    batch: int  # images in a batch
    teacher: nn.Module | None = None  # the trained dense model, for distillation
    channel_map: ChannelMap | None = None  # of the model, for regularizers
    removed: Plan | None = None  # the plan whose channels `growing` shrinks; the model is not masked by it
    masks: CurrentPlan = lambda: None  # returns the plan that masks the model
    # the plan by which the model was made compact, to compare its features with those of a dense teacher
    cut: Plan | None = None


def build_callbacks(settings: TrainSettings, inputs: CallbackInputs) -> list[Callback]:
    """Return the callbacks that the settings ask for, to be entered after masks."""
    callbacks: list[Callback] = []
    if isinstance(settings.distill, DistillSettings):
        if inputs.teacher is None:
            raise UsageError("distill: expected a trained model to learn from, and there is none here; leave it out")
        plan = inputs.masks if inputs.cut is None else lambda: inputs.cut
        callbacks.append(Distillation(inputs.teacher, settings.distill, plan, task=inputs.splits.task))
    if settings.regularize is not None:
        if inputs.channel_map is None:
            raise UsageError("regularize: expected the channel map of the model (prunekit.trace), got none")
        callbacks.append(SparsityRegularizer(settings.regularize, inputs.channel_map, inputs.removed))
    if settings.average is not None:
        train = inputs.splits.train
        chosen = torch.linspace(0, len(train) - 1, min(STATISTICS_IMAGES, len(train))).long()
        images = batches(train, inputs.batch, shuffle_seed=None, indices=chosen)
        average = settings.average
        if settings.norms == "running" and average.statistics is None:
            average = replace(average, statistics="averaged")  # which are the same all the time
        callbacks.append(Average(average, images, inputs.masks))
    if settings.fake_quantize is not None:
        callbacks.append(FakeQuantization())
    return callbacks


def require_callbacks(settings: TrainSettings, callbacks: Sequence[Callback]) -> None:
    """Raise UsageError if a callback that the settings ask for is not among the callbacks."""
    kinds = {
        "distill": Distillation, "regularize": SparsityRegularizer, "average": Average,
        "fake_quantize": FakeQuantization,
    }  # fmt: skip
    for name, kind in kinds.items():
        if getattr(settings, name) not in (None, "auto") and not any(
            isinstance(callback, kind) for callback in callbacks
        ):
            raise UsageError(f"{name} is set, and no {kind.__name__} is among the callbacks: see build_callbacks")


def needs_plan(settings: TrainSettings) -> bool:
    """Return whether training shrinks the channels that a plan removes, and so has to come after the plan."""
    return settings.regularize is not None and settings.regularize.method == "growing"


def task_loss(task: Task, settings: TrainSettings) -> Loss:
    """Return the loss of training."""
    if (settings.mixup or settings.cutmix) and not task.labeled_images:
        raise UsageError(f"mixup and cutmix mix the labels of images, and the task is {task.name!r}; leave them out")
    if isinstance(distill := settings.distill, DistillSettings):
        if not can_teach(task):
            why = (
                "learns the dense model's outputs already" if task.from_dense else "has none (`logits`) and no `heads`"
            )
            raise UsageError(f"distill compares class scores, and task {task.name!r} {why}; leave it out")
        if task.heads and distill.temperature not in (None, 1):
            raise UsageError(
                f"distill.temperature: expected none, because task {task.name!r} compares heads as they are, got "
                f"{distill.temperature:g}; leave it out"
            )
        if distill.blend and not (task.labeled_images and takes_shares(task)):
            text = "blends images with a class each, whose targets are shares of classes then"
            raise UsageError(f"distill.blend {text}, which task {task.name!r} does not take; leave it out")
        if distill.blend and (settings.mixup or settings.cutmix):
            raise UsageError("distill.blend and mixup or cutmix: expected one of them, because both blend images")
    return training_loss(task, settings.label_smoothing)


def can_teach(task: Task, model: nn.Module | None = None) -> bool:
    """Return whether there is something that a dense model, such as this one, can tell a student of the task."""
    if task.heads is None or model is None:
        return task.logits is not None or task.heads is not None
    try:
        task.heads(model, model)
    except ModelError:
        return False
    return True


def on_labels(settings: TrainSettings) -> TrainSettings:
    """Return the settings of a training that no teacher helps unless they ask for one."""
    return replace(settings, distill=None) if settings.distill == "auto" else settings


def with_teacher(settings: TrainSettings, task: Task, model: nn.Module | None = None) -> TrainSettings:
    """Return the settings of a training beside the dense model: what `distill: auto` and null mean for its task."""
    distill = settings.distill
    norms = [] if model is None else [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if settings.norms is None and task.heads is not None and all(map(is_trained, norms)):
        settings = replace(settings, norms="running" if norms else None)
    if distill == "auto":
        distill = DistillSettings() if can_teach(task, model) else None
    if distill is None:
        return replace(settings, distill=None)
    if distill.blend is None and (settings.mixup or settings.cutmix):
        distill = replace(distill, blend=False)
    return replace(settings, distill=suited(distill, task))
