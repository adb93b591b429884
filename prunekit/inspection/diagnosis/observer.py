"""The observation of a model: it is run on a few batches, and afterwards is what it was."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from prunekit.errors import ModelError, PrunekitError, reraise_shortage
from prunekit.hooks.hook import refuse_compiled
from prunekit.inspection.diagnosis.data_checks import DataRecorder, Pool, class_labels, in_range
from prunekit.inspection.diagnosis.findings import BatchNormModes, Failure, GradientNorms, Observation, StepSize
from prunekit.inspection.diagnosis.gradient_checks import largest_eigenvalue, sharpness_limit, try_steps
from prunekit.inspection.diagnosis.recorders import (
    ExecutionRecorder,
    GradientRecorder,
    NonlinearityRecorder,
    failure_of,
)
from prunekit.models.interface import logits
from prunekit.statistics.channel_stats import ChannelStats
from prunekit.statistics.channel_stats_collector import StatsCollector
from prunekit.tasks.batches import LabeledBatch
from prunekit.tasks.classification import cross_entropy
from prunekit.tasks.task import Task
from prunekit.utils.context import device_of, gradients_of, same_attributes, seeded, set_mode, training_mode
from prunekit.utils.inputs import call, select_samples, to_device

Loss = Callable[[Any, Any], Tensor]
"""A function of the model's output and the targets that returns one number, the mean over the batch."""
CURVATURE_IMAGES = 32
"""Images for the curvature, which takes up to two dozen forward and backward passes."""


@dataclass(frozen=True)
class Training:
    """The loss that models are trained by."""

    task: Task | None = None  # how models are called for its loss; None: with the inputs
    given: Loss | None = None  # a loss in place of the task's; None: that, or the cross entropy of a classifier

    @property
    def classifies(self) -> bool:
        """True if the loss is the cross entropy of class scores (B, classes) and labels (B,)."""
        return self.given is None and (self.task is None or self.task.loss is cross_entropy)

    @property
    def loss(self) -> Loss:
        """The loss."""
        return self.given or (cross_entropy if self.task is None else self.task.loss)

    def forward(self, model: nn.Module, inputs: tuple[Any, ...], targets: Any) -> Any:
        """Return what a model in train mode returns for the loss."""
        known = self.task is not None and targets is not None
        return call(model, self.task.example_for_loss(model, inputs, targets) if self.task and known else inputs)


def observe(
    model: nn.Module,
    batches: Sequence[LabeledBatch],
    training: Training,
    step: StepSize | None,
    pool: Pool,
    seed: int,
    samples: str = "samples",
) -> Observation:
    """Observe a model: forward and backward in train mode, forward in eval mode, and the curvature of its loss.

    `samples` is what they are called.

    Parameters, buffers, gradients, modes and the random state are afterwards what they were, even after an error.
    """
    refuse_compiled(model, "diagnose")
    data, observer = DataRecorder(pool), Observer(model, training)
    for batch in batches:
        data.add(batch)
    modes, failure, stats, evaluated = batchnorm_modes(model), None, ChannelStats({}), ChannelStats({})
    sharpness: float | None = None
    losses: tuple[float, ...] = ()
    with seeded(seed), unchanged(model):
        try:
            stats = observer.train(batches, data)
            evaluated = observer.evaluate(batches)
        except _PassFailed as raised:
            failure = raised.failure
        found = observer.gradients()
        if step is not None and not step.adaptive and failure is None and found is not None:
            sharpness, losses = observer.curvature(batches[0], step, data.classes)
    return Observation(
        model=model,
        order=observer.execution.order,
        data=data.result(),
        images=observer.images,
        failure=failure,
        stats=stats,
        eval_stats=evaluated,
        nonlinearities=observer.nonlinearities.inputs,
        gradients=found,
        losses=tuple(observer.losses),
        modes=modes,
        training=model.training,
        step=step,
        sharpness=sharpness,
        trial=losses,
        missing=_missing(observer, failure, step),
        samples=samples,
    )


