"""Checks on the data (copies, labels that are no class, normalization), the recorder of batches, and what fails.

What fails: numbers that are not finite, sizes that do not fit together, and other exceptions.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from prunekit.errors import DataError
from prunekit.inspection.diagnosis.findings import (
    DATA_ORDER,
    MAX_NAMES,
    DataSummary,
    Failure,
    Finding,
    Observation,
    check,
)
from prunekit.inspection.diagnosis.recorders import shapes_text
from prunekit.statistics.layer_stats import FloatArray
from prunekit.tasks.batches import InputsAndTargets, LabeledBatch
from prunekit.tasks.task import Task
from prunekit.utils import display as numbers
from prunekit.utils.display import listed
from prunekit.utils.inputs import described
from prunekit.utils.tensors import is_finite, map_tensors

COPIES = 0.01
"""Share of copies from which on a data set is a fault: exact copies in well-known sets are far fewer
(Barz & Denzler 2020, "Do we train on test data?")."""
OFF_CENTER = 1.5
"""Absolute mean beyond which inputs are not normalized to mean 0 and standard deviation 1 (LeCun et al. 1998,
"Efficient BackProp", section 4.3). Images that are normalized by the statistics of ImageNet are off a little."""
NARROW, WIDE = 0.3, 3.0
"""Standard deviations below and above which inputs are not normalized; pixels from 0 to 1 have about 0.25, those from
0 to 255 about 60."""
IGNORED = -100
"""The label that torch's cross entropy ignores."""


@check("duplicated_data", "data")
def duplicated_data(observation: Observation) -> Iterator[Finding]:
    """Yield how many samples equal each other, or held-out ones, bit for bit."""
    data, samples = observation.data, observation.samples
    share = _share(data.copies, data.images, data.images, data.total)
    leaked = _share(data.leaked, data.held_out, data.images, data.total)
    if data.copies > 1 and share >= COPIES:
        conflicting = f", {data.conflicting} of them with another label" if data.conflicting else ""
        about = f", about {numbers.share(share, 0)} of the data set" if data.images < data.total else ""
        evidence = {"copies": data.copies, "images": data.images, "conflicting": data.conflicting}
        yield Finding(
            "data",
            DATA_ORDER,
            f"fewer than {numbers.share(COPIES, 0)} of the {samples} equal to another",
            f"{data.copies} of {data.images} are copies of one before{conflicting}{about}",
            f"remove the copies, and look at how the {samples} are listed and shuffled",
            {**evidence, "share_of_the_set": share},
        )
    if data.leaked > 1 and leaked >= COPIES:
        yield Finding(
            "data",
            DATA_ORDER,
            f"held-out {samples} that are not trained on",
            f"{data.leaked} of {data.held_out} held-out {samples} are among {data.images} training {samples}",
            "split the data again, without copies in two splits: scores on these say nothing",
            {"leaked": data.leaked, "held_out": data.held_out, "share_of_the_set": leaked},
        )


def _share(found: int, of: int, images: int, total: int) -> float:
    """Return the share in the whole set by a random part of it: a copy is found if its original is there as well."""
    return min(1.0, found / max(1, of) * (total / max(1, images)))


@check("labels_out_of_range", "data")
def labels_out_of_range(observation: Observation) -> Iterator[Finding]:
    """Yield class labels that the model has no score for."""
    labels, classes = observation.data.labels, observation.data.classes
    if labels is None or classes is None:
        return
    wrong = ((labels < 0) | (labels >= classes)) & (labels != IGNORED)
    if wrong.any():
        values = np.unique(labels[wrong])
        yield Finding(
            "data",
            DATA_ORDER,
            f"labels from 0 to {classes - 1}, one for each of the model's {classes} scores",
            f"{wrong.sum()} of {len(labels)} are others: {', '.join(map(str, values[:8]))}",
            "number the classes from 0, or give the model as many outputs as there are classes",
            {"labels": values[:100].tolist(), "count": int(wrong.sum()), "classes": classes},
        )


