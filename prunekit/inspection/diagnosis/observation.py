"""What was seen of a model on a few batches: all that checks look at.

A model as it was before it is looked at, and put back to that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from prunekit.statistics.channel_stats import ChannelStats
from prunekit.statistics.layer_stats import FloatArray, IntArray
from prunekit.utils.context import set_mode, training_mode

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One step on a tensor's way: a module, or a function of torch's between modules, and the shape that it gave."""

    name: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.name} {self.shape}"


@dataclass(frozen=True)
class Failure:
    """An exception of the model's, or of the loss.

    Attributes:
        module: path of the module that was running; empty for the model itself and the loss.
        received: shapes of the tensors it was given.
        operands: tensors that the line uses which raised, by name, where that line is the model's own.
        error: type and first line.
        line: the model's line that raised.
        trail: the way of the tensor up to there.
        of_shapes: whether sizes did not go together; else something else was wrong.
        stage: where it happened.
    """

    module: str
    received: tuple[Shape, ...]
    operands: Mapping[str, Shape]
    error: str
    line: str
    trail: tuple[Step, ...]
    of_shapes: bool
    stage: str = "the forward pass"


@dataclass(frozen=True, eq=False)
class Units:
    """What a nonlinearity was given, over all batches.

    Attributes:
        function: `relu`, `sigmoid`, `tanh` or `hardsigmoid`.
        after: path of the module without children that ran last before it.
        low, high: (channels,) smallest and largest value.
        flat: how many values lie where the function is flat on either side.
        count: how many values there were.
    """

    function: str
    after: str
    low: FloatArray
    high: FloatArray
    flat: int
    count: int

    def merge(self, other: Units) -> Units:
        """Return both together."""
        low, high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        return Units(self.function, self.after, low, high, self.flat + other.flat, self.count + other.count)


@dataclass(frozen=True, eq=False)
class Gradients:
    """Norms of the loss's gradient, the largest over the batches.

    Attributes:
        outputs: of modules' outputs, by path.
        model: of what the model returned.
        parameters: of trainable parameters, by name; None: the loss does not depend on it in any batch.
        not_finite: the first gradient on the way back that was NaN or Inf, as the path of a module; None: none.
    """

    outputs: Mapping[str, float]
    model: float
    parameters: Mapping[str, float | None]
    not_finite: str | None


@dataclass(frozen=True)
class Modes:
    """Whether a BatchNorm is in train mode: as the model came, after `model.train()` and after `model.eval()`."""

    found: bool
    training: bool
    evaluating: bool


@dataclass(frozen=True, eq=False)
class DataSeen:
    """Images and labels.

    Attributes:
        mean, std: (C,) of the images' channels; empty where the inputs are not floating-point.
        not_finite: how many of their values are NaN or Inf.
        images: how many were looked at, for copies.
        total: how many the data set has.
        copies: how many are equal, bit for bit, to one before.
        conflicting: how many of those have another label than that one.
        held_out: how many held-out images were looked at.
        leaked: how many of these are among the images.
        labels: (N,) class labels, of all positions; None where they are no class labels.
        classes: how many the model scores; None where that is not known.
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
    """How the optimizer steps.

    Attributes:
        lr: learning rate of the first step.
        momentum: of SGD.
        adaptive: whether the first step moves every weight by `lr`, as Adam's does.
    """

    lr: float
    momentum: float = 0.0
    adaptive: bool = False


@dataclass(frozen=True, eq=False)
class Observation:
    """A model on a few batches.

    Attributes:
        model: as it is afterwards, which is as it was.
        order: place of each module that ran in order of execution, by path.
        data: its images and labels.
        images: how many the model saw.
        failure: what ended the observation early.
        stats: activations in train mode.
        evaluated: activations in eval mode.
        units: nonlinearities by (path, function, call).
        gradients: of the loss; None where there was none.
        loss: of each batch.
        modes: of each BatchNorm with running statistics, by path.
        training: whether the model itself came in train mode.
        step: the optimizer's.
        sharpness: largest eigenvalue of the loss's Hessian, or a bound below it.
        trial: the loss of one batch in successive steps, where the sharpness is beyond what the step size takes; else
            empty.
        missing: what is not there, by what a check may need, with the reason.
    """

    model: nn.Module
    order: Mapping[str, int]
    data: DataSeen
    images: int
    failure: Failure | None
    stats: ChannelStats
    evaluated: ChannelStats
    units: Mapping[tuple[str, str, int], Units]
    gradients: Gradients | None
    loss: tuple[float, ...]
    modes: Mapping[str, Modes]
    training: bool
    step: StepSize | None
    sharpness: float | None
    trial: tuple[float, ...]
    missing: Mapping[str, str]

    def place(self, path: str) -> int:
        """Return the place of a module in order of execution; one that did not run comes last."""
        return self.order.get(path, len(self.order))


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Parameters and buffers are afterwards what they were: running statistics move in train mode, and a model's own
    forward may put other tensors in the place of its buffers."""
    owners = [(module, dict(module._buffers.items())) for module in model.modules()]
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        for module, buffers in owners:
            for name, buffer in buffers.items():
                module._buffers[name] = buffer
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def batchnorm_modes(model: nn.Module) -> dict[str, Modes]:
    """Return how every BatchNorm with running statistics follows the mode of the model; modes are afterwards what they
    were.

    `model.train()` and `model.eval()` are called, because a model's own may do something else.
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
    return dict(zip(norms, map(Modes, found, training, evaluating), strict=True))
