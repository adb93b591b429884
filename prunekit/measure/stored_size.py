"""The bytes that a model's weights take in files: plain, with zeros as bits, and each compressed losslessly."""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from prunekit.compaction.model_folder import ModelWithPlan, folder_tensors, read_manifest, stored_tensors
from prunekit.errors import UsageError
from prunekit.hooks.wrappers import require_values, unwrapped
from prunekit.models.bitmask import write_tensors
from prunekit.modes.public_call import public_call
from prunekit.utils.display import Displayed, Table, share, size
from prunekit.utils.files import StrPath, folder_at

LEVEL = 3
"""The level of zstd, its own default; higher ones gain little on weights."""
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, eq=False, repr=False)
class StoredSizes(Displayed):
    """The bytes of one model's weights file in each form."""

    plain_bytes: int  # of plain safetensors
    bitmask_bytes: int  # with zeros as bits, as `prunekit.save(..., compress=True)` writes it
    # plain_compressed_bytes, bitmask_compressed_bytes: of both after the compressor
    plain_compressed_bytes: int
    bitmask_compressed_bytes: int
    compressor: str  # its name: `zstd`, or `zlib` where no zstd is installed
    zeros: float  # share of entries whose bits are all 0, of all tensors, 0..1

    def rows(self) -> list[dict[str, Any]]:
        """Return the bytes of each form, before and after the compressor."""
        return [
            {"form": "plain", "bytes": self.plain_bytes, "compressed_bytes": self.plain_compressed_bytes},
            {"form": "bitmask", "bytes": self.bitmask_bytes, "compressed_bytes": self.bitmask_compressed_bytes},
        ]

    def figures(self) -> dict[str, Any]:
        """Return what `metrics.json` and `results.csv` hold of a model."""
        return {name: value for name, value in vars(self).items() if name != "zeros"}

    def _headline(self) -> str:
        return f"{size(self.plain_bytes)} plain, {size(self.bitmask_bytes)} as bitmask, {share(self.zeros)} zeros"

    def _parts(self) -> Iterable[str | Table]:
        yield f"Weights file: {self._headline()}"
        rows = [
            (row["form"], size(row["bytes"]), share(row["bytes"] / self.plain_bytes), size(row["compressed_bytes"]))
            for row in self.rows()
        ]
        yield Table(("form", "size", "of plain", f"by {self.compressor}"), rows)


@public_call
def stored_sizes(model: nn.Module | ModelWithPlan | StrPath) -> StoredSizes:
    """Return the bytes of a model's weights file, plain and with zeros as bits, and of both compressed losslessly.

    The compressor is zstd at its default level where Python (3.14) or the package `zstandard` (in the extra `report`)
    has it, or else zlib, which the result names. Files are written to a temporary folder, one at a time.

    Args:
        model: any model; the result of `prunekit.prune`; or the path of a model folder, compressed or not.

    Raises:
        ArtifactError: the folder is missing or damaged.
        UsageError: it is none of these.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Linear(256, 256)
        >>> with torch.no_grad():
        ...     _ = model.weight[:, ::2].zero_()
        >>> sizes = pk.stored_sizes(model)
        >>> sizes
        <StoredSizes: 263 kB plain, 141 kB as bitmask, 49.8 % zeros>
        >>> [row["form"] for row in sizes.rows() if row["compressed_bytes"] < sizes.plain_bytes]
        ['plain', 'bitmask']
    """
    tensors = _tensors(model)
    entries = sum(tensor.numel() for tensor in tensors.values())
    nonzero = sum(_nonzero(tensor) for tensor in tensors.values())
    name, make = _compressor()
    with TemporaryDirectory() as place:
        plain, bits = (_measured(tensors, Path(place, "weights"), make, compress) for compress in (False, True))
    return StoredSizes(plain[0], bits[0], plain[1], bits[1], name, 1 - nonzero / max(1, entries))


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    if isinstance(model, (str, PathLike)):
        folder = folder_at(model)
        return folder_tensors(folder, read_manifest(folder))
    found = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(found, nn.Module):
        raise UsageError(f"model: expected a model, or the path of its folder, got {type(model).__name__}")
    found = unwrapped(found)
    require_values(found, "a file")
    return stored_tensors(found)[0]


def _nonzero(tensor: torch.Tensor) -> int:
    """Return the number of entries with any bit set."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1, 1)
    return int((flat.view(torch.uint8) != 0).any(dim=1).sum())


def _measured(tensors: dict[str, torch.Tensor], path: Path, make: Callable[[], Any], compress: bool) -> tuple[int, int]:
    """Return the bytes of a file, and after the compressor."""
    write_tensors(tensors, path, compress=compress)
    compressor, found = make(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            found += len(compressor.compress(chunk))
    return path.stat().st_size, found + len(compressor.flush())


def _compressor() -> tuple[str, Callable[[], Any]]:
    """Return the name of the compressor, and a function that makes one with `compress(chunk)` and `flush()`."""
    try:
        zstd: Any = import_module("compression.zstd")  # Python 3.14
        return "zstd", lambda: zstd.ZstdCompressor(level=LEVEL)
    except ImportError:
        pass
    try:
        zstandard: Any = import_module("zstandard")
        return "zstd", lambda: zstandard.ZstdCompressor(level=LEVEL).compressobj()
    except ImportError:
        return "zlib", zlib.compressobj
