"""An observation of a model on a few batches, which all checks look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from prunekit.statistics.channel_stats import ChannelStats
from prunekit.statistics.layer_stats import FloatArray, IntArray

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Observation:
    """Observation of a model on a few batches.

    Attributes:
        model: the model, unchanged.
        order: place of every module that ran in the order of execution, by path.
        data: statistics of the inputs and labels.
        images: number of samples that the model ran on.
        failure: the exception that ended the observation; None if there was none.
        stats: statistics of activations in train mode.
        eval_stats: statistics of activations in eval mode.
        nonlinearities: inputs of nonlinearities, by (path, function, call).
        gradients: norms of the gradients; None if there was no loss.
        losses: the loss of each batch.
        modes: modes of each BatchNorm with running statistics, by path.
        training: whether the model was given in train mode.
        step: the first step of the optimizer; None if unknown.
        sharpness: largest eigenvalue of the loss's Hessian, or a lower bound of it; None if unknown.
        trial: losses of one batch in successive steps of the optimizer; empty if none were tried.
        missing: what checks may need and is not here, with the reason.
        samples: what the samples are called.
    """

    model: nn.Module
    order: Mapping[str, int]
    data: DataSummary
    images: int
    failure: Failure | None
    stats: ChannelStats
    eval_stats: ChannelStats
    nonlinearities: Mapping[tuple[str, str, int], NonlinearityInputs]
    gradients: GradientNorms | None
    losses: tuple[float, ...]
    modes: Mapping[str, BatchNormModes]
    training: bool
    step: StepSize | None
    sharpness: float | None
    trial: tuple[float, ...]
    missing: Mapping[str, str]
    samples: str = "samples"

    def place(self, path: str) -> int:
        """Return the place of a module in the order of execution; one that did not run comes last."""
        return self.order.get(path, len(self.order))


@dataclass(frozen=True)
class Failure:
    """An exception that the model or the loss raised.

    Attributes:
        module: path of the module that was running; empty for the model itself and the loss.
        received: shapes of its input tensors.
        operands: shapes of the tensors on the line that raised, by name, if that line is in the model's own code.
        error: type and first line of the message.
        line: line of the model's code that raised.
        trail: how the tensor was computed, up to there.
        of_shapes: whether it raised because sizes do not fit together.
        stage: which pass raised.
    """

    module: str
    received: tuple[Shape, ...]
    operands: Mapping[str, Shape]
    error: str
    line: str
    trail: tuple[TrailStep, ...]
    of_shapes: bool
    stage: str = "the forward pass"


@dataclass(frozen=True)
class TrailStep:
    """One step in how a tensor was computed: a module, or a torch function between modules, and its output shape."""

    name: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.name} {self.shape}"


@dataclass(frozen=True, eq=False)
class NonlinearityInputs:
    """The inputs of a nonlinearity over all batches.

    Attributes:
        function: `relu`, `sigmoid`, `tanh` or `hardsigmoid`.
        after: path of the module without children that ran last before it.
        low, high: (channels,) smallest and largest value.
        flat: number of values where the function is flat, on either side.
        count: number of all values.
    """

    function: str
    after: str
    low: FloatArray
    high: FloatArray
    flat: int
    count: int

    def merge(self, other: NonlinearityInputs) -> NonlinearityInputs:
        """Return the inputs of both together."""
        low, high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        return replace(self, low=low, high=high, flat=self.flat + other.flat, count=self.count + other.count)


@dataclass(frozen=True, eq=False)
class GradientNorms:
    """Norms of the gradients of the loss, the largest over the batches.

    Attributes:
        outputs: those of the outputs of modules, by path.
        model: that of the model's output.
        parameters: those of trainable parameters, by name; None if the loss depends on the parameter in no batch.
        not_finite: path of the first module in the backward pass whose gradient was NaN or Inf; None if all are finite.
    """

    outputs: Mapping[str, float]
    model: float
    parameters: Mapping[str, float | None]
    not_finite: str | None


@dataclass(frozen=True)
class BatchNormModes:
    """Train mode of a BatchNorm: as the model came, after `model.train()` and after `model.eval()`."""

    found: bool
    training: bool
    evaluating: bool


@dataclass(frozen=True, eq=False)
class DataSummary:
    """Statistics and counts of inputs, the first of each sample, and labels.

    Attributes:
        mean, std: (C,) of the inputs' channels; empty if the inputs are not floating-point.
        not_finite: number of values that are NaN or Inf.
        images: number of samples that were compared with each other.
        total: number of samples in the data set.
        copies: number of samples that equal an earlier one, bit for bit.
        conflicting: number of copies whose label differs from that of the earlier sample.
        held_out: number of held-out samples that were compared.
        leaked: number of held-out samples that are among the others.
        labels: (N,) class labels, of all positions; None if labels are no classes.
        classes: number of classes that the model scores; None if unknown.
    """

    mean: FloatArray
    std: FloatArray
    not_finite: int
    images: int
    total: int
    copies: int
    conflicting: int
    held_out: int
    leaked: int
    labels: IntArray | None
    classes: int | None


@dataclass(frozen=True)
class StepSize:
    """The first step of an optimizer.

    Attributes:
        lr: its learning rate.
        momentum: of SGD.
        adaptive: whether it moves every weight by `lr`, as Adam's does.
    """

    lr: float
    momentum: float = 0.0
    adaptive: bool = False
