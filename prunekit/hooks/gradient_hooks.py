"""Gradient hooks on a module's inputs and results, which may be overwritten in place later.

PyTorch's full-backward hooks wrap inputs and results in views, and autograd raises if these are overwritten
("BackwardHookFunction is a view and is being modified inplace"), as by a later in-place ReLU or `out += identity`.
Hooks on the tensors themselves see the same gradients and allow it.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.hooks.hook import Owner, not_traced
from prunekit.utils.tensors import gather, map_tensors

TensorHook = Callable[[Tensor], Tensor | None]
"""Takes a gradient; returns the one to use in its place, or None."""
GradientChange = Callable[[Tensor, int], Tensor | None]
"""Takes a gradient and which tensor it belongs to (0 is the first); returns the one to use in its place, or None."""
ValueCheck = Callable[[Any], object]
"""Takes the results of a module, or its arguments, and raises if their gradients cannot be hooked."""
TracedChange = Callable[[Tensor], Tensor]
"""Takes a module's first result; returns the same values with another backward pass, made of operators alone."""


def hook_gradient(tensor: Tensor, hook: TensorHook) -> None:
    """Pass the gradient of a tensor through a hook, whether the tensor is overwritten later or not.

    PyTorch's hook stays with the values that a tensor had when it was registered, which is enough unless the tensor is
    a view: overwriting a view writes to its base, and the graph leads from there straight to the earlier base. Then
    the gradient is taken from that of the whole base.
    """
    base = tensor._base if tensor._is_view() else None
    if base is None or base.grad_fn is None:  # nobody may overwrite a leaf, or a view of one
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return
    part = _ViewHook(base, tensor, hook)
    tensor.register_hook(part.at_view)  # type: ignore[no-untyped-call]
    base.grad_fn.register_prehook(part.at_base)


class _ViewHook:
    """Hooks on a view and on its base, of which one runs. Holds no tensor with a graph: the graph holds this."""

    def __init__(self, base: Tensor, view: Tensor, hook: TensorHook) -> None:
        self._hook = hook
        self._output = base.output_nr
        self._base = base.shape, base.stride()
        self._region = view.shape, view.stride(), int(view.storage_offset() - base.storage_offset())
        self._values, self._version = view.detach(), view._version  # shares the version counter

    @property
    def _overwritten(self) -> bool:
        return self._values._version != self._version

    def at_view(self, gradient: Tensor) -> Tensor | None:
        return None if self._overwritten else self._hook(gradient)

    def at_base(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        gradient = gradients[self._output]
        if gradient is None or not self._overwritten:
            return None
        # In the layout of the values, so that the view is the same region of their gradient.
        shape, strides = self._base
        whole = torch.empty_strided(shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
        part = whole.as_strided(*self._region)
        changed = self._hook(part.clone())
        if changed is None:
            return None
        part.copy_(changed)
        return (*gradients[: self._output], whole, *gradients[self._output + 1 :])


@dataclass(frozen=True, eq=False)
class InputView:
    """A view of an input that one module reads; its gradient is what this module sends back."""

    reader: nn.Module
    view: Tensor


_VIEWS: weakref.WeakValueDictionary[int, InputView] = weakref.WeakValueDictionary()
"""The views that modules read now, by the `id` of each, so that a second owner hooks the same view."""


def view_read_by(module: nn.Module, tensor: Tensor) -> InputView:
    """Return a module's own view of a tensor, made once."""
    read = _VIEWS.get(id(tensor))
    if read is None or read.reader is not module:
        read = InputView(module, tensor.view_as(tensor))
        _VIEWS[id(read.view)] = read
    return read


class OutputGradients:
    """A forward hook that passes the gradients of a module's results through a change, while its owner is active.

    `change` is called whenever the results get gradients, and returns the change of these; `check` gets each result
    first, and raises if it won't do; under `torch.compile`, `traced` takes the place of the change.
    """

    def __init__(
        self,
        owner: Owner,
        change: Callable[[], GradientChange],
        check: ValueCheck | None = None,
        traced: TracedChange | None = None,
    ) -> None:
        self._owner, self._change, self._check, self._traced = owner, change, check, traced

    def after(self, module: nn.Module, arguments: Any, named: Any, result: Any) -> Any:
        """Register hooks on the tensors of a result; a single tensor, as nearly always, without a search for others."""
        if self._check is not None:
            self._check(result)
        if torch.compiler.is_compiling():
            if self._traced is not None:
                traced, first = self._traced, next(iter(gather(result)), None)
                return map_tensors(result, lambda tensor: traced(tensor) if tensor is first else tensor)
            not_traced(f"{type(self._owner).__name__}: gradients go through Python while the backward pass runs")
        if isinstance(result, Tensor):
            if result.grad_fn is not None:  # a leaf was not made by this module, and would keep the hook
                hook_gradient(result, tensor_hook(self._owner, self._change(), 0))
            return None
        found = [(index, tensor) for index, tensor in differentiable(result) if tensor.grad_fn is not None]
        if found:
            change = self._change()
            for index, tensor in found:
                hook_gradient(tensor, tensor_hook(self._owner, change, index))
        return None


def differentiable(value: Any) -> Iterator[tuple[int, Tensor]]:
    """Yield the tensors that get a gradient, each once, with their position among all tensors of a nested value."""
    seen: set[int] = set()
    for index, tensor in enumerate(gather(value)):
        if tensor.requires_grad and id(tensor) not in seen:
            seen.add(id(tensor))
            yield index, tensor


def tensor_hook(owner: Owner, change: GradientChange, index: int) -> TensorHook:
    """Return a hook for the tensor at a position, which does nothing once its owner has left."""
    return lambda gradient: change(gradient, index) if owner.active else None


class InputGradients:
    """A forward-pre and a forward hook that pass the gradients of a module's inputs through a change.

    The module reads a view of each input: the gradient of that view comes from this module alone, where that of the
    input itself is the sum over all its readers. For the arguments see `OutputGradients`.
    """

    def __init__(self, owner: Owner, change: Callable[[], GradientChange], check: ValueCheck | None = None) -> None:
        self._owner, self._change, self._check = owner, change, check
        self._running: list[list[InputView]] = []  # a module may call itself

    def before(self, module: nn.Module, arguments: Any, named: Any) -> Any:
        """Replace the inputs by views."""
        if self._check is not None:
            self._check((arguments, named))
        not_traced(f"{type(self._owner).__name__}: gradients go through Python while the backward pass runs")
        reads: dict[int, InputView] = {}
        found = list(differentiable((arguments, named))) if torch.is_grad_enabled() else []
        if found:
            change = self._change()
            for index, tensor in found:
                read = reads[id(tensor)] = view_read_by(module, tensor)
                hook_gradient(read.view, tensor_hook(self._owner, change, index))
        self._running.append(list(reads.values()))  # known to other owners while the module runs
        if not reads:
            return None
        return map_tensors((arguments, named), lambda t: reads[id(t)].view if id(t) in reads else t)

    def after(self, module: nn.Module, arguments: Any, named: Any, result: Any) -> None:
        """Forget the views."""
        if self._running:
            self._running.pop()