@check("input_normalization", "data")
def input_normalization(observation: Observation) -> Iterator[Finding]:
    """Yield the means and standard deviations of inputs that are not normalized, neither here nor by the model."""
    mean, std = observation.data.mean, observation.data.std
    if _is_off(mean, std) and _is_off(*_read_first(observation)):
        means, deviations = (listed([f"{value:.3g}" for value in values], 4) for values in (mean, std))
        scale = "scale pixels to 0..1, then subtract" if observation.samples == "images" else "subtract"
        yield Finding(
            "data",
            DATA_ORDER,
            f"channels with a mean within {OFF_CENTER:g} of 0 and a standard deviation from {NARROW:g} to {WIDE:g}",
            f"means {means}, standard deviations {deviations}",
            f"{scale} the mean of this data and divide by its standard deviation, once",
            {"mean": mean.tolist(), "std": std.tolist()},
        )


def _is_off(mean: FloatArray, std: FloatArray) -> bool:
    return bool(((np.abs(mean) > OFF_CENTER) | (std < NARROW) | (std > WIDE)).any())


def _read_first(observation: Observation) -> tuple[FloatArray, FloatArray]:
    """Return means and deviations of what the first layer reads, as a model may normalize; else of the inputs."""
    modules, channels = dict(observation.model.named_modules()), len(observation.data.mean)
    read = {
        observation.place(key.module): layer
        for key, layer in observation.stats.items()
        if key.side == "input"
        and key.call == 0
        and layer.channels == channels
        and getattr(getattr(modules.get(key.module), "weight", None), "ndim", 0) > 1
    }
    if not read:
        return observation.data.mean, observation.data.std
    first = read[min(read)]
    return first.mean, np.sqrt(first.variance)


@dataclass(frozen=True)
class Pool:
    """The data set that batches are from."""

    more: Any = ()  # further batches of the set, as `diagnose` takes them; only looked at for copies and labels
    held_out: Any = ()  # held-out batches, none of whose samples should be in the set
    total: int | None = None  # number of samples in the data set; None: all of them are given


def batches_of(pairs: Iterable[InputsAndTargets], where: str, task: Task | None = None) -> list[LabeledBatch]:
    """Return batches of inputs and targets."""
    found: list[LabeledBatch] = []
    for number, (inputs, labels) in enumerate(pairs, 1):
        if labels is not None and task is None and not isinstance(labels, Tensor):
            raise DataError(
                f"{where}, batch {number}: expected labels in one tensor, got {described(labels)}; say what they are: "
                "task=..."
            )
        batch = LabeledBatch(map_tensors(inputs, torch.Tensor.detach), labels)
        alone = isinstance(labels, Tensor) and not labels.ndim
        if labels is not None and (alone or len(batch.images) != len(labels)):
            raise DataError(
                f"{where}, batch {number}: expected as many labels as inputs, got {described(labels)} for "
                f"{tuple(batch.images.shape)}"
            )
        found.append(batch)
    if len({batch.labels is None for batch in found}) > 1:
        raise DataError(f"{where}: expected targets with every batch or with none, got some of each")
    return found


