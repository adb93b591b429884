"""Runs a model on a few batches and writes down what is seen; the model is afterwards as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.errors import ModelError, PrunekitError
from prunekit.hooks.hook import refuse_compiled
from prunekit.inspection.diagnosis.data_checks import DataWatch, Pool, class_labels, in_range
from prunekit.inspection.diagnosis.forward_watch import GradientWatch, Running, UnitWatch, failure_of
from prunekit.inspection.diagnosis.gradient_checks import largest_eigenvalue, too_sharp, trial
from prunekit.inspection.diagnosis.observation import (
    Failure,
    Gradients,
    Observation,
    StepSize,
    batchnorm_modes,
    unchanged,
)
from prunekit.models.outputs import auxiliary, logits
from prunekit.statistics.calibration import StatsCollector
from prunekit.statistics.channel_stats import ChannelStats
from prunekit.tasks.batches import LabeledBatch
from prunekit.utils.context import device_of, gradients_of, seeded, training_mode
from prunekit.utils.inputs import call, select_samples, to_device

Loss = Callable[[Any, Tensor], Tensor]
"""From what the model returned and the labels to one number, the mean over the batch."""
CURVATURE_IMAGES = 32
"""Images on which the curvature is taken, which costs up to two dozen forward and backward passes."""


def cross_entropy(output: Any, labels: Tensor) -> Tensor:
    """Return the loss of a classifier, auxiliary heads included, as `finetune` trains it."""
    loss = F.cross_entropy(logits(output), labels)
    for weight, head in auxiliary(output):
        loss = loss + weight * F.cross_entropy(head, labels)
    return loss


class _Raised(Exception):
    """Ends the observation."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error)
        self.failure = failure


