"""Tasks by name: how batches come apart, the loss, and the scores over all batches of a measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import default_collate

from prunekit.distributed.process_group import gather_values, size
from prunekit.errors import DataError, UsageError, reraise_shortage
from prunekit.known_names import TASKS as _TASKS
from prunekit.utils.context import training_mode
from prunekit.utils.inputs import described, sample_count, to_device
from prunekit.utils.registry import Registry
from prunekit.utils.tensors import accumulation_dtype, gather
from prunekit.utils.user_code import call_factory

Loss = Callable[[Any, Any], Tensor]
"""From the model's output and the targets to one number, the mean over the batch."""
Counts = Callable[[Any, Any], Tensor]
"""From the model's output and the targets to (K,) numbers that add up over batches."""


class Metric(Protocol):
    """A measure of a task whose scores do not add up over batches, such as a mean average precision.

    torchmetrics' metrics are such objects.
    """

    def update(self, output: Any, targets: Any, /) -> Any:
        """Add a batch: what the model returned, or the task's `predictions`, and the targets."""

    def compute(self) -> Any:
        """Return what the task's scores are read from, of all batches so far."""


class HeadComparison(Protocol):
    """A comparison of a student with its teacher, by what parts of them compute in a training step.

    It is a context: inside, it notes what the student computes in passes with gradients.
    """

    def __enter__(self) -> Any:
        """Begin to note."""

    def __exit__(self, *error: Any) -> Any:
        """Stop, and leave both models as they were."""

    def teach(self) -> Any:
        """Return what the teacher computes in place of the student in its last pass; called without gradients."""

    def error(self, taught: Any, /) -> Tensor:
        """Return one number, the distance of the student from what was `taught`: with gradients, and 0 at best."""


@dataclass(frozen=True)
class Score:
    """A figure of merit, from counts of all samples or from a metric, so that it is exact for batches of any sizes.

    Attributes:
        name: its key in tables and `metrics.json`.
        label: its name in reports, as within a sentence: `mean IoU`.
        of: counts (K,) float64, or what the task's metric computes -> percent, 0 to 100, or what `unit` says; more is
            better unless `lower_is_better`.
        interval: the same -> ends of the 95 % interval, in percent; None for figures that have none. Of counts, the
            score is then a proportion, whose hits are the first count.
        chance: score of a model that always answers the most frequent class: the same -> percent; None if unknown.
        unit: of its values, such as `dB`; empty if they are plain numbers.
        interval_by: what reports call the method of the interval.
        lower_is_better: whether less is better, as for a perplexity: best epochs, losses by int8, comparisons and
            fronts of reports go by it.
        note: a sentence on what it means, for logs and reports; empty if its label says it.
    """

    name: str
    label: str
    of: Callable[[Any], float]
    interval: Callable[[Any], tuple[float, float]] | None = None
    chance: Callable[[Any], float] | None = None
    unit: str = "%"
    interval_by: str = "Wilson"
    lower_is_better: bool = False
    note: str = ""


def pair(batch: Any) -> tuple[Any, Any]:
    """Return a batch that is (inputs, targets) already."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise DataError("expected (inputs, targets)")
    return batch[0], batch[1]


@dataclass(frozen=True)
class BatchUnpacker:
    """The part of a task that makes batches and takes them apart: worker processes get it instead of the task."""

    task: str  # its name, for messages
    unpack: Callable[[Any], tuple[Any, Any]]  # the task's
    collate: Callable[[list[Any]], Any] = default_collate  # the task's

    def __call__(self, batch: Any, where: str = "a batch") -> tuple[Any, Any]:
        """Return a batch's inputs and targets."""
        try:
            inputs, targets = self.unpack(batch)
            samples = sample_count(inputs)
            if not gather(inputs) or samples != len(targets):
                raise DataError(f"expected inputs with tensors, and as many targets, got {samples} and {len(targets)}")
        except Exception as error:  # a task of the user's own may raise anything
            reraise_shortage(error)
            reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
            raise DataError(
                f"{where}: task {self.task!r} cannot unpack {described(batch)}: {reason}; return such samples, or give "
                "a task of your own whose `unpack` knows these"
            ) from error
        return inputs, targets


