"""Knowledge distillation: the student learns its teacher's logits and features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from prunekit.channels.tracing.execution import channel_axis
from prunekit.deploy.deployment_transform import for_inference
from prunekit.distributed.process_group import total_of
from prunekit.errors import ModelError, reraise_shortage
from prunekit.hooks.hook import recomputing
from prunekit.hooks.owner import HookOwner
from prunekit.masks.module_values import paths_matching
from prunekit.measure.memory_format import in_fastest_format
from prunekit.models.interface import logits
from prunekit.planning.plan import Plan
from prunekit.settings.train import DistillSettings
from prunekit.tasks.classification import IMAGE_CLASSIFICATION
from prunekit.tasks.language import wide
from prunekit.tasks.task import HeadComparison, Task, get_task
from prunekit.tasks.texts import counted_rows
from prunekit.training.callbacks.callback import Callback, CurrentPlan, TrainingRun
from prunekit.utils.context import training_mode
from prunekit.utils.inputs import DECODER, MASK, Counted, call, inputs_as_example, rows_of, sample_count
from prunekit.utils.tensors import map_tensors

ModuleCall = tuple[str, int]
"""Path of a module, and the number of the call in a forward pass, from 0."""


def suited(settings: DistillSettings, task: Task) -> DistillSettings:
    """Return settings in which what was null is a number that suits the task."""
    matching = task.labeled_images
    temperature = 1.0 if matching or task.heads else 2.0
    blend = matching and takes_shares(task)
    suits = {"temperature": temperature, "labels": float(not matching), "blend": blend}
    missing: dict[str, Any] = {name: value for name, value in suits.items() if getattr(settings, name) is None}
    return replace(settings, **missing)


def takes_shares(task: Task) -> bool:
    """Return whether a task counts and has a loss where targets are shares of classes, as those of blended images."""
    scores, shares = torch.zeros(3, 2), torch.full((3, 2), 0.5)  # whose shapes don't broadcast with a label for each
    try:
        return task.counts is None or bool(task.counts(scores, shares).ndim and task.loss(scores, shares).numel())
    except Exception as error:  # whatever a task of the user's own makes of them
        reraise_shortage(error)
        return False


class Distillation(Callback):
    """Adds `weight` times `soft_targets`, and if the settings name modules, `features.weight` times `feature_error`.

    The teacher runs in eval mode without gradients on what the student is given, the same blends of images in the same
    precision. It is not changed: what runs is a copy in the form that is fastest, unless features are compared. These
    are compared call by call, and only in the channels that the current plan keeps, because pruned channels of a masked
    student are zero and nothing is to be learnt there. Padding takes part in neither; nor do tokens without a label in
    `soft_targets`, so that a model of masked tokens learns the teacher's answers to these. `task`, itself or its name,
    says where class scores are in what the models return. In place of `soft_targets` a task may compare `heads`, as
    that of detectors does: see `prunekit.tasks.detection_heads.head_error`.

    Raises:
        UsageError: on enter, when a glob matches no module.
        ModelError: on enter, when heads of student and teacher differ in more than channels; in a step, when a module
            returns no tensor, or one without a gradient.
    """

    def __init__(
        self,
        teacher: nn.Module,
        settings: DistillSettings,
        plan: CurrentPlan = lambda: None,
        *,
        task: Task | str = IMAGE_CLASSIFICATION,
    ) -> None:
        self._task = get_task(task)
        self._teacher, self._settings, self._plan = teacher, suited(settings, self._task), plan
        self._fastest: nn.Module | None = None
        self._contiguous = False  # whether it does not take images whose channels lie last
        self._logits = self._task.logits or logits
        self._heads: HeadComparison | None = None
        self._outputs: tuple[FeatureRecorder, FeatureRecorder] | None = None

    @contextmanager
    def active(self, run: TrainingRun) -> Iterator[None]:
        """Move the teacher to the device, and record features."""
        teacher, before = self._teacher, next(self._teacher.parameters()).device
        mode = training_mode(teacher, False) if self._task.heads is None else self._task.mode_for_loss(teacher)
        try:
            teacher.to(run.device)
            with mode, self._features(run.model), self._compared(run.model):
                yield
        finally:
            teacher.to(before)
            self._fastest = None

    @contextmanager
    def _compared(self, student: nn.Module) -> Iterator[None]:
        """Compare heads, if the task has them."""
        if self._task.heads is None:
            yield
            return
        with self._task.heads(student, self._teacher) as self._heads:
            yield
        self._heads = None

    @contextmanager
    def _features(self, student: nn.Module) -> Iterator[None]:
        wanted = self._settings.features
        if wanted is None:
            yield
            return
        paths = feature_paths(student, self._settings)
        given = FeatureRecorder(student, paths, self._plan, trained=True)
        with given, FeatureRecorder(self._teacher, paths, self._plan, trained=False) as taught:
            self._outputs = given, taught
            yield
        self._outputs = None

    def added_loss(self, inputs: Any, output: Any, targets: Any) -> Tensor:
        """Return the weighted distillation losses of a batch."""
        with torch.no_grad():
            wanted = self._logits(self._answer(inputs, targets)) if self._heads is None else self._heads.teach()
        settings = self._settings
        if self._heads is None:
            given = self._logits(output)
            counted = counted_rows(inputs, targets, len(given), self._task.ignored)
            assert settings.temperature is not None
            loss = settings.weight * soft_targets(given, wanted, settings.temperature, counted)
        else:
            loss = settings.weight * self._heads.error(wanted)
        if self._outputs is not None and settings.features is not None:
            student, taught = (outputs.take() for outputs in self._outputs)
            if student.keys() != taught.keys() or not student:
                alone = sorted({path for path, _ in set(student) ^ set(taught)})
                if not alone:
                    raise ModelError("distill.features: none of the modules ran; choose modules that do")
                raise ModelError(
                    f"distill.features: {', '.join(alone[:4])} did not run as often in the student, in train mode, as "
                    "in the teacher, in eval mode; choose other modules (checkpointed with use_reentrant=True they "
                    "record nothing)"
                )
            pairs = [self._real(inputs, targets, key[0], one, taught[key]) for key, one in student.items()]
            weight = sample_count(inputs) if targets is None else self._task.weighed(targets)
            error = feature_error([one for one, _ in pairs], [one for _, one in pairs], weight)
            loss = loss + settings.features.weight * error
        return loss

    def _real(self, inputs: Any, targets: Any, path: str, *features: Tensor) -> list[Tensor]:
        """Return a module's features at positions that are not padding; those without padding unchanged.

        Padding is where the `attention_mask` is 0, and for a decoder that reads an encoder, where labels do not count.
        """
        named = inputs[-1] if isinstance(inputs, tuple) and inputs else inputs
        if not isinstance(named, Mapping):
            return [*features]
        known = [named[MASK] != 0] if isinstance(named.get(MASK), Tensor) else []
        if DECODER in named and isinstance(targets, Tensor):
            written = [targets != self._task.ignored]
            known = known + written if "encoder" in path.split(".") else written + known
        counted = Counted(tuple(mask for mask in known if mask.dim() > 1))
        return [rows_of(one, counted) for one in features]

    def _answer(self, inputs: Any, targets: Any) -> Any:
        """Return the teacher's output for what the student is called with."""
        if self._fastest is None:
            plain = map_tensors(inputs, Tensor.contiguous)
            self._contiguous = in_fastest_format(self._teacher, plain) is plain
        inputs = map_tensors(inputs, Tensor.contiguous) if self._contiguous else inputs
        example = self._task.example_for_loss(self._teacher, inputs_as_example(self._teacher, inputs), targets)
        if self._fastest is None:
            self._fastest = for_inference(self._teacher, example) if self._outputs is None else self._teacher
        return call(self._fastest, example)


