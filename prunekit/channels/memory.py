"""What memory a forward pass takes by the widths that are left: at each operator a sum of products of widths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prunekit.channels.copying import named_tensors
from prunekit.channels.labels import Labels, apart
from prunekit.channels.recognizing import recognized
from prunekit.channels.recording import DTYPES, Recording, record
from prunekit.channels.substitutes import substitute_all
from prunekit.channels.tracing import Trace

Bytes = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MemoryTable:
    """Bytes of all that is alive, at those moments of a forward pass that are its peak at some widths.

    Attributes:
        factors: of each product of widths, labels in the numbering of the trace; the first has none.
        bytes: (moments, products) what each product is multiplied by.
    """

    factors: tuple[tuple[Labels, ...], ...]
    bytes: Bytes


@dataclass(frozen=True, eq=False)
class _Sized:
    """Bytes of a tensor: a constant times the labels of every factor; and while which operators it is there."""

    constant: float
    factors: tuple[Labels, ...]
    alive: NDArray[np.bool_]


def memory_table(trace: Trace, batch: int, dtype: str) -> MemoryTable:
    """What parameters, buffers, inputs and results of operators take in the first example's forward pass.

    It is counted once, and remembered with the trace.

    Args:
        batch, dtype: as for `record`.

    Raises:
        ModelError: the model does not run on that.
    """
    known: MemoryTable | None = trace.tables.get((batch, dtype))
    if known is None:
        known = trace.tables[batch, dtype] = _table(trace, batch, dtype)
    return known


def _table(trace: Trace, batch: int, dtype: str) -> MemoryTable:
    recording = record(trace.model(), trace.example, batch, dtype, prepare=substitute_all)
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


def _given(trace: Trace, recording: Recording, dtype: str) -> Iterator[_Sized]:
    always = np.ones(max(1, len(recording.steps)), dtype=bool)
    yield _Sized(float(recording.inputs_bytes), (), always)
    for name, tensor in named_tensors(trace.model()):
        element = DTYPES[dtype].itemsize if tensor.is_floating_point() else tensor.element_size()
        axes = list(zip(tensor.shape, trace.labels[name], strict=True))
        whole = np.prod([size for size, labels in axes if labels is None], dtype=np.float64)
        yield _Sized(element * float(whole), tuple(labels for _, labels in axes if labels is not None), always)


def _made(trace: Trace, recording: Recording, batch: int) -> Iterator[_Sized]:
    fields = recognized(trace, recording, batch)
    for piece, alive in zip(recording.pieces, recording.alive.T, strict=True):
        factors, covered = apart(fields[piece.made])
        rest = np.prod([piece.shape[axis] for axis in covered], dtype=np.float64)
        yield _Sized(piece.bytes / float(rest) if rest else 0.0, factors, alive)


def undominated(bytes: Bytes) -> Bytes:
    """The moments, of (moments, products), at which not everything is as much or less than at another one."""
    kept: list[int] = []
    changing = np.flatnonzero((bytes != bytes[0]).any(axis=0))
    for index in np.argsort(-bytes.sum(axis=1), kind="stable"):
        if not kept or not (bytes[kept][:, changing] >= bytes[index, changing]).all(axis=1).any():
            kept.append(int(index))
    return bytes[kept]