@dataclass(frozen=True)
class Task:
    """The task that a model is trained for. Data sets know their task (`Splits.task`).

    Attributes:
        name: of the task.
        loss: of training and validation, whose gradients criteria use: output and targets -> the mean over the batch,
            one number.
        counts: output and targets -> (K,) numbers that are summed over batches and processes; None: a metric measures.
        scores: computed from those sums, or from what the metric computes; the first one chooses the best epoch.
        unpack: a collated batch of the data set -> inputs and targets. Inputs are a tensor, a tuple of them, or a
            mapping by the names of the arguments of `forward`; targets have a length, that of the batch. It may raise
            any error about a batch of another form; the message is completed with a description of the batch.
        logits: output -> class scores (N, classes), one row for each thing that is classified, which distillation
            compares; None: the task has none, and cannot be distilled, unless it has `heads`.
        heads: student and teacher -> a `HeadComparison`, which distillation uses in place of `logits`, for models that
            return their losses in training. The teacher is then in the mode of `mode_for_loss`. It raises before the
            training where the two don't fit. None: the task has none.
        smoothed: label smoothing, 0..1 -> the loss with it; None: the task has none.
        ignored: label of what does not count, among those of `logits`.
        samples: what its samples are called in messages.
        collate: samples of a data set -> a batch, as a DataLoader's `collate_fn`.
        metric: makes a `Metric`, a fresh one for each measurement; None: the scores come from `counts`.
        loss_inputs: model, inputs and targets -> what the model is called with where the loss is wanted, an example as
            of `prunekit.prune`, because models of this task compute their loss themselves or take the targets as
            inputs; None: the inputs.
        predictions: model, inputs and output -> what `counts` or the metric is given; None: the output.
        loss_in_train_mode: whether models give what the loss needs in train mode alone. Where a loss or its gradients
            are wanted of a model in eval mode, it is put into train mode then, all but its norms and dropout; and
            validation measures no loss.
        class_count: model -> the number of classes that it tells apart, as it says itself; None if it does not say. It
            must be that of the data. None: the number of `logits` tells.
        weight: targets -> the number of things that the batch's loss is the mean over, such as tokens, by which means
            over batches weigh it; None: of its samples.
        binding: task and dense model -> the task, completed by what only that model knows, such as its outputs, which
            are the targets; None: it is complete. See `bound`.
        from_dense: whether targets are the dense model's own outputs or answers, so that the gradient of the loss there
            is zero or says nothing.
        texts: what the data source `text` makes of texts: `windows` of tokens, `masked` windows with labels, or `lines`
            of a text each; None: nothing.
        labeled_images: whether samples are images with the label of one class each. Only these are resized, augmented
            and mixed by the settings of the data, and random pixels are an input like them.
    """

    name: str
    loss: Loss
    counts: Counts | None
    scores: tuple[Score, ...]
    unpack: Callable[[Any], tuple[Any, Any]] = pair
    logits: Callable[[Any], Tensor] | None = None
    heads: Callable[[nn.Module, nn.Module], HeadComparison] | None = None
    smoothed: Callable[[float], Loss] | None = None
    ignored: int = -100
    samples: str = "samples"
    collate: Callable[[list[Any]], Any] = default_collate
    metric: Callable[[], Metric] | None = None
    loss_inputs: Callable[[nn.Module, tuple[Any, ...], Any], tuple[Any, ...]] | None = None
    predictions: Callable[[nn.Module, tuple[Any, ...], Any], Any] | None = None
    loss_in_train_mode: bool = False
    class_count: Callable[[nn.Module], int | None] | None = None
    weight: Callable[[Any], int] | None = None
    binding: Callable[[Task, nn.Module], Task] | None = None
    from_dense: bool = False
    texts: Literal["windows", "masked", "lines"] | None = None
    labeled_images: bool = False

    def __post_init__(self) -> None:
        if (self.counts is None) == (self.metric is None):
            raise UsageError(
                f"task {self.name!r}: expected either counts, which add up over batches, or a metric, got "
                + ("neither" if self.counts is None else "both")
            )

    @property
    def main(self) -> Score:
        """The score that chooses the best epoch."""
        return self.scores[0]

    @property
    def unpacking(self) -> BatchUnpacker:
        """`unpack` and `collate` alone, with checks."""
        return BatchUnpacker(self.name, self.unpack, self.collate)

    @property
    def scores_of_loss_outputs(self) -> bool:
        """True if one forward pass gives the loss and the scores."""
        return self.counts is not None and self.loss_inputs is None and self.predictions is None

    def score(self, found: Any) -> dict[str, float]:
        """Return every score of summed counts (K,), or of what the metric computed, by name, in percent."""
        return {score.name: float(score.of(self._wide(found))) for score in self.scores}

    def reached(self, found: Any) -> float:
        """Return the main score of summed counts, or of what the metric computed, in percent."""
        return float(self.main.of(self._wide(found)))

    def _wide(self, found: Any) -> Any:
        return torch.as_tensor(found, dtype=torch.float64) if self.metric is None else found

    def bound(self, dense: nn.Module) -> Task:
        """Return the task completed by what only the dense model knows; itself if it needs nothing.

        Args:
            dense: the model before it is pruned. It is kept as it is, not copied: where it is pruned in place, give a
                copy.

        Example:
            >>> import torch
            >>> from prunekit.tasks.task import get_task
            >>> dense = torch.nn.Linear(4, 3)
            >>> task = get_task("embedding").bound(dense)
            >>> inputs, samples = task.unpack(torch.randn(8, 4))
            >>> bool(task.loss(dense(inputs), samples).abs() < 1e-5)
            True
        """
        return self if self.binding is None else replace(self.binding(self, dense), binding=None)

    def weighed(self, targets: Any) -> int:
        """Return how much the loss of a batch weighs in means over batches, see `weight`."""
        return len(targets) if self.weight is None else self.weight(targets)

    def example_for_loss(self, model: nn.Module, example: tuple[Any, ...], targets: Any) -> tuple[Any, ...]:
        """Return what the model is called with where the loss is wanted, see `loss_inputs`."""
        return example if self.loss_inputs is None else self.loss_inputs(model, example, targets)

    def scored(self, model: nn.Module, example: tuple[Any, ...], output: Any) -> Any:
        """Return what `counts` or the metric is given of an output, see `predictions`."""
        return output if self.predictions is None else self.predictions(model, example, output)

    @contextmanager
    def mode_for_loss(self, model: nn.Module) -> Iterator[None]:
        """Put a model into the mode in which its loss is computed without changing its buffers or drawing dropout."""
        with training_mode(model, self.loss_in_train_mode):
            for module in model.modules():
                if self.loss_in_train_mode and isinstance(module, (_NormBase, _DropoutNd)):
                    module.training = False
            yield


