"""Zeros as single bits: bool masks packed eight to a byte, and safetensors files with a bitmask and non-zero values.

The guide's page on the model folder describes the files; a reader of them needs NumPy alone.
"""

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from prunekit.errors import reraise_shortage
from prunekit.reading.array_files import openable

COMPRESSION, VERSION = "bitmask", 1
METADATA = "compression"
"""Key of the metadata of a compressed file, its only one: safetensors writes several in a random order."""
MASK, VALUES = ":bitmask", ":values"
"""Suffixes of the two tensors of a compressed one."""
HEADER_BYTES = 256
"""More than a second entry takes in a file's header, but for the tensor's name: what compression must save at least."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack_bits(mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return the bits of a mask in row-major order, uint8 (ceil(size / 8),): entry i is bit i % 8 of byte i // 8.

    Bits after the last entry are 0.
    """
    return np.packbits(mask.reshape(-1), bitorder="little")


def unpack_bits(packed: NDArray[Any], shape: Sequence[int]) -> NDArray[np.bool_]:
    """Return the mask of a shape that `pack_bits` packed."""
    count = prod(shape)
    if packed.dtype != np.uint8 or packed.shape != ((count + 7) // 8,):
        raise ValueError(
            f"expected {(count + 7) // 8} bytes of uint8 for the bits of shape {tuple(shape)}, "
            f"got {packed.dtype} {packed.shape}"
        )
    if count % 8 and packed[-1] >> count % 8:
        raise ValueError(f"expected zeros in the last {8 - count % 8} bits, which no entry of {tuple(shape)} has")
    return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_).reshape(tuple(shape))


def with_bitmasks(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Return the tensors of a file with zeros as bits where that makes it smaller, and the shapes of those.

    A tensor `NAME` becomes `NAME:bitmask`, its packed bits, and `NAME:values`, the entries whose bits are 1, in
    row-major order. A zero is an entry whose own bits are all 0: -0.0 is a value, so that tensors return bit for bit.
    """
    stored: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        written = len(json.dumps(json.dumps(name)))  # in the metadata, as JSON inside JSON
        parts = _compressed(tensor, HEADER_BYTES + 2 * written)
        if parts is None or {name + MASK, name + VALUES} & tensors.keys():
            stored[name] = tensor
        else:
            stored |= {name + MASK: parts[0], name + VALUES: parts[1]}
            shapes[name] = list(tensor.shape)
    return stored, shapes


def _compressed(tensor: Tensor, least: int) -> tuple[Tensor, Tensor] | None:
    """Return bitmask and values of a tensor; None if they save no more than that number of bytes."""
    integer = _INTEGERS.get(tensor.element_size())
    if integer is None:
        return None
    flat = tensor.view(-1)
    whole = flat.view(integer)
    mask = whole != 0
    count = int(mask.sum())
    saved = (mask.numel() - count) * flat.element_size() - (mask.numel() + 7) // 8
    if saved <= least:
        return None
    return torch.from_numpy(pack_bits(mask.numpy())), whole[mask].view(flat.dtype)


def write_tensors(tensors: Mapping[str, Tensor], path: Path, *, compress: bool = False) -> bool:
    """Write a safetensors file that `read_tensors` reads, and return whether zeros are bits in it."""
    plain = {name: tensor.detach().resolve_conj().resolve_neg().contiguous() for name, tensor in tensors.items()}
    stored, shapes = with_bitmasks(plain) if compress else (plain, {})
    metadata = {"format": "pt"}
    if shapes:
        about = {"format": COMPRESSION, "version": VERSION, "dense_shapes": shapes}
        metadata = {METADATA: json.dumps(about, separators=(",", ":"))}
    save_file(stored, path, metadata)
    return bool(shapes)


def is_compressed(path: Path) -> bool:
    """Return whether a safetensors file says that it is compressed."""
    with openable(path) as name, safe_open(name, framework="pt") as file:
        return METADATA in (file.metadata() or {})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, compressed or not, as they were before compression, row-major."""
    with openable(path) as name, safe_open(name, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    if METADATA not in metadata:
        return tensors
    for name, shape in _dense_shapes(metadata[METADATA]).items():
        if name in tensors:
            raise ValueError(f"{name}: stored both plain and compressed; the file is damaged")
        missing = [part for part in (name + MASK, name + VALUES) if part not in tensors]
        if missing:
            raise ValueError(f"{name}: expected also {' and '.join(missing)} in the file; it is damaged")
        try:
            tensors[name] = _dense(tensors.pop(name + MASK), tensors.pop(name + VALUES), shape)
        except (ValueError, RuntimeError, OverflowError) as error:
            reraise_shortage(error)
            raise ValueError(f"{name}: {error}; the file is damaged") from error
    return tensors


def _dense_shapes(text: str) -> dict[str, list[int]]:
    """Return the shapes in the metadata of a compressed file."""
    try:
        about = json.loads(text)
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise ValueError(f"metadata: {METADATA}: expected a JSON object; the file is damaged")
    found, version, shapes = (about.get(key) for key in ("format", "version", "dense_shapes"))
    if (found, version) != (COMPRESSION, VERSION):
        raise ValueError(
            f"expected a file that is plain, or compressed as {COMPRESSION!r} of version {VERSION}, got {found!r} of "
            f"version {version!r}; use the prunekit that wrote it, or a newer one"
        )
    if not isinstance(shapes, dict) or not all(
        isinstance(shape, list) and all(type(size) is int and 0 <= size < 2**63 for size in shape)
        for shape in shapes.values()
    ):
        raise ValueError("metadata: dense_shapes: expected a shape for each compressed tensor; the file is damaged")
    return shapes


def _dense(packed: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    mask = torch.from_numpy(unpack_bits(packed.numpy(), shape)).view(-1)
    count = int(mask.sum())
    if values.shape != (count,):
        raise ValueError(f"expected {count} values, as many as bits of 1, got shape {tuple(values.shape)}")
    whole = torch.zeros(mask.numel(), dtype=_INTEGERS[values.element_size()])
    whole[mask] = values.view(whole.dtype)
    return whole.view(values.dtype).view(list(shape))
