"""Measured sensitivity: how a model's outputs change when its channel groups are masked, one after the other."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.channels.channel_map import ChannelMap
from prunekit.channels.labels import Labels
from prunekit.channels.tracing.execution import plain_attention
from prunekit.errors import DataError, ModelError, NonFiniteError, UsageError
from prunekit.masks.weight_masks import WeightMasks
from prunekit.measure.partial_forward import DensePrefix
from prunekit.planning.plan import Plan
from prunekit.planning.sensitivity_curves import MeasuredPoint, keep_in_group, kept_counts
from prunekit.statistics.calibration import calibrate
from prunekit.tasks.batches import InputsAndTargets, LabeledBatch, ModelBatches
from prunekit.tasks.task import Loss, Task
from prunekit.utils.context import same_draws, training_mode
from prunekit.utils.inputs import blank_padding, counted_positions, sample_count, select_samples, to_device
from prunekit.utils.progress import reporting, tracked
from prunekit.utils.tensors import accumulation_dtype, gather


def forward_passes(orders: Mapping[str, Labels]) -> int:
    """Return how often `measure_sensitivity` runs the model on each batch: once as it is, and once for each point."""
    return 1 + sum(len(kept_counts(labels.size)) - 1 for labels in orders.values())


def measure_sensitivity(
    model: nn.Module,
    channel_map: ChannelMap,
    orders: Mapping[str, Labels],
    batches: Any,
    *,
    loss: Loss | None = None,
    task: Task | str | None = None,
    progress: bool | None = False,
) -> dict[str, tuple[MeasuredPoint, ...]]:
    """Run a model with each group masked to a few numbers of kept labels, and compare its outputs with its own.

    Nothing is approximated: each point is the model under `WeightMasks`, its norms on the kept channels alone, which is
    what the compact model computes. Each batch is read once; the model runs on it as `forward_passes` says.

    Args:
        model: the dense model; its tensors and modes are restored.
        channel_map: of that model, after a trial.
        orders: by a group's name its labels in the order in which they are removed.
        batches: as `prunekit.prune` takes them, with labels or without; moved to the model's device.
        loss: of the model's output and the labels, mean over the batch; None for the cross entropy, if there are labels
            and class scores.
        task: a task or its name, which unpacks batches of other forms.
        progress: whether to show a bar on stderr; None: on a terminal and in a notebook.

    Returns:
        By a group's name its points, from all labels kept to one. With all of them the model is the dense one.

    Raises:
        DataError: there are no batches, or not all or none of them have labels.
        UsageError: a loss is given, and there are no labels.
        ModelError: the model returns no tensor of floating-point numbers with a row for each sample, or its shapes
            change under masks.
        NonFiniteError: an output is NaN or Inf; the message names the first layer with one.
    """
    sensitivity = _SensitivityPass(model, channel_map, orders, loss)
    pairs = ModelBatches(model, batches, task, "sensitivity")
    total = operator.length_hint(pairs) * forward_passes(orders) or None
    passes = (each for batch in uniformly_labeled(pairs, loss) for each in sensitivity.passes(batch))
    with training_mode(model, False), torch.no_grad(), plain_attention(), reporting(progress, "sensitivity"):
        for _ in tracked(passes, "sensitivity", total=total, unit="pass"):
            pass
    return sensitivity.curves()


class _SensitivityPass:
    """The errors of all points over the batches so far; arguments as for `measure_sensitivity`."""

    def __init__(
        self, model: nn.Module, channel_map: ChannelMap, orders: Mapping[str, Labels], loss: Loss | None
    ) -> None:
        self._model, self._orders, self._loss = model, orders, loss
        points = [(name, kept) for name, labels in orders.items() for kept in kept_counts(labels.size)[1:]]
        self._plans = {
            point: Plan(channel_map, keep_in_group(channel_map, orders[point[0]], point[1])) for point in points
        }
        self._sums = {point: OutputErrors() for point in points}
        self._dense, self._variance = OutputErrors(), OutputVariance()
        self._prefix: DensePrefix | None = None

    def passes(self, batch: LabeledBatch) -> Iterator[None]:
        """Run the dense model and all masked ones on a batch; yield after each."""
        inputs = to_device(batch.inputs, next(self._model.parameters()).device)
        prefix = self._prefix = self._prefix or self._prefix_for(inputs)
        with same_draws(self._model):
            output = prefix.record(inputs)
        wanted = comparable_output(self._model, inputs, output, "the dense model")
        self._variance.add(wanted)
        self._dense.add(wanted, wanted, batch, self._loss)
        yield
        for (name, kept), plan in self._plans.items():
            where = f"group {name} masked to {kept} of {self._orders[name].size} channels"
            with same_draws(self._model), WeightMasks(self._model, plan, restore=True):
                found = comparable_output(self._model, inputs, prefix.run(name, inputs), where)
            require_same_shapes(wanted, found, where)
            self._sums[name, kept].add(found, wanted, batch, self._loss)
            yield

    def _prefix_for(self, inputs: tuple[Any, ...]) -> DensePrefix:
        """Return the calls that the dense and all masked models share, tried with the fewest channels of each group."""
        last = {name: plan for (name, _), plan in self._plans.items()}
        tensors = {name: list(plan.kept_indices) for name, plan in last.items()}
        return DensePrefix(
            self._model,
            select_samples(inputs, slice(2)),
            tensors,
            lambda name: WeightMasks(self._model, last[name], restore=True),
            batch=sample_count(inputs),
        )

    def curves(self) -> dict[str, tuple[MeasuredPoint, ...]]:
        """Return the points of each group, the dense model first."""
        variances = self._variance.variances()

        def point(name: str, kept: int) -> MeasuredPoint:
            return self._sums.get((name, kept), self._dense).point(kept, variances)

        return {
            name: tuple(point(name, kept) for kept in kept_counts(labels.size)) for name, labels in self._orders.items()
        }


def uniformly_labeled(batches: Iterable[InputsAndTargets], loss: Loss | None) -> Iterator[LabeledBatch]:
    """Yield the batches, all with labels or all without."""
    first: LabeledBatch | None = None
    for inputs, labels in batches:
        batch = LabeledBatch(inputs, labels)
        first = first or batch
        if (batch.labels is None) != (first.labels is None):
            raise DataError("sensitivity: expected labels with every batch or with none, got some of each")
        if batch.labels is None and loss is not None:
            raise UsageError("sensitivity: a loss needs labels: expected batches (inputs, labels), got inputs alone")
        yield batch
    if first is None:
        raise DataError("sensitivity: expected at least one batch of samples to measure on, got none")


@dataclass(frozen=True, eq=False)
class ModelOutput:
    """An output of a model: its tensors with a row for each sample, (B, values) in float64, and its class scores."""

    output: Any
    tensors: tuple[Tensor, ...]
    scores: Tensor | None


def comparable_output(model: nn.Module, inputs: tuple[Any, ...], output: Any, where: str) -> ModelOutput:
    """Return the parts of an output that can be compared.

    Args:
        model: the model.
        inputs: the samples that it ran on.
        output: what it returned.
        where: the model's name in messages.

    Raises:
        ModelError: there is no tensor to compare.
        NonFiniteError: a value is NaN or Inf; the message names the first layer with one.
    """
    samples, device = sample_count(inputs), gather(inputs)[0].device
    rows = [t for t in gather(output) if t.is_floating_point() and t.dim() and len(t) == samples]
    if not rows:
        raise ModelError(
            f"sensitivity: expected a model that returns a tensor of floating-point numbers, or several nested in "
            f"tuples, lists and dictionaries, with a row for each sample; got {type(output).__name__} from {where}; "
            "wrap the model so that it returns what its quality is judged by"
        )
    wide = accumulation_dtype(device)
    counted = counted_positions(model, inputs)
    tensors = tuple(blank_padding(tensor.detach(), counted).reshape(samples, -1).to(wide) for tensor in rows)
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        calibrate(model, [(inputs,)], device=device, fused=False, progress=False).require_finite()
        raise NonFiniteError(f"sensitivity: the output of {where} is NaN or Inf, and no layer's is before it")
    return ModelOutput(output, tensors, _class_scores(output, samples))


def _class_scores(output: Any, samples: int) -> Tensor | None:
    """Return (B, classes) in float64 if a model returns class scores: a matrix, or an object with one in `.logits`."""
    found = getattr(output, "logits", output)
    is_matrix = isinstance(found, Tensor) and found.dim() == 2 and len(found) == samples and found.is_floating_point()
    return found.detach().cpu().double() if is_matrix else None


def require_same_shapes(wanted: ModelOutput, found: ModelOutput, where: str) -> None:
    """Raise a ModelError if outputs have different shapes."""
    shapes = [[tuple(tensor.shape) for tensor in output.tensors] for output in (wanted, found)]
    if shapes[0] != shapes[1]:
        raise ModelError(
            f"sensitivity: {where}: expected outputs of the dense model's shapes {shapes[0]}, got {shapes[1]}; a model "
            "whose outputs depend in number on the samples cannot be compared with itself"
        )


FLAT = 1e-12
"""Smallest variance among samples, as a share of the mean square, of an output that depends on them."""


@dataclass
class OutputVariance:
    """The variance of each value of the dense outputs over all samples: count, mean, sum of squared deviations.

    Batches are merged as in Chan, Golub & LeVeque 1983.
    """

    count: int = 0
    means: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)

    def add(self, output: ModelOutput) -> None:
        """Add the dense outputs of one batch.

        Raises:
            ModelError: their size is not that of earlier ones.
        """
        new = len(output.tensors[0])
        parts = [(tensor.mean(0), (tensor - tensor.mean(0)).square().sum(0)) for tensor in output.tensors]
        if self.count and [mean.shape for mean, _ in parts] != [mean.shape for mean in self.means]:
            raise ModelError("sensitivity: expected outputs of one size for every batch")
        known = zip(self.means, self.squares, strict=True) if self.count else ((0 * m, 0 * s) for m, s in parts)
        total = self.count + new
        merged = [
            (mean + (other - mean) * (new / total), square + more + (other - mean).square() * self.count * new / total)
            for (mean, square), (other, more) in zip(known, parts, strict=True)
        ]
        self.count, self.means, self.squares = total, [m for m, _ in merged], [s for _, s in merged]

    def variances(self) -> list[float]:
        """Return the variance of each output tensor, mean over its values; 0 if it is the same for all samples.

        Raises:
            DataError: it is 0 for all of them.
        """
        found = [
            (float(square.mean()) / self.count, float(mean.square().mean()))
            for mean, square in zip(self.means, self.squares, strict=True)
        ]
        variances = [variance if variance > FLAT * level else 0.0 for variance, level in found]
        if not any(variances):
            raise DataError(
                f"sensitivity: the dense model's output is the same for all {self.count} samples, so there is no "
                "variance to compare errors with; take more, and different, samples"
            )
        return variances


@dataclass
class OutputErrors:
    """The errors of one masked model's outputs, summed over the samples, and how good they are."""

    samples: int = 0
    squares: list[float] = field(default_factory=list)
    kl: float | None = 0.0
    loss: float | None = 0.0
    correct: int | None = 0

    def add(self, found: ModelOutput, wanted: ModelOutput, batch: LabeledBatch, loss: Loss | None) -> None:
        """Add the masked model's outputs on one batch, on which the dense one returned `wanted`."""
        pairs = zip(found.tensors, wanted.tensors, strict=True)
        squares = [float((got - want).square().mean(1).sum()) for got, want in pairs]
        self.squares = [a + b for a, b in zip(self.squares or [0.0] * len(squares), squares, strict=True)]
        self.samples += batch.samples
        self.kl = _plus(self.kl, _divergence(found.scores, wanted.scores))
        right = None
        if batch.labels is not None and found.scores is not None and batch.labels.dim() == 1:
            right = int((found.scores.argmax(1) == batch.labels.cpu()).sum())
        self.correct = None if right is None or self.correct is None else self.correct + right
        self.loss = _plus(self.loss, _loss(found, batch, loss))

    def point(self, kept: int, variances: list[float]) -> MeasuredPoint:
        """Return the means over the samples; the error is the mean over output tensors that vary at all."""
        shares = [square / self.samples / v for square, v in zip(self.squares, variances, strict=True) if v]
        kl, loss = (None if value is None else value / self.samples for value in (self.kl, self.loss))
        top1 = None if self.correct is None else 100 * self.correct / self.samples
        return MeasuredPoint(kept, math.fsum(shares) / len(shares), kl, loss, top1)


def _plus(total: float | None, more: float | None) -> float | None:
    return None if total is None or more is None else total + more


def _divergence(found: Tensor | None, wanted: Tensor | None) -> float | None:
    if found is None or wanted is None:
        return None
    return float(F.kl_div(found.log_softmax(1), wanted.log_softmax(1), reduction="sum", log_target=True))


def _loss(found: ModelOutput, batch: LabeledBatch, loss: Loss | None) -> float | None:
    """Return the loss, summed over the samples of a batch."""
    labels = batch.labels
    if labels is None:
        return None
    if loss is not None:
        return float(loss(found.output, labels.to(found.tensors[0].device))) * len(labels)
    if found.scores is None or labels.dim() != 1:
        return None
    classes = found.scores.shape[1]
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise DataError(f"sensitivity: expected labels from 0 to {classes - 1}, as many as the model gives scores for")
    return float(F.cross_entropy(found.scores, labels.cpu(), reduction="sum"))