def described_task(task: Task) -> dict[str, Any]:
    """Return the names of a task, its samples and scores, their units and the method of the interval, for reports."""
    scores = [
        {"name": score.name, "label": score.label, "unit": score.unit}
        | ({"lower_is_better": True} if score.lower_is_better else {})
        | ({"note": score.note} if score.note else {})
        for score in task.scores
    ]
    by = None if task.main.interval is None else task.main.interval_by
    return {"name": task.name, "samples": task.samples, "scores": scores, "interval": by}


def with_smoothing(loss: Callable[..., Tensor], share: float) -> Loss:
    """Return a loss with its label smoothing, for `Task.smoothed`: unlike a lambda it can be pickled, as tasks are."""
    return partial(loss, label_smoothing=share)


def training_loss(task: Task, label_smoothing: float) -> Loss:
    """Return the loss of training."""
    if not label_smoothing:
        return task.loss
    if task.smoothed is None:
        raise UsageError(f"label_smoothing: task {task.name!r} has none, got {label_smoothing}; leave it out")
    return task.smoothed(label_smoothing)


TASKS: Registry[Task] = _TASKS
"""Tasks, by the names that recipes and functions take."""
Made = TypeVar("Made", bound=Task | Callable[[], Task])


def register_task(name: str, *, data: str = "", measures: str = "") -> Callable[[Made], Made]:
    """Register a task under a name that Python, recipes and commands take from then on.

    Args:
        name: as in a recipe's `task`; also that of the `Task`.
        data: what a batch holds, in a few words, for `prunekit list tasks`.
        measures: its loss and scores, likewise.

    Returns:
        A decorator of a function that takes nothing and returns the `Task`; a `Task` itself may be given too.

    Raises:
        ValueError: the name is taken, or the task has another.
        UsageError: the function returns no task.

    Example:
        >>> import torch
        >>> import prunekit as pk
        >>> from prunekit.tasks.task import Score, Task
        >>> def counts(output, target):  # a task's scores are computed from them; they add up over batches
        ...     return torch.stack([(output - target).square().sum(), target.square().sum()])
        >>> @pk.register_task("regression", data="inputs with targets (B, K)", measures="mean squared error")
        ... def regression():
        ...     explained = Score("explained", "share explained", lambda sums: 100 * float(1 - sums[0] / sums[1]))
        ...     return Task("regression", torch.nn.functional.mse_loss, counts, (explained,))
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> batches = [(torch.randn(8, 4), torch.randn(8, 2))]
        >>> gradients = pk.collect_gradients(model, batches, device=torch.device("cpu"), task="regression")
        >>> small = pk.prune(model, batches[0][0], channels=0.5, criterion="taylor", gradients=gradients).model
        >>> small[0].out_features
        4
    """

    def register(made: Made) -> Made:
        task = _task(name, made if isinstance(made, Task) else made())
        if task.name != name:
            raise ValueError(f"task {name!r}: expected a Task of this name, got {task.name!r}")
        TASKS.add(name, task, None if isinstance(made, Task) else made)
        return made

    return register


