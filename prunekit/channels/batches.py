"""Which axes grow with the batch: their sizes are never fixed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import nn

from prunekit.channels.tracing import Operator, Trace, trace_model
from prunekit.errors import ModelError
from prunekit.nested import map_tensors, tensors_in


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
            larger = trace_model(self._model, [_twice(example) for example in self._examples])
        except (ModelError, RuntimeError):
            return {}
        return dict(_compared(self._trace, larger))


def _compared(trace: Trace, larger: Trace) -> Iterator[tuple[Operator, frozenset[int]]]:
    for run, other in zip(trace.runs, larger.runs, strict=False):
        if [operator.name for operator in run.operators] == [operator.name for operator in other.operators]:
            for one, two in zip(run.operators, other.operators, strict=True):
                for small, large in zip(one.call[2][:1], two.call[2][:1], strict=True):
                    yield one, frozenset(a for a, sizes in enumerate(zip(small, large, strict=False)) if len(set(sizes)) > 1)


def _twice(example: tuple[Any, ...]) -> Any:
    batch = next((tensor.shape[0] for tensor in tensors_in(example) if tensor.dim()), 1)

    def twice(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor]) if tensor.dim() and tensor.shape[0] == batch else tensor

    return map_tensors(example, twice)
