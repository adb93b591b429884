"""Gradients of tensors that may be overwritten, and inputs as one module reads them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Change = Callable[[Tensor], Tensor | None]


def catch(tensor: Tensor, change: Change) -> None:
    """Passes the gradient of a tensor through `change`, whether it is overwritten later or not.

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
        """The reading, if it is this module's."""
        read = None if self._read is None else self._read()
        return read if read is not None and read.reader is module else None

    def __reduce__(self) -> tuple[type[_Mark], tuple[None]]:
        return _Mark, (None,)  # a tensor takes its attributes along when it is saved or copied


_MARK = "_prunekit_read"


def read_by(module: nn.Module, tensor: Tensor) -> Read:
    """Gives a module its own view of a tensor."""
    mark: _Mark | None = getattr(tensor, _MARK, None)
    read = None if mark is None else mark.by(module)
    if read is None:
        read = Read(module, tensor.view_as(tensor))
        setattr(read.view, _MARK, _Mark(read))
    return read
