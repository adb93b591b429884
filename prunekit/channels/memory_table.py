"""The memory of a forward pass by kept widths: at each operator, a sum of products of widths.

    operator        1   2   3   4   5          memory at operator 3 =  given + a + b
    allocation a    ├───────┤                  a = 4 bytes * batch * 56 * 56 * (kept channels of conv1)
    allocation b        ├───────────┤          given: parameters, buffers and inputs, always there
    allocation c                ├───┤

A forward pass is recorded, in which nothing is computed: which memory its operators allocate, and until which operator
each allocation lives. The labels on the tensor that an allocation was made for are those of the same operator in the
trace, so its bytes are a constant times widths. The peak is the maximum over operators of such sums.

1. An allocation is the memory of one storage: views add none, and it lives until the last tensor on it is freed.
2. Whatever the widths are, operators run in the same order and free at the same places; only sizes change.
3. Moments that another moment exceeds in every product are never the peak, and are left out (`undominated`).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from prunekit import known_names
from prunekit.channels.labels.label_flow import Field, apart
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.execution import ModuleStack, without_fast_path
from prunekit.channels.tracing.operator_mode import OperatorMode, run_operator
from prunekit.channels.tracing.storages import memory_of, parts_of, shape_of, storage_of
from prunekit.channels.tracing.substitutes import substitute_all
from prunekit.channels.tracing.traced_run import TracedOperator
from prunekit.channels.tracing.tracer import Trace
from prunekit.errors import ModelError, raised_as
from prunekit.hooks.model_copy import named_tensors, with_tensors
from prunekit.utils.context import paused_garbage_collection, seeded, training_mode
from prunekit.utils.inputs import call, repeated_samples, sample_count
from prunekit.utils.private_torch import FakeTensorMode
from prunekit.utils.tensors import gather, map_tensors

TensorId = tuple[int, int]
"""A tensor: the number of the operator that returned it, and the number of the result."""
Preparation = Callable[[nn.Module], object]
"""Changes a copy of the model before it runs."""
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, full) for name, full in known_names.FLOAT_DTYPES.items()}


@dataclass(eq=False, slots=True)
class Allocation:
    """Allocated memory, alive while operators `made[0]` to `last` run; `shape` is that of its first tensor."""

    made: TensorId
    shape: tuple[int, ...]
    bytes: int
    last: int


@dataclass(eq=False, slots=True)
class RecordedOperator:
    """One call of an operator that returned tensors."""

    name: str
    module: str
    inputs: tuple[TensorId | None, ...]  # None: of the model itself, or its input
    shapes: tuple[tuple[int, ...], ...]


@dataclass(eq=False)
class Recording:
    """The operators and allocations of one forward pass."""

    given_bytes: int = 0  # bytes of parameters, buffers and inputs
    inputs_bytes: int = 0  # bytes of the inputs
    operators: list[RecordedOperator] = field(default_factory=list)  # every operator that returned tensors
    allocations: list[Allocation] = field(default_factory=list)  # all other memory, in the order of allocation

    @property
    def alive(self) -> NDArray[np.bool_]:
        """Which allocations are alive while each operator runs: bool (operators, allocations)."""
        operator = np.arange(len(self.operators))[:, None]
        spans = np.array(
            [(allocation.made[0], allocation.last) for allocation in self.allocations], dtype=np.int64
        ).reshape(-1, 2)
        made, last = spans.T
        return (made <= operator) & (operator <= last)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are alive at once."""
        sizes = np.array([allocation.bytes for allocation in self.allocations], dtype=np.int64)
        return self.given_bytes + int((self.alive @ sizes).max(initial=0))


