"""Arrays and tensors from a file: npz, npy and safetensors, whose headers are checked before memory is taken."""

from __future__ import annotations

import math
import os
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import psutil
from safetensors import safe_open

from prunekit.errors import ArtifactError, PrunekitError, cut_short, first_line, raised_as
from prunekit.reading.text_files import require_file, shown

if TYPE_CHECKING:
    from torch import Tensor

MOST_MEMBERS = 10_000
"""Arrays that an archive may have."""


def read_arrays(
    path: Path,
    expected: str = "NumPy arrays (.npz or .npy) without objects",
    raises: type[PrunekitError] = ArtifactError,
    *,
    most: int | None = None,
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of an `.npz` file by name, or the one of an `.npy` file under the name ""."""
    free = psutil.virtual_memory().available if most is None else most
    require_file(path, expected, raises)
    with _reading(path, expected, raises), path.open("rb") as file:
        size = require_file(path, expected, raises)
        if file.read(6) == np.lib.format.MAGIC_PREFIX:
            file.seek(0)
            return {"": _array(file, size, free)}
        if not zipfile.is_zipfile(file):  # NumPy would take it for a pickle and advise to load it unsafely
            raise ValueError("it is no zip file, or a part of one")
        with zipfile.ZipFile(file) as archive:
            return _members(archive, free)


def _members(archive: zipfile.ZipFile, free: int) -> dict[str, np.ndarray[Any, Any]]:
    members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
    length = sum(member.file_size for member in members)
    if len(members) > MOST_MEMBERS:
        raise ValueError(f"it has {len(members):,} arrays, more than {MOST_MEMBERS:,}")
    if length > free:
        raise ValueError(f"its arrays take {length:,} bytes, and {free:,} of memory are free")
    found: dict[str, np.ndarray[Any, Any]] = {}
    for member in members:
        name = member.filename.removesuffix(".npy")
        if name in found:
            raise ValueError(f"the array {cut_short(ascii(name))} is there twice")
        with archive.open(member) as file:
            try:
                found[name] = _array(file, member.file_size, free)
            except Exception as error:
                raise ValueError(f"{cut_short(ascii(name))}: {error}") from error
            if file.read(1):  # to the end, where the checksum is compared
                raise ValueError(f"{cut_short(ascii(name))}: there are bytes after its values")
    return found


def _array(file: IO[bytes], size: int, free: int) -> np.ndarray[Any, Any]:
    """Return the array of an .npy file of a size, if it is as long as its header says and fits into memory."""
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"expected version 1 or 2 of the format, got {version[0]}.{version[1]}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # headers of Python 2
        shape, fortran_order, dtype = read(file)
    if not dtype.itemsize:
        raise ValueError(f"its values are of {dtype}, of no bytes")
    if dtype.hasobject:
        raise ValueError("it has Python objects, which would be unpickled; objects are never loaded")
    length = math.prod(shape) * dtype.itemsize
    if any(axis < 0 for axis in shape) or length != size - file.tell():
        raise ValueError(f"shape {shape} of {dtype} takes {length:,} bytes, and {size - file.tell():,} are there")
    if length > free:
        raise ValueError(f"it takes {length:,} bytes, and {free:,} of memory are free")
    values = np.empty(math.prod(shape), dtype)
    flat = values.view(np.uint8) if length else np.empty(0, np.uint8)
    done = 0
    while done < length:
        part = file.read(min(2**24, length - done))
        if not part:
            raise ValueError(f"it ends after {done:,} of {length:,} bytes")
        flat[done : done + len(part)] = np.frombuffer(part, np.uint8)
        done += len(part)
    return values.reshape(shape[::-1]).transpose() if fortran_order else values.reshape(shape)


def read_tensors(
    path: Path,
    expected: str = "tensors (.safetensors)",
    raises: type[PrunekitError] = ArtifactError,
    names: Iterable[str] | None = None,
) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Return the tensors of a safetensors file by name, all or some, on the CPU, and its metadata."""
    require_file(path, expected, raises)
    with _reading(path, expected, raises), openable(path) as name, safe_open(name, framework="pt") as file:
        wanted = file.keys() if names is None else names
        return {name: file.get_tensor(name) for name in wanted}, file.metadata() or {}


def tensor_headers(path: Path, raises: type[PrunekitError]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type, such as `BF16`, and the shape of each tensor of a safetensors file, without reading values."""
    expected = "tensors (.safetensors)"
    require_file(path, expected, raises)
    with _reading(path, expected, raises), openable(path) as name, safe_open(name, framework="pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}


@contextmanager
def openable(path: Path) -> Iterator[str]:
    """Yield a name by which safetensors can open a file: it takes paths in UTF-8 alone."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        with path.open("rb") as file:
            yield f"/dev/fd/{file.fileno()}"
    else:
        yield os.fspath(path)


def _reading(path: Path, expected: str, raises: type[PrunekitError]) -> AbstractContextManager[None]:
    """Turn what readers raise at damaged files, which is of any kind, into one error."""
    return raised_as(raises, f"{shown(path)}: expected {expected}, but: ", reason=_reason, passing=PrunekitError)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or first_line(error)