AT_ONCE = 2**21
"""Class scores of each model that `soft_targets` computes with at a time, where there are more: 8 MiB in float32."""


def soft_targets(student: Tensor, teacher: Tensor, temperature: float, counted: Tensor | None = None) -> Tensor:
    """Return T^2 KL(teacher / T || student / T), mean over the batch (Hinton et al. 2015, "Distilling the knowledge").

    The factor T^2 keeps gradients as large as those of the cross entropy at any temperature T above 0. Both logits are
    (B, classes); half precision is computed in float32. Only rows that are `counted`, (B,) bool, take part; None: all.
    Of no rows it is 0. Where there are many, as tokens with a large vocabulary, some of them are computed at a time.
    """
    many = student.numel() > AT_ONCE
    total = (_DivergenceOfMany.apply if many else _divergence)(student, teacher, counted, temperature)
    count = max(len(student), 1) if counted is None else counted.sum().clamp_min(1)
    divergence: Tensor = total / count * temperature**2
    return divergence


def _divergence(student: Tensor, teacher: Tensor, counted: Tensor | None, temperature: float) -> Tensor:
    """Return the sum of the KL divergences of rows that count."""
    if counted is not None:
        student, teacher = student[counted], teacher[counted]
    given, wanted = (F.log_softmax(wide(values) / temperature, dim=1) for values in (student, teacher))
    return F.kl_div(given, wanted, reduction="sum", log_target=True)


