"""What is kept of a forward pass that stopped: its calls without their values, and the tensors that are live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prunekit.repair.lifetimes import Key


class Blank(NamedTuple):
    """A tensor of a result, as it is known without its values."""

    key: Key
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, key: Key, tensor: Tensor) -> Blank:
        """Of a tensor that was made there."""
        return cls(key, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def tensor(self) -> Tensor:
        """A tensor of this shape that takes no memory, of values that show wherever they get to."""
        return torch.full((), _poison(self.dtype), dtype=self.dtype, device=self.device).expand(self.shape)

    def layout(self) -> Tensor:
        """One that lies in memory as it did, but has none."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


@dataclass(frozen=True, eq=False)
class Kept:
    """What is kept of one batch: the results of its first calls, without values, and the tensors that are live.

    Attributes:
        calls: name and result of each, the tensors exchanged by `Blank`.
        tensors: by where they were made; they share memory as they did in the pass.
    """

    calls: list[tuple[str, Any]]
    tensors: dict[Key, Tensor]

    def copied(self, fixed: frozenset[int]) -> Kept:
        """The same in memory of its own, except for that at the addresses `fixed`."""
        storages: dict[int, torch.UntypedStorage] = {}
        return Kept(self.calls, {key: _moved(tensor, storages, fixed) for key, tensor in self.tensors.items()})


def _poison(dtype: torch.dtype) -> float:
    """NaN, or where a type has none its largest value."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _moved(tensor: Tensor, storages: dict[int, torch.UntypedStorage], fixed: frozenset[int]) -> Tensor:
    """A view like `tensor` of a copy of its memory, the same copy for all that share it."""
    storage = tensor.untyped_storage()
    if storage.data_ptr() in fixed:
        return tensor
    copy = storages.setdefault(storage.data_ptr(), storage.clone())  # type: ignore[no-untyped-call]
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())


def rebuilt(result: Any, items: list[Any]) -> Any:
    """A tuple or list of the same type."""
    return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