class Observer:
    """Runs the passes of one observation.

    Args:
        model: on the device that the batches are moved to, in the mode in which it would be trained.
        loss: None: the cross entropy of a classifier.
    """

    def __init__(self, model: nn.Module, loss: Loss | None) -> None:
        self.model, self.loss, self.classifies = model, loss or cross_entropy, loss is None
        self.device = device_of(model)
        self.running = Running(model)
        self.units = UnitWatch(self.running)
        self.watched = GradientWatch(model)
        self.losses: list[float] = []
        self.outputs: dict[str, float] = {}
        self.names = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters: dict[str, float | None] = dict.fromkeys(self.names)
        self.missing: dict[str, str] = {}
        self.images = 0

    def train(self, batches: Sequence[LabeledBatch], seen: DataWatch) -> ChannelStats:
        """Forward and backward, in train mode."""
        collector = StatsCollector(self.model, fused=False)
        with training_mode(self.model, True), collector, self.running, self.watched:
            for batch in batches:
                self._pass(batch, seen)
            return collector.stats()

    def _pass(self, batch: LabeledBatch, seen: DataWatch) -> None:
        for watch in (self.running, self.units, self.watched):
            watch.begin()
        inputs = to_device(batch.inputs, self.device)
        try:
            with torch.enable_grad(), self.units:
                output = call(self.model, inputs)
        except (PrunekitError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a model's own code may raise anything
            raise _Raised(failure_of(error, self.running)) from error
        self.images += len(batch.images)
        if batch.labels is None:
            self.missing["gradients"] = "the batches have no labels, which the loss needs"
            return
        self._backward(output, batch.labels.to(self.device), seen)

    def _backward(self, output: Any, labels: Tensor, seen: DataWatch) -> None:
        if self.classifies and seen.classes is None:
            seen.classes = _classes(output)
        try:
            value = self.loss(*self._in_range(output, labels, seen.classes))
        except ModelError as error:
            self.missing["gradients"] = f"{error}; or give the loss"
            return
        except PrunekitError:
            raise
        except Exception as error:
            raise _Raised(failure_of(error, self.running, "the loss")) from error
        if not value.requires_grad:
            self.missing["gradients"] = "the loss depends on no trainable parameter"
            return
        self.losses.append(float(value.detach()))
        names = list(self.names)
        try:
            found = gradients_of(value, list(self.names.values()))
        except Exception as error:
            raise _Raised(failure_of(error, self.running, "the backward pass")) from error
        for name, gradient in zip(names, found, strict=True):
            if gradient is not None:
                self.parameters[name] = _larger(self.parameters[name], float(gradient.detach().float().norm()))
        for path, norm in self.watched.norms.items():
            self.outputs[path] = _larger(self.outputs.get(path), norm)

    def _in_range(self, output: Any, labels: Tensor, classes: int | None) -> tuple[Any, Tensor]:
        """Return what the loss takes; that some labels are no class is told apart from it."""
        if not self.classifies or classes is None or not class_labels(labels):
            return output, labels
        return output, in_range(labels, classes)

    def evaluate(self, batches: Sequence[LabeledBatch]) -> ChannelStats:
        """Forward in eval mode, on the first batch."""
        collector = StatsCollector(self.model, fused=False)
        with training_mode(self.model, False), torch.no_grad(), collector, self.running:
            self.running.begin()
            try:
                call(self.model, to_device(batches[0].inputs, self.device))
            except (PrunekitError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise _Raised(failure_of(error, self.running, "the forward pass in eval mode")) from error
            return collector.stats()

    def gradients(self) -> Gradients | None:
        """Return what came back."""
        if not self.losses:
            self.missing.setdefault("gradients", "there was no loss")
            return None
        inside = {path: norm for path, norm in self.outputs.items() if path}
        return Gradients(inside, self.outputs.get("", 0.0), self.parameters, self.watched.not_finite)

    def curvature(
        self, batch: LabeledBatch, step: StepSize, classes: int | None
    ) -> tuple[float | None, tuple[float, ...]]:
        """Return the sharpness of the loss on the first batch, in train mode, and where it is too sharp for the step a
        trial.

        None where the loss has no curvature to be had.
        """
        if any(weight.dtype not in (torch.float32, torch.float64) for weight in self.names.values()):
            self.missing["step"] = "the weights have too few digits for the curvature; diagnose the model in float32"
            return None, ()
        few = slice(0, CURVATURE_IMAGES)
        assert batch.labels is not None
        inputs, labels = to_device((select_samples(batch.inputs, few), batch.labels[few]), self.device)
        weights = list(self.names.values())

        def loss() -> Tensor:
            with seeded(0):  # the same dropout each time
                return self.loss(*self._in_range(call(self.model, inputs), labels, classes))

        with training_mode(self.model, True):
            sharpness = largest_eigenvalue(loss, weights, too_sharp(step))
            beyond = sharpness is not None and sharpness > too_sharp(step)
            return sharpness, trial(loss, weights, step) if beyond else ()


def _larger(before: float | None, now: float) -> float:
    """Return the larger of two numbers; NaN is larger than all."""
    return before if before is not None and (before != before or now <= before) else now


def _classes(output: Any) -> int | None:
    try:
        scores = logits(output)
    except ModelError:
        return None
    return scores.shape[1] if scores.ndim > 1 else None


def observe(
    model: nn.Module, batches: Sequence[LabeledBatch], loss: Loss | None, step: StepSize | None, pool: Pool, seed: int
) -> Observation:
    """Run the model forward and backward in train mode, once in eval mode, and look at its curvature.

    Parameters, buffers, gradients, modes and the random state are afterwards what they were, also after an error.

    Raises:
        ModelError: the model is compiled.
        PrunekitError: what a hook refuses, such as nested tensors.
    """
    refuse_compiled(model, "diagnose")
    seen, observer = DataWatch(pool), Observer(model, loss)
    for batch in batches:
        seen.add(batch)
    modes, failure, stats, evaluated = batchnorm_modes(model), None, ChannelStats({}), ChannelStats({})
    sharpness: float | None = None
    losses: tuple[float, ...] = ()
    with seeded(seed), unchanged(model):
        try:
            stats = observer.train(batches, seen)
            evaluated = observer.evaluate(batches)
        except _Raised as raised:
            failure = raised.failure
        found = observer.gradients()
        if step is not None and not step.adaptive and failure is None and found is not None:
            sharpness, losses = observer.curvature(batches[0], step, seen.classes)
    return Observation(
        model=model,
        order=observer.running.order,
        data=seen.result(),
        images=observer.images,
        failure=failure,
        stats=stats,
        evaluated=evaluated,
        units=observer.units.units,
        gradients=found,
        loss=tuple(observer.losses),
        modes=modes,
        training=model.training,
        step=step,
        sharpness=sharpness,
        trial=losses,
        missing=_missing(observer, failure, step),
    )


def _missing(observer: Observer, failure: Failure | None, step: StepSize | None) -> dict[str, str]:
    """Return why there is nothing to look at, by what a check may need."""
    missing = dict(observer.missing)
    if failure is not None:
        stopped = f"{failure.stage} stopped in {failure.module or 'the model'}"
        missing = {"forward": stopped, "gradients": stopped, "step": stopped}
    elif step is None:
        missing.setdefault("step", "no learning rate is known: give the optimizer, SGD, Adam or AdamW")
    elif "gradients" in missing:
        missing.setdefault("step", missing["gradients"])
    return missing