class Observer:
    """The passes of one observation of a model, in the mode in which it would be trained."""

    def __init__(self, model: nn.Module, training: Training) -> None:
        self.model, self.training = model, training
        self.device = device_of(model)
        self.execution = ExecutionRecorder(model)
        self.nonlinearities = NonlinearityRecorder(self.execution)
        self.output_gradients = GradientRecorder(model)
        self.losses: list[float] = []
        self.outputs: dict[str, float] = {}
        self.names = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters: dict[str, float | None] = dict.fromkeys(self.names)
        self.missing: dict[str, str] = {}
        self.images = 0

    def train(self, batches: Sequence[LabeledBatch], data: DataRecorder) -> ChannelStats:
        """Run forward and backward on every batch, in train mode."""
        collector = StatsCollector(self.model)
        with training_mode(self.model, True), collector, self.execution, self.output_gradients:
            for batch in batches:
                self._pass(batch, data)
            return collector.stats()

    def _pass(self, batch: LabeledBatch, data: DataRecorder) -> None:
        for recorder in (self.execution, self.nonlinearities, self.output_gradients):
            recorder.begin()
        inputs, targets = to_device((batch.inputs, batch.labels), self.device)
        with self._ending_at_errors("the forward pass"), torch.enable_grad(), self.nonlinearities:
            output = self.training.forward(self.model, inputs, targets)
        self.images += len(batch.images)
        if batch.labels is None:
            self.missing["gradients"] = "the batches have no targets, which the loss needs"
            return
        self._backward(output, targets, data)

    def _backward(self, output: Any, labels: Any, data: DataRecorder) -> None:
        if self.training.classifies and data.classes is None:
            data.classes = _classes(output)
        try:
            with self._ending_at_errors("the loss"):
                value = self.training.loss(*self._in_range(output, labels, data.classes))
        except ModelError as error:
            self.missing["gradients"] = f"{error}; or give the loss"
            return
        if not value.requires_grad:
            self.missing["gradients"] = "the loss depends on no trainable parameter"
            return
        self.losses.append(float(value.detach()))
        with self._ending_at_errors("the backward pass"):
            found = gradients_of(value, list(self.names.values()))
        for name, gradient in zip(self.names, found, strict=True):
            if gradient is not None:
                self.parameters[name] = _larger(self.parameters[name], float(gradient.detach().float().norm()))
        for path, norm in self.output_gradients.norms.items():
            self.outputs[path] = _larger(self.outputs.get(path), norm)

    def _in_range(self, output: Any, labels: Any, classes: int | None) -> tuple[Any, Any]:
        """Return what the loss takes: labels that are no class, which a check reports, are put into the first class."""
        if not self.training.classifies or classes is None or not class_labels(labels):
            return output, labels
        return output, in_range(labels, classes)

    def evaluate(self, batches: Sequence[LabeledBatch]) -> ChannelStats:
        """Run forward on the first batch, in eval mode."""
        collector = StatsCollector(self.model)
        with training_mode(self.model, False), torch.no_grad(), collector, self.execution:
            self.execution.begin()
            with self._ending_at_errors("the forward pass in eval mode"):
                call(self.model, to_device(batches[0].inputs, self.device))
            return collector.stats()

    @contextmanager
    def _ending_at_errors(self, stage: str) -> Iterator[None]:
        """End the observation where a model's own code raises, which may raise anything."""
        try:
            yield
        except PrunekitError:
            raise
        except Exception as error:
            reraise_shortage(error)
            raise _PassFailed(failure_of(error, self.execution, stage)) from error

    def gradients(self) -> GradientNorms | None:
        """Return the norms of all gradients; None if there was no loss."""
        if not self.losses:
            self.missing.setdefault("gradients", "there was no loss")
            return None
        inside = {path: norm for path, norm in self.outputs.items() if path}
        return GradientNorms(inside, self.outputs.get("", 0.0), self.parameters, self.output_gradients.not_finite)

    def curvature(
        self, batch: LabeledBatch, step: StepSize, classes: int | None
    ) -> tuple[float | None, tuple[float, ...]]:
        """Return the sharpness of the loss on a batch in train mode, and the losses of steps that were tried.

        The sharpness is None if it cannot be computed; steps are tried only where it is beyond the step's limit.
        """
        if any(weight.dtype not in (torch.float32, torch.float64) for weight in self.names.values()):
            self.missing["step"] = "the weights have too few digits for the curvature; diagnose the model in float32"
            return None, ()
        few = slice(0, CURVATURE_IMAGES)
        assert batch.labels is not None
        inputs, labels = to_device((select_samples(batch.inputs, few), batch.labels[few]), self.device)
        weights = list(self.names.values())

        def loss() -> Tensor:
            with seeded(0):  # the same dropout every time
                output = self.training.forward(self.model, inputs, labels)
                return self.training.loss(*self._in_range(output, labels, classes))

        with training_mode(self.model, True):
            sharpness = largest_eigenvalue(loss, weights, sharpness_limit(step))
            beyond = sharpness is not None and sharpness > sharpness_limit(step)
            return sharpness, try_steps(loss, weights, step) if beyond else ()


class _PassFailed(Exception):
    """A pass raised an exception, which ends the observation."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error)
        self.failure = failure


def _classes(output: Any) -> int | None:
    try:
        scores = logits(output)
    except ModelError:
        return None
    return scores.shape[1] if scores.ndim > 1 else None


def _larger(before: float | None, now: float) -> float:
    """Return the larger of two numbers; NaN is larger than any number."""
    return before if before is not None and (before != before or now <= before) else now


def _missing(observer: Observer, failure: Failure | None, step: StepSize | None) -> dict[str, str]:
    """Return the reason for everything that checks may need and that the observation lacks."""
    missing = dict(observer.missing)
    if failure is not None:
        stopped = f"{failure.stage} stopped in {failure.module or 'the model'}"
        missing = {"forward": stopped, "gradients": stopped, "step": stopped}
    elif step is None:
        missing.setdefault("step", "no learning rate is known: give the optimizer, SGD, Adam or AdamW")
    elif "gradients" in missing:
        missing.setdefault("step", missing["gradients"])
    return missing


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore parameters and buffers when the `with` ends.

    Running statistics change in train mode, and a model's own forward may replace its buffers by other tensors.
    """
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        with same_attributes(model):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def batchnorm_modes(model: nn.Module) -> dict[str, BatchNormModes]:
    """Return how every BatchNorm with running statistics follows the mode of its model, which is restored.

    `model.train()` and `model.eval()` are called, because a model may override them.
    """
    norms = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_var is not None
    }
    found = [module.training for module in norms.values()]
    with training_mode(model, True):
        training = [module.training for module in norms.values()]
        set_mode(model, False)
        evaluating = [module.training for module in norms.values()]
    return dict(zip(norms, map(BatchNormModes, found, training, evaluating), strict=True))
