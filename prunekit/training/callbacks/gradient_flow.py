"""Gradient flow: percentiles of the absolute gradients of each layer over a training run."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.training.callbacks.callback import Callback, TrainingRun
from prunekit.utils.display import Displayed, Table, plural, scientific

SHARES = (0.1, 0.5, 0.9)
MOST = 8191
"""Entries of a gradient that are read at most; a prime, so that they fall on all positions of a kernel."""


@dataclass(frozen=True)
class FlowRow:
    """The gradient of one layer's weight in one step."""

    step: int  # counted from 1
    epoch: float  # epochs made with this step
    layer: str  # path of the weight's module; of a module with several weights, with the weight's name
    # p10, median, p90: percentiles of the absolute values that are not exactly zero, NaN where all are; of a weight
    # with more than `MOST` entries, those of `MOST` evenly spread ones
    p10: float
    median: float
    p90: float
    zeros: float  # share of exact zeros, such as what masks prune, 0..1


class GradientFlow(Displayed, Callback):
    """A record of percentiles of the absolute gradients of every layer, taken a number of times over a run.

    Recorded are weights with two or more axes, before `clamp_weight_grad` and the optimizer act, over all processes
    together and without float16's loss scale. Steps that are skipped are not recorded.

    Args:
        records: how often, evenly over the run; a short run has a record of every step.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> from prunekit.training.callbacks.callback import TrainingRun
        >>> optimizer, flow = torch.optim.SGD(model.parameters(), lr=0.1), pk.GradientFlow()
        >>> with flow.active(TrainingRun(model, optimizer, torch.device("cpu"), steps=3, epochs=1)):
        ...     for step in (1, 2, 3):
        ...         optimizer.zero_grad()
        ...         model(x).square().mean().backward()
        ...         flow.before_step(step)
        ...         optimizer.step()
        ...         flow.after_step(step, made=True)
        >>> flow
        <GradientFlow: gradients of 2 layers, 3 records at steps 1 to 3>
    """

    def __init__(self, records: int = 100) -> None:
        self._records = records
        self._steps: list[int] = []
        self._found: list[Tensor] = []  # (layers, 4) each
        self._waiting: Tensor | None = None
        self._weights: dict[str, nn.Parameter] = {}
        self._per_epoch = 1

    @contextmanager
    def active(self, run: TrainingRun) -> Iterator[None]:
        """Find the weights, and choose the steps that are recorded."""
        self._run = run
        self._weights = flow_weights(run.model)
        self._per_epoch = max(1, run.steps)
        self._every = max(1, math.ceil(run.steps * run.epochs / self._records))
        yield

    def before_step(self, step: int) -> None:
        """Measure the gradients when it is due."""
        due = (step - 1) % self._every == 0
        self._waiting = gradient_percentiles(list(self._weights.values()), self._run.scale()) if due else None

    def after_step(self, step: int, made: bool) -> None:
        """Record what was measured, unless the step was skipped."""
        if made and self._waiting is not None:
            self._steps.append(step)
            self._found.append(self._waiting)
        self._waiting = None

    def records(self) -> tuple[FlowRow, ...]:
        """Return all records, step by step and layer by layer in the order of the model."""
        return tuple(
            FlowRow(step, step / self._per_epoch, layer, *values)
            for step, record in zip(self._steps, self._found, strict=True)
            for layer, values in zip(self._weights, record.tolist(), strict=True)
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return the records as plain values; see `FlowRow`."""
        return [asdict(row) for row in self.records()]

    def _headline(self) -> str:
        steps = f" at steps {self._steps[0]} to {self._steps[-1]}" if self._steps else ""
        return f"gradients of {plural(len(self._weights), 'layer')}, {plural(len(self._steps), 'record')}{steps}"

    def _parts(self) -> Iterator[str | Table]:
        yield f"Gradient flow: {self._headline()}"
        records, layers = self.records(), len(self._weights)
        cells = [
            (first.layer, *(scientific(value) for row in (first, last) for value in (row.p10, row.median, row.p90)))
            for first, last in zip(records[:layers], records[-layers:], strict=True)
        ]
        if cells:
            headings = ("layer", "first 10 %", "median", "90 %", "last 10 %", "median", "90 %")
            yield Table(headings, cells, title="Percentiles of absolute gradients, first and last record")

    def state_dict(self) -> dict[str, Any]:
        """Return the records."""
        return {"steps": list(self._steps), "records": [record.clone() for record in self._found]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from records."""
        self._steps, self._found = list(state["steps"]), [record.cpu() for record in state["records"]]


def flow_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable weights with two or more axes by layer; all trainable parameters if there are none."""
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    wide = {name: parameter for name, parameter in trainable.items() if parameter.ndim > 1}
    return {name.removesuffix(".weight"): parameter for name, parameter in (wide or trainable).items()}


@torch.no_grad()
def gradient_percentiles(weights: Sequence[nn.Parameter], scale: float = 1.0) -> Tensor:
    """Return 10th, 50th and 90th percentile of each absolute gradient, and its share of zeros, (weights, 4) float64."""
    return torch.stack([_percentiles(weight, scale) for weight in weights]).double().cpu()


def _percentiles(weight: nn.Parameter, scale: float) -> Tensor:
    """Return the percentiles and the share of zeros of one weight's gradient, (4,), on its device."""
    flat = (weight.new_zeros(1) if weight.grad is None else weight.grad.detach()).flatten()
    if len(flat) > MOST:
        flat = flat[torch.arange(MOST, device=flat.device) * len(flat) // MOST]
    ordered = (flat.abs().float() / scale).sort().values
    zeros = int((ordered == 0).sum())
    left = len(ordered) - zeros
    places = [zeros + round(share * (left - 1)) for share in SHARES]
    found = ordered[places] if left else ordered.new_full((len(SHARES),), math.nan)
    return torch.cat((found, ordered.new_tensor([zeros / len(ordered)])))