@dataclass
class DataRecorder:
    """Statistics of batches, added one by one."""

    pool: Pool
    classes: int | None = None
    _labels: list[Tensor] = field(default_factory=list)
    _first: dict[bytes, int | None] = field(default_factory=dict)
    _images: int = 0
    _copies: int = 0
    _conflicting: int = 0
    _not_finite: int = 0
    _sums: list[np.ndarray[Any, Any]] = field(default_factory=list)

    def add(self, batch: LabeledBatch) -> None:
        """Add the inputs and labels of a batch."""
        if batch.images.is_floating_point():
            self._measure(batch.images)
        labels = batch.labels
        if class_labels(labels):
            self._labels.append(labels.cpu().flatten())
        for index, key in enumerate(_digests(batch.images)):
            label = int(labels[index]) if class_labels(labels) and labels.ndim == 1 else None
            self._images += 1
            if key in self._first:
                self._copies += 1
                self._conflicting += self._first[key] != label
            else:
                self._first[key] = label

    def _measure(self, images: Tensor) -> None:
        """Add count, sum and sum of squares of every channel; (B, features) count as one channel."""
        values = images.double().cpu()
        channels = values.transpose(0, 1).flatten(1) if values.ndim > 2 else values.reshape(1, -1)
        finite = channels.isfinite()
        self._not_finite += int((~finite).sum())
        channels = channels.where(finite, 0.0)
        self._sums.append(torch.stack([finite.sum(1).double(), channels.sum(1), channels.square().sum(1)]).numpy())

    def result(self) -> DataSummary:
        """Return statistics and counts, with further and held-out batches."""
        measured = self._statistics()
        for batch in batches_of(self.pool.more, "more"):
            self.add(batch)
        held_out = [key for batch in batches_of(self.pool.held_out, "held_out") for key in _digests(batch.images)]
        return DataSummary(
            *measured,
            not_finite=self._not_finite,
            images=self._images,
            total=max(self.pool.total or 0, self._images),
            copies=self._copies,
            conflicting=self._conflicting,
            held_out=len(held_out),
            leaked=sum(key in self._first for key in held_out),
            labels=torch.cat(self._labels).numpy() if self._labels else None,
            classes=self.classes,
        )

    def _statistics(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        if not self._sums or len({sums.shape for sums in self._sums}) > 1:
            return np.zeros(0), np.zeros(0)
        count, total, squares = np.sum(self._sums, axis=0)
        mean = total / np.maximum(count, 1)
        return mean, np.sqrt(np.maximum(squares / np.maximum(count, 1) - mean**2, 0))


def _digests(images: Tensor) -> Sequence[bytes]:
    """Return a digest of each image: two are equal if the images are equal bit for bit."""
    rows = images.cpu().contiguous()
    return [
        hashlib.blake2b(row.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=16).digest() for row in rows
    ]


def class_labels(labels: Any) -> TypeGuard[Tensor]:
    """Return whether labels are class indices: integers, (B,) or (B, H, W)."""
    return isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dtype != torch.bool


def in_range(labels: Tensor, classes: int) -> Tensor:
    """Return labels with those that are no class put into the first one, as a loss would raise; `IGNORED` is kept."""
    fits = ((labels >= 0) & (labels < classes)) | (labels == IGNORED)
    return labels.where(fits, 0)


@check("non_finite", "data")
def non_finite(observation: Observation) -> Iterator[Finding]:
    """Yield the first NaN or Inf: in the inputs, a parameter or buffer, an activation, the loss, or a gradient."""
    places = (_images, _tensors, _activation, _loss, _gradient)
    yield from islice((found for place in places if (found := place(observation)) is not None), 1)


def _images(observation: Observation) -> Finding | None:
    count, samples = observation.data.not_finite, observation.samples
    came, advice = f"{count} values of the {samples} are NaN or Inf", f"look at how {samples} are read and normalized"
    return _finding("data", DATA_ORDER, came, advice, {"count": count}) if count else None


def _tensors(observation: Observation) -> Finding | None:
    named: Iterable[tuple[str, Tensor]] = [*observation.model.named_parameters(), *observation.model.named_buffers()]
    wrong = [name for name, tensor in named if not is_finite(tensor)]
    if not wrong:
        return None
    first = min(wrong, key=lambda name: observation.place(name.rpartition(".")[0]))
    path = first.rpartition(".")[0]
    came = f"{listed([first, *(name for name in wrong if name != first)], MAX_NAMES)} hold NaN or Inf"
    advice = "load weights that are finite; where training made these, lower the learning rate"
    return _finding(path, observation.place(path), came, advice, {"tensors": wrong})


def _activation(observation: Observation) -> Finding | None:
    stats, mode = (observation.stats, "train") if observation.stats.non_finite else (observation.eval_stats, "eval")
    if not stats.non_finite:
        return None
    first, after = stats.non_finite[0], len(stats.non_finite) - 1
    path, side = first.key.module, first.key.side
    came = f"in {mode} mode {first}; {after} activations after it have some too"
    where = "what is computed between this module and the one before" if side == "input" else "this module"
    advice = f"look into {where}: a division by zero, the logarithm or root of what may be 0, an overflow"
    figures = {"count": first.count, "batch": first.batch, "channel": first.channel, "after": after, "mode": mode}
    return _finding(path, observation.place(path), came, advice, figures)


def _loss(observation: Observation) -> Finding | None:
    wrong = [number for number, value in enumerate(observation.losses, 1) if value - value != 0]
    if not wrong:
        return None
    came = f"the loss of batch {wrong[0]} is {observation.losses[wrong[0] - 1]}, and every module's output is finite"
    advice = "look at the loss, and at what the model computes behind its last module"
    return _finding("", len(observation.order), came, advice, {"batch": wrong[0]})


def _gradient(observation: Observation) -> Finding | None:
    gradients = observation.gradients
    if gradients is None:
        return None
    wrong = [name for name, norm in gradients.parameters.items() if norm is not None and norm - norm != 0]
    if gradients.not_finite is None and not wrong:
        return None
    path = gradients.not_finite if gradients.not_finite is not None else wrong[-1].rpartition(".")[0]
    came = f"the gradient of its output is NaN or Inf, the first on the way back; {len(wrong)} parameters get such ones"
    advice = "look behind this module for an operation that has no gradient: the root of 0, a division by a norm of 0"
    return _finding(path, observation.place(path), came, advice, {"parameters": wrong})


def _finding(path: str, order: int, came: str, advice: str, evidence: dict[str, object]) -> Finding:
    return Finding(path, order, "finite numbers", came, advice, evidence)


@check("shape_mismatch", "data")
def shape_mismatch(observation: Observation) -> Iterator[Finding]:
    """Yield the module, or operator between modules, whose inputs have sizes that it does not take."""
    failure = observation.failure
    if failure is not None and failure.of_shapes:
        advice = "change the size where the tensor is computed, or the size that the module is built for"
        yield _failed(observation, failure, _wanted(observation.model, failure), advice)


@check("run_error", "data")
def run_error(observation: Observation) -> Iterator[Finding]:
    """Yield the exception that the model, the loss or the backward pass raised for another reason."""
    failure = observation.failure
    if failure is not None and not failure.of_shapes:
        expected = f"{failure.stage} to finish"
        yield _failed(observation, failure, expected, "see the line and the error")


def _failed(observation: Observation, failure: Failure, expected: str, advice: str) -> Finding:
    at = f"{failure.line}: " if failure.line else ""
    given = [f"{name} {shape}" for name, shape in failure.operands.items()]
    received = ", ".join(given) if given and not failure.module else shapes_text(failure.received)
    came = f"{received}, in {failure.stage}; {at}{failure.error}"
    if failure.trail:
        came += f"; before it ran {' -> '.join(map(str, failure.trail))}"
    evidence = {
        "received": [list(shape) for shape in failure.received],
        "operands": {name: list(shape) for name, shape in failure.operands.items()},
        "trail": [str(step) for step in failure.trail],
        "line": failure.line,
        "error": failure.error,
    }
    return Finding(failure.module, observation.place(failure.module), expected, came, advice, evidence)


_SIZES = {_ConvNd: "in_channels", _BatchNorm: "num_features", nn.GroupNorm: "num_channels"}
"""Modules that read channels on axis 1, and the attribute with their number."""


def _wanted(model: nn.Module, failure: Failure) -> str:
    """Return which inputs the module that raised takes."""
    module = model.get_submodule(failure.module)
    kind = type(module).__name__
    for known, name in _SIZES.items():
        if isinstance(module, known):
            return f"an input (N, {getattr(module, name)}, ...) of {kind}"
    if isinstance(module, nn.Linear):
        return f"an input (..., {module.in_features}) of {kind}"
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return f"an input (..., {', '.join(map(str, module.normalized_shape))}) of {kind}"
    if failure.stage == "the loss":
        return "outputs and labels that the loss takes: for a classifier scores (N, classes) and labels (N,)"
    return f"sizes that fit together in {kind}"
