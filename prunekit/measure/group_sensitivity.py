"""Measured sensitivity: how a model's outputs change when its channel groups are masked, one after the other."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.channels.tracing.execution import plain_attention
from prunekit.errors import DataError, ModelError, NonFiniteError, UsageError
from prunekit.masks.weight_masks import WeightMasks
from prunekit.planning.plan import Plan
from prunekit.planning.sensitivity_curves import MeasuredPoint, keep_in_group, kept_counts
from prunekit.statistics.channel_stats_collector import calibrate
from prunekit.statistics.output_error import OutputComparison, RelativeError
from prunekit.statistics.reductions import VarianceSum
from prunekit.tasks.batches import InputsAndTargets, LabeledBatch, ModelBatches
from prunekit.tasks.classification import IMAGE_CLASSIFICATION
from prunekit.tasks.task import Loss, Measurement, Task, get_task
from prunekit.tasks.texts import counted_rows
from prunekit.utils.context import same_draws, training_mode
from prunekit.utils.inputs import blank_padding, call, counted_positions, sample_count, to_device
from prunekit.utils.progress import reporting, tracked
from prunekit.utils.tensors import accumulation_dtype, gather, is_finite, map_tensors


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
        loss: of the model's output and the targets, mean over the batch; None for the task's. Where models of the task
            compute their loss themselves there is none.
        task: a task or its name, which unpacks the batches, and whose loss and scores are measured. None: the cross
            entropy and top-1, if there are labels and class scores.
    """
    task = None if task is None else get_task(task)
    sensitivity = _SensitivityPass(model, channel_map, orders, Quality(task, loss))
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
        self, model: nn.Module, channel_map: ChannelMap, orders: Mapping[str, Labels], quality: Quality
    ) -> None:
        self._model, self._orders, self._quality = model, orders, quality
        points = [(name, kept) for name, labels in orders.items() for kept in kept_counts(labels.size)[1:]]
        plans = {point: Plan(channel_map, keep_in_group(channel_map, orders[point[0]], point[1])) for point in points}
        self._masks = {point: WeightMasks(model, plan, restore=True) for point, plan in plans.items()}
        self._sums = {point: OutputErrors(quality) for point in points}
        self._dense, self._variance = OutputErrors(quality), OutputVariance()
        self._judge: OutputComparison | None = None  # of a model that selects what it returns, as a detector its boxes

    def passes(self, batch: LabeledBatch) -> Iterator[None]:
        """Run the dense model and all masked ones on a batch; yield after each."""
        inputs = to_device(batch.inputs, next(self._model.parameters()).device)
        if self._judge is None and self._quality.selects:
            self._judge = OutputComparison.of(self._model, inputs)
        with same_draws(self._model):
            wanted = self._run(inputs, "the dense model")
        self._variance.add(wanted)
        self._dense.add(wanted, wanted, self._model, inputs, batch)
        yield
        for (name, kept), masks in self._masks.items():
            where = f"group {name} masked to {kept} of {self._orders[name].size} channels"
            with same_draws(self._model), masks:
                found = self._run(inputs, where)
            require_same_shapes(wanted, found, where)
            self._sums[name, kept].add(found, wanted, self._model, inputs, batch)
            yield

    def _run(self, inputs: tuple[Any, ...], where: str) -> ModelOutput:
        """Run the model, and return what of its output is compared; else what the layers in front of that return."""
        given = map_tensors(inputs, torch.clone)
        if self._judge is None:
            return comparable_output(self._model, inputs, call(self._model, given), where, self._quality)
        output, values = self._judge.run(self._model, given, counted_positions(self._model, inputs))
        if not values:
            raise ModelError(f"sensitivity: expected a model that returns a tensor to compare, got none from {where}")
        if not all(is_finite(value) for _, value in values):
            raise _not_finite(self._model, inputs, where)
        return ModelOutput(output, (), None, tuple(values))

    def curves(self) -> dict[str, tuple[MeasuredPoint, ...]]:
        """Return the points of each group, the dense model first."""
        variances = self._variance.variances()

        def point(name: str, kept: int) -> MeasuredPoint:
            return self._sums.get((name, kept), self._dense).point(kept, variances)

        return {
            name: tuple(point(name, kept) for kept in kept_counts(labels.size)) for name, labels in self._orders.items()
        }


