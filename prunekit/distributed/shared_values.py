"""Values that processes share through their store, which whoever reaches its port can write to: data, and no code.

They are pickles whose reader knows containers, paths, numbers, arrays, tensors, and the dataclasses and enumerations of
this package; anything else that one names is refused, as it might be called.
"""

from __future__ import annotations

import io
import pickle
import sys
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from prunekit.errors import RunError, reason_of, reraise_shortage

BUILTINS = frozenset({
    "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "range", "set", "slice",
    "str", "tuple",
})  # fmt: skip
CLASSES = frozenset({
    ("collections", "Counter"), ("collections", "OrderedDict"), ("collections", "defaultdict"),
    ("collections", "deque"), ("datetime", "datetime"), ("datetime", "timedelta"), ("torch", "Size"),
    ("torch", "device"), ("numpy", "dtype"), ("numpy", "ndarray"),
})  # fmt: skip
PATHS = frozenset({"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"})
ARRAYS = frozenset({"_frombuffer", "_reconstruct", "scalar"})
"""Functions of NumPy that make arrays and numbers of bytes."""


def packed(value: Any) -> bytes:
    """Return a value as bytes; tensors are copied to the CPU."""
    buffer = io.BytesIO()
    _Writer(buffer, protocol=4).dump(value)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the value of bytes."""
    try:
        return _Reader(io.BytesIO(data)).load()
    except RunError:
        raise
    except Exception as error:  # of the unpickler, or of a class
        reraise_shortage(error)
        raise RunError(f"process group: expected data from the main process, but {reason_of(error)}") from error


class _Writer(pickle.Pickler):
    """Writes tensors as bytes, which torch itself would write as a pickle in the pickle."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        plain = value.detach().cpu().contiguous()
        return _tensor, (plain.reshape(-1).view(torch.uint8).numpy().tobytes(), plain.dtype, tuple(plain.shape))


class _Reader(pickle.Unpickler):
    """Reads what `_Writer` writes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _tensor.__name__):
            return _tensor
        root = module.partition(".")[0]
        if module in sys.modules and "." not in name:
            found = getattr(sys.modules[module], name, None)
            own = root == "prunekit" and isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum))
            known = (module, name) in CLASSES or (module == "builtins" and name in BUILTINS)
            path = root == "pathlib" and name in PATHS
            array = module.startswith(("numpy._core.", "numpy.core.")) and name in ARRAYS
            dtype = module == "torch" and isinstance(found, torch.dtype)
            if own or known or path or array or dtype:
                return found
        raise RunError(
            f"process group: expected data from the main process, got {module}.{name}; another program has written to "
            "the store of this run, or its processes have different versions"
        )


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
