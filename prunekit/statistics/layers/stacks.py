"""Calls of layers whose weights are matrices of a stack: one parameter (matrices, ..., ...), as experts have it.

Each row that such a call reads is multiplied with one of the matrices. Which one follows from where a view lies in its
stack, from the numbers by which matrices were picked, or from the offsets of a grouped product; names of modules and of
their methods do not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prunekit.channels.tracing.storages import is_plain
from prunekit.statistics.layers.linear_layers import WEIGHT_FUNCTIONS, FunctionCall, Operands
from prunekit.statistics.layers.patches import PatchGeometry

_GROUPED = frozenset({"_grouped_mm", "grouped_mm", "grouped_mm_fallback"})
"""Products of rows, ordered by their matrices, with a stack: its arguments are rows, stack and `offs`."""
_BATCHED = {
    "linear": (0, 1),
    **{name: (found.inputs, found.weight) for name, found in WEIGHT_FUNCTIONS.items() if not found.is_layer},
    "bmm": (0, 1),
    "baddbmm": (1, 2),
}
"""Positions of the two factors of other products."""
_PICKING = {"__getitem__": "", "index_select": "index"}
"""Functions that copy matrices of a stack, by their numbers, and the name of these."""
_COPYING = frozenset({"clone", "contiguous", "to", "type_as", "float", "double", "half", "bfloat16"})
"""Functions that copy a tensor as it is."""
COLUMNS = PatchGeometry((1,), (1,), (0,), (1,))
"""How the right factor of a product is read: as a convolution of size 1 reads (samples, channels, positions)."""


class StackPart(NamedTuple):
    """The matrices of a stack that a tensor holds.

    Attributes:
        name: of the parameter.
        stack: the parameter.
        numbers: of the matrices, in the shape of the tensor's axes before its last two.
        swapped: whether the two axes of each matrix are exchanged.
    """

    name: str
    stack: Tensor
    numbers: Tensor
    swapped: bool = False


class StackParts:
    """Knows which tensors of a forward pass are matrices of a stack.

    Args:
        names: of parameters, by their ids.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names, self._owner = names, object()

    def clear(self) -> None:
        """Forget the tensors of an earlier pass."""
        self._owner = object()

    def part(self, value: Any) -> StackPart | None:
        """Return which matrices a tensor holds; None if it holds none."""
        if not isinstance(value, Tensor) or value.dim() < 2:
            return None
        base = value._base
        return self._known(value) or (None if base is None else _viewed(value, base, self._known(base)))

    def follow(self, call: FunctionCall, result: Any) -> None:
        """Note that a result is a copy of matrices."""
        if not (call.name in _PICKING or call.name in _COPYING) or not call.args or not isinstance(result, Tensor):
            return
        given = self.part(call.args[0])
        if given is None or result is call.args[0]:
            return
        numbers: Tensor | None = given.numbers
        if call.name in _PICKING:
            index = call.argument(2 if call.name == "index_select" else 1, _PICKING[call.name])
            first = call.name == "__getitem__" or call.argument(1, "dim") == 0
            picked = first and given.numbers.dim() > 0 and isinstance(index, (Tensor, list))
            numbers = given.numbers[_on_cpu(index)] if picked else None
        if numbers is not None and result.shape == (*numbers.shape, *call.args[0].shape[-2:]):
            found = given._replace(numbers=numbers)
            result._prunekit_part = (self._owner, result._version, found)  # type: ignore[attr-defined]

    def _known(self, value: Tensor) -> StackPart | None:
        """Return the matrices of a whole stack, or of a copy that was followed."""
        name = self._names.get(id(value)) if value.dim() == 3 else None
        if name is not None:
            return StackPart(name, value, torch.arange(len(value)))
        owner, version, found = getattr(value, "_prunekit_part", (None, None, None))
        return found if (owner, version) == (self._owner, value._version) else None

    def operands(self, call: FunctionCall) -> Operands | None:
        """Return the arguments of a call that multiplies rows with matrices of a stack; None of other calls."""
        name = call.name.rpartition(".")[2]
        inputs, weights = (call.args[at] if len(call.args) > at else None for at in _BATCHED.get(name, (0, 1)))
        if not (name in _BATCHED or name in _GROUPED) or not isinstance(inputs, Tensor) or not is_plain(inputs):
            return None
        part = self.part(weights)
        if part is not None and inputs.dim() > 1:
            offsets = call.argument(2, "offs") if name in _GROUPED else None
            numbers = _row_numbers(part.numbers, inputs, offsets)
            transposed = part.swapped if name == "linear" else not part.swapped
            return None if numbers is None else Operands(inputs, part.stack, part.name, None, transposed, numbers)
        part = None if name == "linear" or name in _GROUPED else self.part(inputs)
        if part is not None and inputs.dim() == 3 and isinstance(weights, Tensor) and weights.dim() == 3:
            numbers = part.numbers.expand(max(len(inputs), len(weights)))[:, None].expand(-1, weights.shape[2])
            return Operands(weights, part.stack, part.name, None, part.swapped, numbers, COLUMNS)
        return None


def _on_cpu(index: Any) -> Any:
    return index.cpu() if isinstance(index, Tensor) else index


def _viewed(value: Tensor, base: Tensor, known: StackPart | None) -> StackPart | None:
    """Return the matrices that a view of known ones holds; None if it does not hold whole matrices."""
    if known is None or not base.is_contiguous() or not value.numel():
        return None
    rows, columns = base.shape[-2:]
    swapped = _lies(value, (columns, rows), (1, columns))
    if not swapped and not _lies(value, (rows, columns), (columns, 1)):
        return None
    size = rows * columns
    places = torch.tensor(value.storage_offset() - base.storage_offset())
    for length, step in zip(value.shape[:-2], value.stride()[:-2], strict=True):
        places = places[..., None] + torch.arange(length) * step
    if bool((places % size).any()):
        return None
    return known._replace(numbers=known.numbers.flatten()[places // size], swapped=known.swapped != swapped)


def _lies(value: Tensor, shape: tuple[int, int], steps: tuple[int, int]) -> bool:
    """Return whether the last two axes of a view have a shape and strides; those of an axis of length 1 are any."""
    found = zip(value.stride()[-2:], shape, steps, strict=True)
    return tuple(value.shape[-2:]) == shape and all(step == wanted for step, length, wanted in found if length > 1)


def _row_numbers(numbers: Tensor, inputs: Tensor, offsets: Any) -> Tensor | None:
    """Return the number of the matrix that each row of an output is made with, -1 for rows that none makes.

    Args:
        offsets: where the rows of each matrix end, of a product of (rows, channels) with a stack; None of others.
    """
    if offsets is None and not numbers.dim():
        return numbers.expand(inputs.shape[:-1])
    if offsets is None:
        leading = torch.broadcast_shapes(numbers.shape, inputs.shape[:-2])  # type: ignore[no-untyped-call]
        return numbers[..., None].expand(*leading, inputs.shape[-2])
    if inputs.dim() != 2 or numbers.dim() != 1 or len(offsets) != len(numbers):
        return None
    rows, ends = torch.arange(len(inputs)), offsets.cpu().to(torch.int64)
    of = torch.searchsorted(ends, rows, right=True)
    return torch.where(of < len(ends), numbers[of.clamp(max=len(ends) - 1)], -1)