class _MemoryRecorder(OperatorMode):
    """A mode that records every operator that runs inside it, and when memory is freed."""

    def __init__(self, recording: Recording, stack: ModuleStack, given: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.recording, self.stack = recording, stack
        self._given = {memory_of(tensor) for tensor in given}
        self._alive: dict[int, tuple[Allocation, Any]] = {}

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator and record it."""
        out = run_operator(func, args, kwargs)
        self._returned(str(func._schema.name).replace("::", "."), gather((args, kwargs)), gather(out))
        return out

    def opaque(self, name: str, tensors: tuple[torch.Tensor, ...], out: Any) -> None:
        """Record a higher-order operator as a whole."""
        self._returned(name, list(tensors), gather(out))

    def _returned(self, name: str, inputs: list[torch.Tensor], outs: list[torch.Tensor]) -> None:
        if outs:
            operators = self.recording.operators
            known = tuple(getattr(tensor, "_prunekit_place", None) for tensor in inputs)
            shapes = tuple(tuple(shape_of(tensor)) for tensor in outs)
            operators.append(RecordedOperator(name, self.stack.current, known, shapes))
            for index, tensor in enumerate(outs):
                place = tensor._prunekit_place = (len(operators) - 1, index)  # type: ignore[attr-defined]
                for part in parts_of(tensor):
                    self._note(part, place)

    def _note(self, tensor: torch.Tensor, place: TensorId) -> None:
        storage, key = storage_of(tensor), memory_of(tensor)
        if storage is None or key in self._given or key in self._alive:
            return
        allocation = Allocation(place, tuple(tensor.shape), storage.nbytes(), -1)
        self.recording.allocations.append(allocation)
        self._alive[key] = allocation, weakref.ref(storage, partial(self._free, key))

    def _free(self, key: int, _: Any = None) -> None:
        self._alive.pop(key)[0].last = len(self.recording.operators) - 1

    def finish(self) -> None:
        """Count memory that is still alive as alive until the end."""
        for key in list(self._alive):
            self._free(key)


def record_memory(
    model: nn.Module,
    example: tuple[Any, ...],
    batch: int = 1,
    dtype: str = "fp32",
    *,
    prepare: Preparation = lambda model: None,
) -> Recording:
    """Record a forward pass in eval mode without gradients, on `batch` samples made of those of an example.

    It computes nothing, unless the model needs values. The operators are those of eager on the CPU, with attention's
    fused kernels. Memory that a kernel takes besides its results (workspaces, reordered weights) is not seen. The fast
    path of `nn.MultiheadAttention`, one operator with much inside, is counted as the operators that it replaces.
    """
    record = partial(_recorded, model, example, batch, DTYPES[dtype], prepare)
    with seeded(0), torch.no_grad(), without_fast_path(), paused_garbage_collection():
        try:
            return record(fake=True)
        except Exception:  # the model looks at values
            pass
        failed = f"{type(model).__name__}: the memory of a forward pass cannot be counted: it does not run on a batch "
        with raised_as(ModelError, f"{failed}of {batch} in {dtype} on the CPU: "):
            return record(fake=False)


def _recorded(
    model: nn.Module, example: tuple[Any, ...], batch: int, dtype: torch.dtype, prepare: Preparation, *, fake: bool
) -> Recording:
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        if not fake:
            there = torch.ones_like(tensor, device="cpu") if tensor.is_meta else tensor.detach()
            return there.to("cpu", kind, copy=True)
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")

    clone = with_tensors(model, {name: stand_in(tensor) for name, tensor in named_tensors(model)})
    prepare(clone)
    inputs = map_tensors(repeated_samples(example, batch), stand_in)
    own, taken = [tensor for _, tensor in named_tensors(clone)], gather(inputs)
    recording = Recording(_bytes([*own, *taken]), _bytes(taken))
    stack = ModuleStack(clone)
    recorder = _MemoryRecorder(recording, stack, [*own, *taken])
    with training_mode(clone, False), stack, mode if fake else torch.no_grad(), recorder:
        output = call(clone, inputs)
    recorder.finish()
    del output
    return recording


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct memory of some tensors."""
    storages = [storage_of(part) for tensor in tensors for part in parts_of(tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages if storage is not None}.values())


Shape = Sequence[int]
Fields = tuple[Field, ...]


def fields_of_recording(trace: Trace, recording: Recording, batch: int) -> dict[TensorId, Fields]:
    """Return the fields of every recorded tensor, in the numbering of the trace; none if they are not known.

    The trace ran attention without fused kernels, and another batch may need other copies in between. The result of a
    fused kernel has the labels of the operators that it replaces.
    """
    first = sample_count(trace.example, 1)
    traced = [operator for operator in trace.runs[0].operators if operator.call[2]]
    found: dict[TensorId, Fields] = {}
    ours = [(operator.module, operator.name, *map(len, operator.call[2])) for operator in traced]
    theirs = [(operator.module, operator.name, *map(len, operator.shapes)) for operator in recording.operators]
    for tag, begin, end, start, stop in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        for index in range(start, stop):
            operator = recording.operators[index]
            for output, shape in enumerate(operator.shapes):
                if tag == "equal":
                    fields = traced[begin + index - start].outputs[output]
                else:
                    fields = _fields_of_replaced(traced[begin:end], shape, (first, batch)) or _fields_of_copied(
                        operator, shape, found
                    )
                found[index, output] = tuple(field for field in fields if field.fits(shape))
    return found


def _fields_of_replaced(operators: Sequence[TracedOperator], shape: Shape, batches: tuple[int, int]) -> Fields:
    """Return the fields of the last tensor of a shape, or of one with one more axis along which they are constant."""
    every = [pair for one in reversed(operators) for pair in zip(one.outputs, one.call[2], strict=False) if pair[0]]
    for fields, traced in every:
        if _alike(traced, shape, batches):
            return fields
    for fields, traced in every:
        if _alike(traced[:-1], shape, batches) and all(f.labels.shape[-1] == 1 for f in fields):
            return tuple(field.with_labels(field.labels[..., 0]) for field in fields)
    return ()


def _alike(traced: Shape, shape: Shape, batches: tuple[int, int]) -> bool:
    first, batch = batches
    if len(traced) != len(shape):
        return False
    return all(a == b or a * batch == b * first for a, b in zip(traced, shape, strict=True))


def _fields_of_copied(operator: RecordedOperator, shape: Shape, found: dict[TensorId, Fields]) -> Fields:
    """Return the fields of an input that fit a shape, as those of a copy do."""
    for place in operator.inputs:
        fields = found.get(place, ()) if place is not None else ()
        if fields and all(field.fits(shape) for field in fields):
            return fields
    return ()


Bytes = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MemoryTable:
    """Bytes that are alive at those moments of a forward pass that are its peak at some widths."""

    # the labels of each product of widths, in the numbering of the trace; the first has none
    factors: tuple[tuple[Labels, ...], ...]
    bytes: Bytes  # (moments, products) the factor of each product


@dataclass(frozen=True, eq=False)
class _TensorBytes:
    """Bytes of a tensor, a constant times the labels of every factor, and during which operators it is alive."""

    constant: float
    factors: tuple[Labels, ...]
    alive: NDArray[np.bool_]


def memory_table(trace: Trace, batch: int, dtype: str) -> MemoryTable:
    """Return the memory of the forward pass on the first example, with `batch` and `dtype` as for `record_memory`.

    It is counted once, and stored with the trace.
    """
    known: MemoryTable | None = trace.tables.get((batch, dtype))
    if known is None:
        known = trace.tables[batch, dtype] = _table(trace, batch, dtype)
    return known


def _table(trace: Trace, batch: int, dtype: str) -> MemoryTable:
    recording = record_memory(trace.model(), trace.example, batch, dtype, prepare=substitute_all)
    union = trace.flow.union
    column: dict[tuple[bytes, ...], int] = {}
    factors: list[tuple[Labels, ...]] = []
    columns: list[Bytes] = []
    for sized in (*_given(trace, recording, dtype), *_made(trace, recording, batch)):
        key = tuple(sorted(union.find(factor).tobytes() for factor in sized.factors))
        if key not in column:
            column[key] = len(factors)
            factors.append(sized.factors)
            columns.append(np.zeros(len(sized.alive)))
        columns[column[key]] += sized.constant * sized.alive
    return MemoryTable(tuple(factors), undominated(np.stack(columns, axis=1)))


def _given(trace: Trace, recording: Recording, dtype: str) -> Iterator[_TensorBytes]:
    always = np.ones(max(1, len(recording.operators)), dtype=bool)
    yield _TensorBytes(float(recording.inputs_bytes), (), always)
    for name, tensor in named_tensors(trace.model()):
        element = DTYPES[dtype].itemsize if tensor.is_floating_point() else tensor.element_size()
        axes = list(zip(tensor.shape, trace.labels[name], strict=True))
        whole = np.prod([size for size, labels in axes if labels is None], dtype=np.float64)
        yield _TensorBytes(element * float(whole), tuple(labels for _, labels in axes if labels is not None), always)


def _made(trace: Trace, recording: Recording, batch: int) -> Iterator[_TensorBytes]:
    fields = fields_of_recording(trace, recording, batch)
    for allocation, alive in zip(recording.allocations, recording.alive.T, strict=True):
        factors, covered = apart(fields[allocation.made])
        rest = np.prod([allocation.shape[axis] for axis in covered], dtype=np.float64)
        yield _TensorBytes(allocation.bytes / float(rest) if rest else 0.0, factors, alive)


def undominated(bytes: Bytes) -> Bytes:
    """Return those of the moments, (moments, products), that no other moment equals or exceeds in every product."""
    kept: list[int] = []
    changing = np.flatnonzero((bytes != bytes[0]).any(axis=0))
    for index in np.argsort(-bytes.sum(axis=1), kind="stable"):
        if not kept or not (bytes[kept][:, changing] >= bytes[index, changing]).all(axis=1).any():
            kept.append(int(index))
    return bytes[kept]
