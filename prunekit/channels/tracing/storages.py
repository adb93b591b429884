"""Storages: which tensors of a run share memory, which operator made each, and the tensors inside sparse ones."""

from collections.abc import Sequence
from typing import Any

import torch

from prunekit.utils.private_torch import dispatches, has_storage
from prunekit.utils.tensors import gather


class Storages:
    """The storages of a run. It keeps all tensors alive, so that no freed memory is mistaken for another tensor's."""

    def __init__(self) -> None:
        self._sharing: dict[int, list[torch.Tensor]] = {}
        self._makers: dict[int, Any] = {}
        self._made: Any = None
        self._alive: list[torch.Tensor] = []

    def note(self, operator: Any, target: Any, inputs: list[torch.Tensor], outs: tuple[torch.Tensor, ...]) -> None:
        """Record the tensors of an operator that ran."""
        # torch hands out a detached alias of a tensor that it creates, and nobody else has the first
        handed_out = operator.name == "aten.detach" and inputs[0] is self._made
        if target is None and not handed_out:
            sources = {memory_of(tensor): tensor for tensor in inputs}
            for out in outs:
                if (key := memory_of(out)) in sources:
                    self._sharing.setdefault(key, [sources[key]]).append(out)
            if len(outs) == 1:
                self._makers[memory_of(outs[0])] = operator
        self._made = outs[0] if outs and not inputs else None
        self._alive.extend(outs)

    def shared(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory has other views, or may have."""
        return storage_of(tensor) is None or memory_of(tensor) in self._sharing

    def sharing(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the tensors that share a tensor's memory, views of views among them; none if it has no views."""
        return self._sharing.get(memory_of(tensor), ())

    def maker(self, tensor: torch.Tensor) -> Any:
        """Return the operator that made a tensor as its only result, None if there is none."""
        return self._makers.get(memory_of(tensor))


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the memory of a tensor; None if it has none of its own.

    Sparse tensors and those of oneDNN have others inside, and within a function transform such as vmap a tensor is a
    part of another.
    """
    return tensor.untyped_storage() if has_storage(tensor) else None


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number for a tensor's memory, the same for tensors that share it, valid while it lives."""
    return int(tensor.untyped_storage()._cdata) if has_storage(tensor) else -id(tensor)


_INDICES = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the plain tensors inside a sparse, nested or oneDNN tensor, or the tensor itself."""
    if tensor.is_nested:
        return tuple(tensor.unbind())
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _INDICES:
        return *(getattr(tensor, name)() for name in _INDICES[tensor.layout]), tensor.values()
    return (tensor,) if tensor.layout == torch.strided else (tensor.to_dense(),)


def from_parts(layout: str, shape: Sequence[int], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a sparse tensor of a layout, given by name, made of what `parts_of` returned."""
    known = {str(kind).removeprefix("torch."): kind for kind in (torch.sparse_coo, *_INDICES)}
    if layout not in known:
        raise ValueError(f"expected a layout among {', '.join(known)}, got {layout!r}")
    try:
        if known[layout] == torch.sparse_coo:
            return torch.sparse_coo_tensor(parts[0], parts[1], tuple(shape), check_invariants=True)
        compressed: Any = torch.sparse_compressed_tensor  # torch's stub lacks its indices
        made: torch.Tensor = compressed(*parts, tuple(shape), layout=known[layout], check_invariants=True)
        return made
    except (RuntimeError, TypeError, IndexError) as error:
        raise ValueError(str(error)) from error


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is values in memory: not sparse, nested, oneDNN's, or a wrapper of others."""
    return tensor.layout == torch.strided and not tensor.is_nested and not dispatches(tensor)


def inner_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors inside a wrapper, which no operator reads to make it."""
    return [item for item in vars(tensor).values() if isinstance(item, torch.Tensor)] if dispatches(tensor) else []


def plain_in(value: Any) -> list[torch.Tensor]:
    """Return the plain parts of every tensor inside nested outputs, which can be compared and counted."""
    return [part for tensor in gather(value) for part in parts_of(tensor)]


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """Return a tensor's shape; an empty one for a nested tensor, whose parts have several."""
    return torch.Size() if tensor.is_nested else tensor.shape
