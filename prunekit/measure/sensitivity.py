"""Sensitivity measured: what a model computes with one channel group after the other masked."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from prunekit.calibration.gradients import Loss
from prunekit.channels import ChannelMap
from prunekit.channels.labels import Labels
from prunekit.channels.running import plain_attention
from prunekit.context import same_draws, training_mode
from prunekit.inputs import count_of, moved, taken
from prunekit.masking import WeightMasks
from prunekit.measure.outputs import Spread, Sums, labeled_alike, observed, require_alike
from prunekit.measure.prefix import DensePrefix
from prunekit.planning import MeasuredPoint, Plan
from prunekit.planning.curves import keeping, kept_counts
from prunekit.progress import reporting, tracked
from prunekit.tasks import Pairs, Task
from prunekit.tasks.batches import Batch


def forward_passes(orders: Mapping[str, Labels]) -> int:
    """How often `measure_sensitivity` runs the model on each batch: once as it is, and once for each point."""
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
    """Runs a model with each group masked to a few numbers of kept labels, and compares its outputs with its own.

    Nothing is approximated: each point is the model under `WeightMasks`, its norms on the kept channels alone, which is
    what the compact model computes. Each batch is read once; the model runs on it as `forward_passes` says.

    Args:
        model: the dense model; its tensors and modes are afterwards what they were.
        channel_map: of that model, after a trial.
        orders: by a group's name its labels in the order in which they go.
        batches: as `prunekit.prune` takes them, with labels or without; moved to the model's device.
        loss: of what the model returned and the labels, mean over the batch; None: the cross entropy, where there are
            labels and class scores.
        task: takes batches apart that come in another form; itself or its name.
        progress: whether to show a bar on stderr; None: on a terminal and in a notebook.

    Returns:
        By a group's name its points, from all labels kept to one. With all of them the model is the dense one.

    Raises:
        DataError: there are no batches, or not all or none of them have labels.
        UsageError: a loss is given, and there are no labels.
        ModelError: no tensor of floating-point numbers, one row for each sample, is in what the model returns, or its
            shape is another under masks.
        NonFiniteError: an output is NaN or Inf; names the first layer that gives one.
    """
    measuring = _Measuring(model, channel_map, orders, loss)
    pairs = Pairs(model, batches, task, "sensitivity")
    total = operator.length_hint(pairs) * forward_passes(orders) or None
    passes = (each for batch in labeled_alike(pairs, loss) for each in measuring.passes(batch))
    with training_mode(model, False), torch.no_grad(), plain_attention(), reporting(progress, "sensitivity"):
        for _ in tracked(passes, "sensitivity", total=total, unit="pass"):
            pass
    return measuring.curves()


class _Measuring:
    """The sums of all points over the batches so far; arguments as for `measure_sensitivity`."""

    def __init__(
        self, model: nn.Module, channel_map: ChannelMap, orders: Mapping[str, Labels], loss: Loss | None
    ) -> None:
        self._model, self._orders, self._loss = model, orders, loss
        points = [(name, kept) for name, labels in orders.items() for kept in kept_counts(labels.size)[1:]]
        self._plans = {point: Plan(channel_map, keeping(channel_map, orders[point[0]], point[1])) for point in points}
        self._sums = {point: Sums() for point in points}
        self._dense, self._spread = Sums(), Spread()
        self._prefix: DensePrefix | None = None

    def passes(self, batch: Batch) -> Iterator[None]:
        """Runs the dense model and all masked ones on a batch; yields after each."""
        inputs = moved(batch.inputs, next(self._model.parameters()).device)
        prefix = self._prefix = self._prefix or self._shared(inputs)
        with same_draws(self._model):
            output = prefix.record(inputs)
        wanted = observed(self._model, inputs, output, "the dense model")
        self._spread.add(wanted)
        self._dense.add(wanted, wanted, batch, self._loss)
        yield
        for (name, kept), plan in self._plans.items():
            where = f"group {name} masked to {kept} of {self._orders[name].size} channels"
            with same_draws(self._model), WeightMasks(self._model, plan, restore=True):
                found = observed(self._model, inputs, prefix.run(name, inputs), where)
            require_alike(wanted, found, where)
            self._sums[name, kept].add(found, wanted, batch, self._loss)
            yield

    def _shared(self, inputs: tuple[Any, ...]) -> DensePrefix:
        """What the dense model and all masked ones share, tried with the fewest channels of each group."""
        last = {name: plan for (name, _), plan in self._plans.items()}
        tensors = {name: list(plan.kept_indices) for name, plan in last.items()}
        return DensePrefix(
            self._model,
            taken(inputs, slice(2)),
            tensors,
            lambda name: WeightMasks(self._model, last[name], restore=True),
            batch=count_of(inputs),
        )

    def curves(self) -> dict[str, tuple[MeasuredPoint, ...]]:
        """The points of each group, the dense model first."""
        variances = self._spread.variances()

        def point(name: str, kept: int) -> MeasuredPoint:
            return self._sums.get((name, kept), self._dense).point(kept, variances)

        return {
            name: tuple(point(name, kept) for kept in kept_counts(labels.size)) for name, labels in self._orders.items()
        }
