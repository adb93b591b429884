"""Results of a model's operators, kept to be compared with another model's: in memory, and beyond a limit in a file."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

import torch

from prunekit.channels.tracing.storages import is_plain
from prunekit.utils.file_memory import FileMemory

MEMORY = 2**27
"""Bytes that are kept in memory: float64 results of all operators of a language model are gigabytes."""


class RecordedValues:
    """Results of operators by a key.

    Args:
        memory: bytes of tensors that are kept in memory; what comes later is in a temporary file.
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self._memory = FileMemory(memory)
        self._found: dict[Hashable, tuple[str, list[Any]]] = {}

    def add(self, key: Hashable, name: str, values: list[Any], shared: Collection[torch.Tensor] = ()) -> None:
        """Record the results of an operator, tensors or None, and its name; those in `shared` may be written to."""
        self._found[key] = name, self.kept(values, shared)

    def kept(self, values: list[Any], shared: Collection[torch.Tensor] = ()) -> list[Any]:
        """Return values as they are kept."""
        owned = [any(one is other for other in shared) for one in values]
        found = [self._kept(one, shared=other) for one, other in zip(values, owned, strict=True)]
        self._memory.release()
        return found

    def _kept(self, value: Any, *, shared: bool) -> Any:
        if isinstance(value, torch.Tensor) and is_plain(value):
            return self._memory.keep(value, shared=shared)
        return value.clone() if shared else value

    def get(self, key: Hashable) -> tuple[str, list[Any]] | None:
        """Return name and results of an operator; None if there is none of this key."""
        self._memory.release()
        return self._found.get(key)
