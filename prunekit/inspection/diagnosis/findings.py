"""Findings of a diagnosis, the report of all of them, the observation that checks look at, and their registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from torch import nn

from prunekit.statistics.channel_stats import ChannelStats
from prunekit.statistics.layer_stats import FloatArray, IntArray
from prunekit.utils.display import Displayed, digits, listed, plural

MAX_FAULTS = 10
"""Faults that a diagnosis prints."""
MAX_NAMES = 5
"""Names that a sentence lists."""
DATA_ORDER = -1
"""Order of faults of the data, which come before any module runs."""
Need = Literal["data", "model", "forward", "gradients", "step"]
"""What a check needs of an observation; without it the check is skipped, and the diagnosis says why."""


@dataclass(frozen=True)
class Finding:
    """One fault."""

    kind: str = field(default="", kw_only=True)  # a key of `CHECKS`; set by the check that found it
    module: str  # path of the module; `data` for the inputs and targets, empty for the model as a whole
    order: int  # place of the module in the order of execution, from 0; `DATA_ORDER` for the data
    expected: str  # what a healthy model or healthy data shows
    came: str  # what was observed instead
    advice: str  # what to do
    evidence: Mapping[str, Any] = field(default_factory=dict)  # the numbers and names behind it
    # findings that this one is likely to have caused, and that are gone once it is fixed
    consequences: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} in {self.module or 'the model'}"


@dataclass(frozen=True, repr=False)
class Diagnosis(Displayed):
    """Faults of a model and its data.

    Attributes:
        findings: root causes, in order of execution; empty where nothing is wrong.
        checked: kinds of faults that were looked for.
        skipped: kinds that could not be looked for, each with the reason.
        images: number of samples that the model ran on.
        figures: numbers that were measured, such as `loss` and `sharpness`.
        samples: what its samples are called.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> torch.nn.init.constant_(model[0].bias, -100).shape  # the fault: no channel ever passes the ReLU
        torch.Size([16])
        >>> found = pk.diagnose(model, [(x, torch.tensor([0, 1, 1, 0]))])
        >>> found
        <Diagnosis: 1 fault (4 training samples, loss ...): dead_relu in 1>
        >>> print(found.findings[0].came)
        16 of 16 channels behind 0 are 0 for all 4 inputs
    """

    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    skipped: Mapping[str, str]
    images: int
    figures: Mapping[str, float]
    samples: str = "samples"

    @property
    def healthy(self) -> bool:
        """True if nothing was found."""
        return not self.findings

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each fault: kind, module, order, what was expected, what came, and what to do."""
        names = ("kind", "module", "order", "expected", "came", "advice")
        return [{name: getattr(finding, name) for name in names} for finding in self.findings]

    @property
    def verdict(self) -> str:
        """One line: whether the model is healthy, and the numbers that were measured."""
        checks = f"healthy: {plural(len(self.checked), 'check')} found nothing"
        said = plural(len(self.findings), "fault") if self.findings else checks
        figures = "".join(f", {key} {digits(value)}" for key, value in self.figures.items())
        samples = plural(self.images, f"training {self.samples.removesuffix('s')}")
        return f"{said} ({samples}{figures})"

    def _headline(self) -> str:
        return self.verdict + (f": {listed(map(str, self.findings), MAX_NAMES)}" if self.findings else "")

    def _parts(self) -> Iterator[str]:
        yield self.verdict
        for number, finding in enumerate(self.findings[:MAX_FAULTS], 1):
            may = f"\n   may cause: {listed(map(str, finding.consequences), MAX_NAMES)}" if finding.consequences else ""
            yield (
                f"{number}. {finding}\n   expected: {finding.expected}\n   came:     {finding.came}\n"
                f"   to do:    {finding.advice}{may}"
            )
        if len(self.findings) > MAX_FAULTS:
            yield f"... {plural(len(self.findings) - MAX_FAULTS, 'more fault')}; .rows() has all"
        for reason in dict.fromkeys(self.skipped.values()):
            kinds = [kind for kind, why in self.skipped.items() if why == reason]
            yield f"not looked for, {reason}: {', '.join(kinds)}"

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON has it, with `healthy`."""
        return {"healthy": self.healthy, **asdict(self)}


Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Observation:
    """Observation of a model on a few batches."""

    model: nn.Module  # the model, unchanged
    order: Mapping[str, int]  # place of every module that ran in the order of execution, by path
    data: DataSummary  # statistics of the inputs and labels
    images: int  # number of samples that the model ran on
    failure: Failure | None  # the exception that ended the observation; None if there was none
    stats: ChannelStats  # statistics of activations in train mode
    eval_stats: ChannelStats  # statistics of activations in eval mode
    # inputs of nonlinearities, by (path, function, call)
    nonlinearities: Mapping[tuple[str, str, int], NonlinearityInputs]
    gradients: GradientNorms | None  # norms of the gradients; None if there was no loss
    losses: tuple[float, ...]  # the loss of each batch
    modes: Mapping[str, BatchNormModes]  # modes of each BatchNorm with running statistics, by path
    training: bool  # whether the model was given in train mode
    step: StepSize | None  # the first step of the optimizer; None if unknown
    sharpness: float | None  # largest eigenvalue of the loss's Hessian, or a lower bound of it; None if unknown
    trial: tuple[float, ...]  # losses of one batch in successive steps of the optimizer; empty if none were tried
    missing: Mapping[str, str]  # what checks may need and is not here, with the reason
    samples: str = "samples"  # what the samples are called

    def place(self, path: str) -> int:
        """Return the place of a module in the order of execution; one that did not run comes last."""
        return self.order.get(path, len(self.order))


@dataclass(frozen=True)
class Failure:
    """An exception that the model or the loss raised."""

    module: str  # path of the module that was running; empty for the model itself and the loss
    received: tuple[Shape, ...]  # shapes of its input tensors
    # shapes of the tensors on the line that raised, by name, if that line is in the model's own code
    operands: Mapping[str, Shape]
    error: str  # type and first line of the message
    line: str  # line of the model's code that raised
    trail: tuple[TrailStep, ...]  # the modules without children that ran last
    of_shapes: bool  # whether it raised because sizes do not fit together
    stage: str = "the forward pass"  # which pass raised


@dataclass(frozen=True)
class TrailStep:
    """A module that ran, and the shape of its output."""

    name: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.name} {self.shape}"


@dataclass(frozen=True, eq=False)
class NonlinearityInputs:
    """The inputs of a nonlinearity over all batches."""

    function: str  # `relu`, `sigmoid`, `tanh` or `hardsigmoid`
    after: str  # path of the module without children that ran last before it
    # low, high: (channels,) smallest and largest value
    low: FloatArray
    high: FloatArray
    flat: int  # number of values where the function is flat, on either side
    count: int  # number of all values

    def merge(self, other: NonlinearityInputs) -> NonlinearityInputs:
        """Return the inputs of both together."""
        low, high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        return replace(self, low=low, high=high, flat=self.flat + other.flat, count=self.count + other.count)


@dataclass(frozen=True, eq=False)
class GradientNorms:
    """Norms of the gradients of the loss, the largest over the batches."""

    outputs: Mapping[str, float]  # norm of the gradient of each module's output, by path
    model: float  # norm of the gradient of the model's output
    # norm of the gradient of each trainable parameter, by name; None if the loss depends on it in no batch
    parameters: Mapping[str, float | None]
    # path of the first module in the backward pass whose gradient was NaN or Inf; None if all are finite
    not_finite: str | None


@dataclass(frozen=True)
class BatchNormModes:
    """Train mode of a BatchNorm: as the model came, after `model.train()` and after `model.eval()`."""

    found: bool
    training: bool
    evaluating: bool


@dataclass(frozen=True, eq=False)
class DataSummary:
    """Statistics and counts of inputs, the first of each sample, and labels."""

    # mean, std: (C,) of the inputs' channels; empty if the inputs are not floating-point
    mean: FloatArray
    std: FloatArray
    not_finite: int  # number of values that are NaN or Inf
    images: int  # number of samples that were compared with each other
    total: int  # number of samples in the data set
    copies: int  # number of samples that equal an earlier one, bit for bit
    conflicting: int  # number of copies whose label differs from that of the earlier sample
    held_out: int  # number of held-out samples that were compared
    leaked: int  # number of held-out samples that are among the others
    labels: IntArray | None  # (N,) class labels, of all positions; None if labels are no classes
    classes: int | None  # number of classes that the model scores; None if unknown


@dataclass(frozen=True)
class StepSize:
    """The first step of an optimizer."""

    lr: float  # its learning rate
    momentum: float = 0.0  # of SGD
    adaptive: bool = False  # whether it moves every weight by `lr`, as Adam's does


CheckFunction = Callable[[Observation], Iterable[Finding]]


@dataclass(frozen=True)
class FaultCheck:
    """A kind of fault, and the function that looks for it in an observation."""

    kind: str
    needs: Need
    function: CheckFunction

    def run(self, observation: Observation) -> Iterator[Finding]:
        """Yield what the function finds, with the kind."""
        return (replace(finding, kind=self.kind) for finding in self.function(observation))


CHECKS: dict[str, FaultCheck] = {}
"""Checks by kind; filled as the files of checks are imported."""


def check(kind: str, needs: Need) -> Callable[[CheckFunction], CheckFunction]:
    """Register a function as the check of a kind of fault."""

    def register(function: CheckFunction) -> CheckFunction:
        if kind in CHECKS:
            raise ValueError(f"there is a check {kind!r} already")
        CHECKS[kind] = FaultCheck(kind, needs, function)
        return function

    return register