def uniformly_labeled(batches: Iterable[InputsAndTargets], loss: Loss | None) -> Iterator[LabeledBatch]:
    """Yield the batches, all with targets or all without."""
    first: LabeledBatch | None = None
    for inputs, labels in batches:
        batch = LabeledBatch(inputs, labels)
        first = first or batch
        if (batch.labels is None) != (first.labels is None):
            raise DataError("sensitivity: expected targets with every batch or with none, got some of each")
        if batch.labels is None and loss is not None:
            raise UsageError("sensitivity: a loss needs targets: expected batches (inputs, targets), got inputs alone")
        yield batch
    if first is None:
        raise DataError("sensitivity: expected at least one batch of samples to measure on, got none")


@dataclass(frozen=True, eq=False)
class Quality:
    """The measures of outputs besides their error."""

    # whose loss and scores are measured; None: the cross entropy and top-1 of class scores (B, classes)
    task: Task | None = None
    loss: Loss | None = None  # that is measured; None for the task's

    @property
    def selects(self) -> bool:
        """True if outputs are what a model selected, so that those of another have no counterpart."""
        task = self.task
        return task is not None and not task.from_dense and (task.metric is not None or task.predictions is not None)

    def class_scores(self, output: Any, samples: int) -> Tensor | None:
        """Return class scores (N, classes) in float64 on the CPU; None if there are none."""
        if self.task is not None:
            found: Any = None if self.task.logits is None else self.task.logits(output)
        else:  # a matrix, or an object with one in `.logits`
            found = getattr(output, "logits", output)
            of_samples = isinstance(found, Tensor) and len(found.shape) == 2 and len(found) == samples
            found = found if of_samples and found.is_floating_point() else None
        return None if found is None else found.detach().cpu().double()

    def task_for(self, found: ModelOutput, targets: Any) -> Task | None:
        """Return the task by which an output is scored; None without one."""
        if targets is None or self.task is not None:
            return None if targets is None else self.task
        if found.scores is None or not isinstance(targets, Tensor) or targets.dim() != 1 or targets.is_floating_point():
            return None
        classes = found.scores.shape[1]
        if int(targets.min()) < 0 or int(targets.max()) >= classes:
            raise DataError(
                f"sensitivity: expected labels from 0 to {classes - 1}, as many as the model gives scores for"
            )
        return IMAGE_CLASSIFICATION

    def loss_of(self, task: Task | None, found: ModelOutput, targets: Any, device: torch.device) -> float | None:
        """Return the loss, mean over a batch; None without targets, or where models compute it themselves."""
        if targets is None:
            return None
        if self.loss is not None:
            return float(self.loss(found.output, to_device(targets, device)))
        if task is None or task.loss_inputs is not None or task.loss_in_train_mode:
            return None
        if self.task is None:
            assert found.scores is not None
            return float(F.cross_entropy(found.scores, targets.cpu()))
        return float(task.loss(found.output, to_device(targets, device)))


@dataclass(frozen=True, eq=False)
class ModelOutput:
    """An output of a model, and what of it is compared."""

    output: Any  # as the model returned it
    tensors: tuple[Tensor, ...]  # those with a row for each sample, (B, values) in float64
    scores: Tensor | None  # class scores (N, classes) in float64; None if there are none
    # in place of the tensors, those of `OutputComparison` with their keys
    selected: tuple[tuple[int | str, Tensor], ...] = ()


def comparable_output(
    model: nn.Module, inputs: tuple[Any, ...], output: Any, where: str, quality: Quality
) -> ModelOutput:
    """Return the parts of an output that can be compared."""
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
    if not all(map(is_finite, tensors)):
        raise _not_finite(model, inputs, where)
    return ModelOutput(output, tensors, quality.class_scores(output, samples))


def _not_finite(model: nn.Module, inputs: tuple[Any, ...], where: str) -> NonFiniteError:
    """Return the error of outputs that are NaN or Inf; raise that of the first layer with one, if it is known."""
    device = gather(inputs)[0].device
    calibrate(model, [(inputs,)], device=device, progress=False).require_finite()
    return NonFiniteError(f"sensitivity: the output of {where} is NaN or Inf, and no layer's is before it")


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


