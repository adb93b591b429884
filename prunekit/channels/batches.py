"""Which axes grow with the batch: their sizes are never fixed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import nn

from prunekit.channels.operators import Operator, Run
from prunekit.channels.tracing import Trace, trace_model
from prunekit.errors import ModelError
from prunekit.inputs import batch_of
from prunekit.nested import map_tensors


class BatchAxes:
    """Compares the trace of a model with one for twice the batch, which is only made once somebody asks."""

    def __init__(self, model: nn.Module, trace: Trace, examples: list[tuple[Any, ...]]) -> None:
        self._model, self._trace, self._examples = model, trace, examples

    def of(self, operator: Operator) -> frozenset[int]:
        """Axes of an operator's first result; the first one where a larger batch does not run."""
        return self._known.get(operator, frozenset([0]))

    @cached_property
    def _known(self) -> dict[Operator, frozenset[int]]:
        try:
            both_modes = not all(run.repeats for run in self._trace.runs if run.training)
            larger = trace_model(self._model, [twice(one) for one in self._examples], both_modes=both_modes)
        except (ModelError, RuntimeError):
            return {}
        return dict(_compared(self._trace, larger))


def _compared(trace: Trace, larger: Trace) -> Iterator[tuple[Operator, frozenset[int]]]:
    """By place and how often it ran before: a larger batch needs other copies in between."""
    others = {(run.example, run.training): run for run in larger.runs}
    for run in trace.runs:
        other = others.get((run.example, run.training))
        if other is None or run.repeats:  # nobody asks for operators that came before in the same way
            continue
        sizes = {key: operator.call[2][0] for key, operator in _by_place(other)}
        for key, operator in _by_place(run):
            axes = enumerate(zip(operator.call[2][0], sizes.get(key, ()), strict=False))
            if key in sizes:
                yield operator, frozenset(axis for axis, (size, more) in axes if size != more)


def _by_place(run: Run) -> Iterator[tuple[Any, Operator]]:
    counts: Counter[Any] = Counter()
    for operator in run.operators:
        if operator.site is not None:
            place = (operator.module, operator.owner, operator.site)
            yield (*place, counts[place]), operator
            counts[place] += 1


def twice(example: tuple[Any, ...]) -> Any:
    """An example input with its batch twice."""
    batch = batch_of(example)

    def larger(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor]) if tensor.dim() and tensor.shape[0] == batch else tensor

    return map_tensors(example, larger)
