"""The in-place guard: gradients of a module's inputs and results, whatever is written to in place.

A full-backward hook of PyTorch's wraps inputs and results in views that autograd then refuses to let anybody
overwrite ("BackwardHookFunction is a view and is being modified inplace"), as a later in-place ReLU or
`out += identity` does. Hooks on the tensors themselves see the same gradients and refuse nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.hooks.checks import not_traced
from prunekit.hooks.owned import Active
from prunekit.hooks.reading import Change, Read, catch, read_by
from prunekit.nested import map_tensors, tensors_in

GradientChange = Callable[[Tensor, int], Tensor | None]
"""Takes a gradient and which tensor it belongs to (0 is the first); returns the one to use in its place, or None."""


Check = Callable[[Any], object]
"""Looks at what a module returned, or was given, and raises if that is not what its gradients were meant of."""


Traced = Callable[[Tensor], Tensor]
"""Takes a module's first result, and returns the same values with another way back; of operators alone."""


class OutputGradients:
    """A forward hook that catches the gradients of a module's results, while its owner is active.

    Args:
        change: called in each call of the module whose results get gradients, returns what these go through.
    """

    def __init__(
        self,
        owner: Active,
        change: Callable[[], GradientChange],
        check: Check | None = None,
        traced: Traced | None = None,
    ) -> None:
        self._owner, self._change, self._check, self._traced = owner, change, check, traced

    def after(self, module: nn.Module, arguments: Any, named: Any, result: Any) -> Any:
        """Hooks the tensors of a result; a single one, as nearly always, without looking for others."""
        if self._check is not None:
            self._check(result)
        if torch.compiler.is_compiling():
            if self._traced is not None:
                return _first_replaced(result, self._traced)
            not_traced(f"{type(self._owner).__name__}: gradients go through Python while the backward pass runs")
        if isinstance(result, Tensor):
            if result.grad_fn is not None:  # a leaf is not this module's result, and would keep the hook
                catch(result, at(self._owner, self._change(), 0))
            return None
        found = [(index, tensor) for index, tensor in differentiable(result) if tensor.grad_fn is not None]
        if found:
            change = self._change()
            for index, tensor in found:
                catch(tensor, at(self._owner, change, index))
        return None


def _first_replaced(result: Any, traced: Traced) -> Any:
    if isinstance(result, Tensor):
        return traced(result)
    first = next(iter(tensors_in(result)), None)
    return map_tensors(result, lambda tensor: traced(tensor) if tensor is first else tensor)


def differentiable(value: Any) -> Iterator[tuple[int, Tensor]]:
    """Tensors that get a gradient, each once, with their position among all tensors of a nested value."""
    seen: set[int] = set()
    for index, tensor in enumerate(tensors_in(value)):
        if tensor.requires_grad and id(tensor) not in seen:
            seen.add(id(tensor))
            yield index, tensor


def at(owner: Active, change: GradientChange, index: int) -> Change:
    """A tensor hook for the tensor at a position, which does nothing any more once its owner has left."""
    return lambda gradient: change(gradient, index) if owner.active else None


class InputGradients:
    """A forward-pre and a forward hook that catch the gradients of a module's inputs.

    The module reads a view of each input: the gradient of that view is what this module sends back, where the input
    itself would give the sum over all its readers. See `OutputGradients`.
    """

    def __init__(self, owner: Active, change: Callable[[], GradientChange], check: Check | None = None) -> None:
        self._owner, self._change, self._check = owner, change, check
        self._running: list[list[Read]] = []  # a module may call itself

    def before(self, module: nn.Module, arguments: Any, named: Any) -> Any:
        """Exchanges the inputs."""
        if self._check is not None:
            self._check((arguments, named))
        not_traced(f"{type(self._owner).__name__}: gradients go through Python while the backward pass runs")
        reads: dict[int, Read] = {}
        found = list(differentiable((arguments, named))) if torch.is_grad_enabled() else []
        if found:
            change = self._change()
            for index, tensor in found:
                read = reads[id(tensor)] = read_by(module, tensor)
                catch(read.view, at(self._owner, change, index))
        self._running.append(list(reads.values()))  # known to other owners while the module runs
        if not reads:
            return None
        return map_tensors((arguments, named), lambda t: reads[id(t)].view if id(t) in reads else t)

    def after(self, module: nn.Module, arguments: Any, named: Any, result: Any) -> None:
        """Lets the views go."""
        if self._running:
            self._running.pop()