class OutputVariance:
    """The variance of each value of the dense outputs over all samples."""

    def __init__(self) -> None:
        self._sums: list[VarianceSum] = []

    def add(self, output: ModelOutput) -> None:
        """Add the dense outputs of one batch."""
        if self._sums and [each.mean.shape for each in self._sums] != [each.shape[1:] for each in output.tensors]:
            raise ModelError("sensitivity: expected outputs of one size for every batch")
        self._sums = self._sums or [VarianceSum() for _ in output.tensors]
        for total, tensor in zip(self._sums, output.tensors, strict=True):
            total.add_rows(tensor)

    def variances(self) -> list[float]:
        """Return the variance of each output tensor, mean over its values; 0 if it is the same for all samples."""
        found = [(float(one.squares.mean()) / one.count, float(one.mean.square().mean())) for one in self._sums]
        variances = [variance if variance > FLAT * level else 0.0 for variance, level in found]
        if variances and not any(variances):
            raise same_output_error(self._sums[0].count)
        return variances


def same_output_error(samples: int) -> DataError:
    """Return the error of a dense model whose outputs do not vary."""
    return DataError(
        f"sensitivity: the dense model's output is the same for all {samples} samples, so there is no "
        "variance to compare errors with; take more, and different, samples"
    )


class OutputErrors:
    """The errors of one masked model's outputs, summed over the samples, and how good they are."""

    def __init__(self, quality: Quality) -> None:
        self._quality = quality
        self._samples, self._weight, self._squares = 0, 0, list[float]()
        self._kl: float | None = 0.0
        self._loss: float | None = 0.0
        self._measured: tuple[Task, Measurement] | None = None
        self._selected, self._other = RelativeError(), set[int | str]()

    def add(
        self, found: ModelOutput, wanted: ModelOutput, model: nn.Module, inputs: tuple[Any, ...], batch: LabeledBatch
    ) -> None:
        """Add the masked model's outputs on one batch, on which the dense one returned `wanted`."""
        pairs = zip(found.tensors, wanted.tensors, strict=True)
        squares = [float((got - want).square().mean(1).sum()) for got, want in pairs]
        self._squares = [a + b for a, b in zip(self._squares or [0.0] * len(squares), squares, strict=True)]
        self._select(found, wanted)
        task, device = self._quality.task_for(found, batch.labels), gather(inputs)[0].device
        self._samples += batch.samples
        weight = batch.samples if batch.labels is None or task is None else task.weighed(batch.labels)
        self._weight += weight
        self._kl = _plus(self._kl, _divergence(found.scores, wanted.scores, inputs, batch.labels), batch.samples)
        self._loss = _plus(self._loss, self._quality.loss_of(task, found, batch.labels, device), weight)
        if task is not None:
            self._measured = self._measured or (task, Measurement(task))
            self._measured[1].add(task.scored(model, inputs, found.output), to_device(batch.labels, device))

    def _select(self, found: ModelOutput, wanted: ModelOutput) -> None:
        """Add tensors by key, without layers that are called differently under masks."""
        for key in dict.fromkeys(key for key, _ in wanted.selected):
            got, want = ([value for each, value in side.selected if each == key] for side in (found, wanted))
            if [value.shape for value in got] != [value.shape for value in want]:
                self._other.add(key)
            for one, other in zip(got, want, strict=False):
                if key not in self._other:
                    self._selected.add(key, other, one)

    def point(self, kept: int, variances: list[float]) -> MeasuredPoint:
        """Return the means over the samples; the error is the mean over output tensors that vary at all."""
        shares = [square / self._samples / v for square, v in zip(self._squares, variances, strict=True) if v]
        shares += self._selected.shares(FLAT)
        if not shares:
            raise same_output_error(self._samples)
        sums = (self._kl, self._samples), (self._loss, max(self._weight, 1))
        kl, loss = (None if value is None else value / count for value, count in sums)
        scores = {} if self._measured is None else self._measured[0].score(self._measured[1].result())
        return MeasuredPoint(kept, math.fsum(shares) / len(shares), kl, loss, scores)


def _plus(total: float | None, mean: float | None, samples: int) -> float | None:
    return None if total is None or mean is None else total + mean * samples


def _divergence(found: Tensor | None, wanted: Tensor | None, inputs: Any, labels: Any) -> float | None:
    """Return the mean of the Kullback-Leibler divergence over the rows that count; padding does not."""
    if found is None or wanted is None:
        return None
    counted = counted_rows(inputs, labels, len(found))
    if counted is not None:
        found, wanted = found[counted], wanted[counted]
    total = F.kl_div(found.log_softmax(1), wanted.log_softmax(1), reduction="sum", log_target=True)
    return float(total) / max(len(found), 1)