class _DivergenceOfMany(torch.autograd.Function):
    """The same of many rows, some at a time: of all of them only the gradient is kept, in place of six such tensors."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, counted: Tensor | None, temperature: float) -> Tensor:
        """Return the sum, and keep its gradient, which is softmax(student) - softmax(teacher), over T."""
        ctx.gradient, total = torch.zeros_like(student), student.new_zeros(())
        size = max(AT_ONCE // student.shape[1], 1)
        for start in range(0, len(student), size):
            rows = slice(start, start + size)
            part, chosen = student[rows].detach().requires_grad_(True), None if counted is None else counted[rows]
            with torch.enable_grad():
                found = _divergence(part, teacher[rows], chosen, temperature)
            ctx.gradient[rows], total = *torch.autograd.grad(found, part), total + found.detach()
            del part, found
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient for the student's logits."""
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(weight.to(gradient.dtype)), None, None, None


def feature_error(student: Sequence[Tensor], teacher: Sequence[Tensor], weight: int = 1) -> Tensor:
    """Return the mean over layers of |student - teacher|^2 / |teacher|^2 (hints of Romero et al. 2015, "FitNets").

    Where several processes share a batch, |teacher|^2 is that of all of them, so that the mean of their results,
    weighted by their images or tokens that count, is that of a single process.
    """
    pairs = list(zip(map(wide, student), map(wide, teacher), strict=True))
    sizes = [wanted.square().sum() for _, wanted in pairs]
    *of_all, together = total_of(torch.stack([*sizes, torch.full_like(sizes[0], weight)]))
    errors = [
        (given - wanted).square().sum() / size.clamp_min(torch.finfo(size.dtype).tiny)
        for (given, wanted), size in zip(pairs, of_all, strict=True)
    ]
    mean: Tensor = torch.stack(errors).mean() * (together / max(weight, 1))
    return mean


def feature_paths(model: nn.Module, settings: DistillSettings) -> list[str]:
    """Return the paths of the modules whose outputs are compared; raise UsageError if a glob matches nothing."""
    wanted = settings.features
    return [] if wanted is None else paths_matching(model, wanted.modules, "distill.features.modules")


class FeatureRecorder(HookOwner):
    """Records the outputs of some modules, in their kept channels.

    Those of a `trained` model must carry a gradient, and nothing is recorded in its passes without gradients.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str], plan: CurrentPlan, *, trained: bool) -> None:
        super().__init__()
        self._model, self._paths, self._plan, self._trained = model, paths, plan, trained
        self._found: dict[ModuleCall, Tensor] = {}
        self._kept: dict[tuple[str, int, torch.device], Tensor | None] = {}
        self._kept_by: Plan | None = None

    def register(self) -> None:
        """Register a hook on each module."""
        for path in self._paths:
            self.own_forward(self._model.get_submodule(path), partial(self._record, path))

    def take(self) -> dict[ModuleCall, Tensor]:
        """Return the outputs since the last time, by path and call."""
        found, self._found = self._found, {}
        return found

    def _record(self, path: str, module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        if recomputing() or (self._trained and not torch.is_grad_enabled()):
            return  # the second pass of activation checkpointing, or validation
        if not isinstance(output, Tensor) or not output.is_floating_point():
            raise ModelError(f"distill.features: {path} gives a {type(output).__name__}; expected one tensor of floats")
        if self._trained and not output.requires_grad:
            raise ModelError(
                f"distill.features: the output of {path} carries no gradient, because it is frozen or is checkpointed "
                "with use_reentrant=True; choose other modules, or use_reentrant=False"
            )
        call = sum(key[0] == path for key in self._found)
        axis = channel_axis(module, output.ndim)
        kept = self._kept_index(path, call, output.shape[axis], output.device)
        # A copy either way: whatever reads the output may overwrite it.
        self._found[path, call] = output.clone() if kept is None else output.index_select(axis, kept)

    def _kept_index(self, path: str, call: int, channels: int, device: torch.device) -> Tensor | None:
        """Return the kept channels of an output; None if all are kept or the plan does not know the output."""
        if (plan := self._plan()) is not self._kept_by:
            self._kept, self._kept_by = {}, plan
        if plan is None:
            return None
        key = path, call, device
        if key not in self._kept:
            labels = plan.channel_map.activations.get((path, "output", call))
            keep = None if labels is None or labels.size != channels else plan.keep[labels]
            self._kept[key] = None if keep is None or keep.all() else torch.from_numpy(np.flatnonzero(keep)).to(device)
        return self._kept[key]
