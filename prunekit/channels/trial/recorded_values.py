"""Results of a model's operators, kept to be compared with another model's: in memory, and beyond a limit in a file."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Hashable
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from prunekit.channels.tracing.storages import is_plain

MEMORY = 2**27
"""Bytes that are kept in memory: float64 results of all operators of a language model are gigabytes."""


class _Written(NamedTuple):
    """A tensor in the file: where it begins, its dtype and its shape."""

    start: int
    dtype: torch.dtype
    shape: torch.Size


class RecordedValues:
    """Results of operators by a key.

    Args:
        memory: bytes of tensors that are kept in memory; what comes later is written to a temporary file.
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self._left = memory
        self._found: dict[Hashable, tuple[str, list[Any]]] = {}
        self._file: IO[bytes] | None = None

    def add(self, key: Hashable, name: str, values: list[Any]) -> None:
        """Record the results of an operator, tensors that nothing else changes or None, and its name."""
        self._found[key] = name, [self._stored(value) for value in values]

    def get(self, key: Hashable) -> tuple[str, list[Any]] | None:
        """Return name and results of an operator; None if there is none of this key."""
        found = self._found.get(key)
        return None if found is None else (found[0], [self._read(value) for value in found[1]])

    def _stored(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.nbytes <= self._left:
            self._left -= value.nbytes
            return value
        if value.is_complex() or value.device.type != "cpu" or value.requires_grad or not is_plain(value):
            return value
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            start = self._file.seek(0, 2)
            self._file.write(value.contiguous().flatten().view(torch.uint8).numpy().data)
        except OSError:  # no room there
            return value
        return _Written(start, value.dtype, value.shape)

    def _read(self, value: Any) -> Any:
        if not isinstance(value, _Written):
            return value
        assert self._file is not None
        self._file.seek(value.start)
        data = self._file.read(value.shape.numel() * value.dtype.itemsize)
        return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(value.dtype).view(value.shape)