def get_task(task: Task | str) -> Task:
    """Return a task, given as it is, by its name, or as `file.py:object`."""
    if isinstance(task, Task):
        return task
    if isinstance(task, str):
        return TASKS.get(task)
    known = ", ".join(TASKS.names)
    raise UsageError(f"task: expected one of {known}, or a prunekit.tasks.task.Task, got {type(task).__name__}")


def accept(reference: str, found: Any) -> Task:
    """Return the task that `file.py:object` names, or that the function of that name returns."""
    return _task(reference, call_factory(found, reference, UsageError) if callable(found) else found)


def _task(name: str, found: Any) -> Task:
    if not isinstance(found, Task):
        text = "expected a prunekit.tasks.task.Task, or a function that returns one"
        raise UsageError(f"task {name}: {text}, got {type(found).__name__}")
    return found


def added(counts: list[float], more: list[float]) -> list[float]:
    """Return sums of counts, (K,) each; either may be empty, as before the first batch."""
    return [a + b for a, b in zip(counts, more, strict=True)] if counts and more else counts or more


class DeviceSum:
    """A sum of vectors, kept where they are until it is taken: reading a number waits for the device.

    It is in float64, or float32 on MPS. On the CPU nothing waits, and each vector is read at once.
    """

    def __init__(self) -> None:
        self._read: list[float] = []
        self._sum: torch.Tensor | None = None

    def add(self, values: torch.Tensor, weight: float = 1) -> None:
        """Add a vector (K,) times its weight."""
        wide = values.detach().to(accumulation_dtype(values.device)) * weight
        if values.device.type == "cpu":
            self._read = added(self._read, wide.tolist())
        else:
            self._sum = wide if self._sum is None else self._sum + wide

    def take(self) -> list[float]:
        """Return the sum, (K,), or nothing if nothing was added, and begin again."""
        found = added(self._read, [] if self._sum is None else self._sum.tolist())
        self._read, self._sum = [], None
        return found


class Measurement:
    """The samples of a task that were measured so far.

    A metric of several processes is computed in each of them from the outputs of all: any metric can be, and what
    detectors return is small. Where they measure `together`, each process measures its share, see `of_all`.
    """

    def __init__(self, task: Task, *, together: bool = False) -> None:
        self.samples, self._counted, self._device, self._task = 0, list[float](), DeviceSum(), task
        self._metric = None if task.metric is None else task.metric()
        self._kept: list[tuple[Any, Any]] | None = [] if together and size() > 1 else None

    @property
    def counts(self) -> list[float]:
        """The sums of the task's counts, (K,); empty where a metric measures."""
        self._counted = added(self._counted, self._device.take())
        return self._counted

    def add(self, output: Any, targets: Any) -> None:
        """Add a batch: what `Task.scored` returned, and the targets."""
        self.samples += len(targets)
        if self._metric is None:
            assert self._task.counts is not None
            self._device.add(self._task.counts(output, targets))
        elif self._kept is None:
            self._metric.update(output, targets)
        else:
            self._kept.append(to_device((output, targets), torch.device("cpu")))

    def of_all(self) -> Measurement:
        """Return the measurement of all processes, some of which may have had no batch; all call this together."""
        if self._metric is not None and self._kept is None:
            return self
        found = Measurement(self._task)
        for samples, counts, kept in gather_values((self.samples, self.counts, self._kept)):
            found.samples += samples
            found._counted = added(found._counted, counts)
            for output, targets in kept or ():
                assert found._metric is not None
                found._metric.update(output, targets)
        return found

    def result(self) -> Any:
        """Return what the scores are read from: counts (K,) float64, or what the metric computes."""
        if self._metric is None:
            return torch.tensor(self.counts, dtype=torch.float64)
        return self._metric.compute()
