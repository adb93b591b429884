"""The in-place guard: gradients of a module's inputs and results, whatever is written to in place.

A full-backward hook of PyTorch's wraps inputs and results in views that autograd then refuses to let anybody
overwrite ("BackwardHookFunction is a view and is being modified inplace"), as a later in-place ReLU or
`out += identity` does. Hooks on the tensors themselves see the same gradients and refuse nothing.

Gradients of tensors that may be overwritten, and inputs as one module reads them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.hooks.hook import Active, not_traced
from prunekit.utils.tensors import map_tensors, tensors_in

Change = Callable[[Tensor], Tensor | None]


def catch(tensor: Tensor, change: Change) -> None:
    """Pass the gradient of a tensor through `change`, whether it is overwritten later or not.

    A hook stays with the values that a tensor had when it was registered, and that is all there is to do, unless the
    tensor is a view: whoever overwrites a view writes to its base, and the graph leads from there straight to what
    the base was before. There the gradient is caught then, all of it.
    """
    base = tensor._base if tensor._is_view() else None
    if base is None or base.grad_fn is None:  # nobody may overwrite a leaf, or a view of one
        tensor.register_hook(change)  # type: ignore[no-untyped-call]
        return
    part = _Part(base, tensor, change)
    tensor.register_hook(part.at_view)  # type: ignore[no-untyped-call]
    base.grad_fn.register_prehook(part.at_base)


class _Part:
    """A view, and what it is a part of. Holds no tensor with a graph: the graph holds this."""

    def __init__(self, base: Tensor, view: Tensor, change: Change) -> None:
        self._change = change
        self._output = base.output_nr
        self._base = base.shape, base.stride()
        self._place = view.shape, view.stride(), int(view.storage_offset() - base.storage_offset())
        self._values, self._version = view.detach(), view._version  # shares the version counter

    @property
    def _overwritten(self) -> bool:
        return self._values._version != self._version

    def at_view(self, gradient: Tensor) -> Tensor | None:
        return None if self._overwritten else self._change(gradient)

    def at_base(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        gradient = gradients[self._output]
        if gradient is None or not self._overwritten:
            return None
        # In the layout of the values: what is a part of them is the same part of their gradient.
        shape, strides = self._base
        whole = torch.empty_strided(shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
        part = whole.as_strided(*self._place)
        changed = self._change(part.clone())
        if changed is None:
            return None
        part.copy_(changed)
        return (*gradients[: self._output], whole, *gradients[self._output + 1 :])


@dataclass(frozen=True)
class Read:
    """One module's reading of one input: a view of its own, whose gradient is what this reader sends back."""

    reader: nn.Module
    view: Tensor


class _Mark:
    """On such a view, what it is: a second owner hooks the same view, behind the first. Does not keep it alive."""

    def __init__(self, read: Read | None) -> None:
        self._read = None if read is None else weakref.ref(read)

    def by(self, module: nn.Module) -> Read | None:
        """Return the reading, if it is this module's."""
        read = None if self._read is None else self._read()
        return read if read is not None and read.reader is module else None

    def __reduce__(self) -> tuple[type[_Mark], tuple[None]]:
        return _Mark, (None,)  # a tensor takes its attributes along when it is saved or copied


_MARK = "_prunekit_read"


def read_by(module: nn.Module, tensor: Tensor) -> Read:
    """Give a module its own view of a tensor."""
    mark: _Mark | None = getattr(tensor, _MARK, None)
    read = None if mark is None else mark.by(module)
    if read is None:
        read = Read(module, tensor.view_as(tensor))
        setattr(read.view, _MARK, _Mark(read))
    return read


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
    """Yield tensors that get a gradient, each once, with their position among all tensors of a nested value."""
    seen: set[int] = set()
    for index, tensor in enumerate(tensors_in(value)):
        if tensor.requires_grad and id(tensor) not in seen:
            seen.add(id(tensor))
            yield index, tensor


def at(owner: Active, change: GradientChange, index: int) -> Change:
    """Return a tensor hook for the tensor at a position, which does nothing any more once its owner has left."""
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
        """Exchange the inputs."""
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
        """Let the views go."""
        if self._running:
            self._running.pop()
