"""The store of captured tensors (memory or files, up to a limit), and how much full copies take."""

from __future__ import annotations

import itertools
import re
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from prunekit.errors import UsageError
from prunekit.inspection.capture.layer_hooks import LayerHooks, TensorKey, What
from prunekit.inspection.capture.layer_selection import Layers
from prunekit.utils.context import same_random_state, training_mode
from prunekit.utils.files import StrPath, atomic_file
from prunekit.utils.inputs import call
from prunekit.utils.tensors import gather, map_tensors

MIB = 2**20
SHARE = 0.5
"""Share of the free memory or disk space that a capture may take if no limit is given."""
SAMPLE = 32 * 2**20
"""Bytes of a timed copy: more than caches hold, so that the time is proportional to the size."""


class TensorStore:
    """A store of copies of tensors.

    Args:
        to: `cpu`; `device`, where the tensors are; or a folder, which is created.
        limit_mib: limit of what is kept; None: half of what is free.
        device: device of the model.

    Raises:
        UsageError: the folder holds files already, or is a file; the limit is negative.
    """

    def __init__(self, to: StrPath, limit_mib: float | None, device: torch.device) -> None:
        self.folder = None if to in ("cpu", "device") else Path(to)
        self._cpu = to == "cpu"
        self._numbers = itertools.count()
        self.bytes = 0
        if self.folder is not None:
            if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
                raise UsageError(f"to: expected 'cpu', 'device' or a new or empty folder, got {self.folder}")
            if re.fullmatch(r"cuda(:\d+)?|mps|xpu|memory|disk", str(to)):
                raise UsageError(f"to: expected 'cpu', 'device', where the tensors are, or a folder, got {str(to)!r}")
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"to: {self.folder}: cannot be made: {error.strerror or error}") from error
        if limit_mib is not None and not limit_mib > 0:
            raise UsageError(f"limit_mib: expected a number above 0, got {limit_mib}")
        self.limit = int(SHARE * self._free(device)) if limit_mib is None else int(limit_mib * MIB)

    def _free(self, device: torch.device) -> int:
        if self.folder is not None:
            return shutil.disk_usage(self.folder).free
        if not self._cpu and device.type == "cuda":
            return int(torch.cuda.mem_get_info(device)[0])
        return int(psutil.virtual_memory().available)

    def keep(self, value: Any, source: Tensor, name: Callable[[], str], too_much: Callable[[int], Exception]) -> Any:
        """Copy the tensors of a reducer's result, so that writing to `source` does not change them."""
        needed = sum(tensor.numel() * tensor.element_size() for tensor in gather(value))
        if self.bytes + needed > self.limit:
            raise too_much(needed)
        self.bytes += needed
        if self.folder is None:
            return map_tensors(value, lambda tensor: self._copied(tensor, source))
        if not isinstance(value, Tensor):
            return map_tensors(value, lambda tensor: tensor.detach().cpu().clone())
        path = self.folder / f"{next(self._numbers):06d}_{name()}.safetensors"
        with atomic_file(path) as temporary:
            save_file({"value": value.detach().cpu().contiguous()}, temporary)
        return TensorFile(path)

    def _copied(self, tensor: Tensor, source: Tensor) -> Tensor:
        tensor = tensor.detach()
        moved = tensor.cpu() if self._cpu else tensor
        shared = moved.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        return moved.clone() if shared else moved


@dataclass(frozen=True)
class TensorFile:
    """A tensor in a file."""

    path: Path

    def read(self) -> Tensor:
        """Return the tensor."""
        return load_file(self.path)["value"]


def mib(count: float) -> str:
    """Return bytes as text."""
    for size, unit in ((2**30, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


@dataclass(frozen=True)
class CaptureSize:
    """The size of full copies of the tensors of a forward pass.

    Attributes:
        tensors: number of tensors.
        bytes: bytes of all tensors; a gradient counts as many as its tensor.
        channels: number of channels of all tensors.
        copy_ms: measured time of copying as many bytes; None if it was not measured.
    """

    tensors: int
    bytes: int
    channels: int
    copy_ms: float | None = None

    def __str__(self) -> str:
        more = "" if self.copy_ms is None else f", about {self.copy_ms:.2g} ms to copy"
        return f"{self.tensors} tensors, {mib(self.bytes)} for each forward pass{more}"


def size_of(model: nn.Module, layers: Layers, what: What | Iterable[What], example: tuple[Any, ...]) -> CaptureSize:
    """Return the size of full copies of one forward pass, which runs in eval mode without gradients; see `capture`."""
    several: tuple[What, ...] = (what,) if isinstance(what, str) else tuple(what)
    sides: list[tuple[What, ...]] = [("input",) if one in ("input", "grad_input") else ("output",) for one in several]
    with training_mode(model, False), torch.no_grad(), same_random_state():
        counted = []
        for side in dict.fromkeys(sides):
            with _SizeCounter(model, layers, side) as sizes:
                call(model, example)
            counted += [sizes] * sides.count(side)
    return CaptureSize(*(sum(getattr(one, name) for one in counted) for name in ("tensors", "bytes", "channels")))


class _SizeCounter(LayerHooks):
    def __init__(self, model: nn.Module, layers: Layers, what: tuple[What, ...]) -> None:
        super().__init__(model, layers, what)
        self.tensors = self.bytes = self.channels = 0

    def on_tensor(self, key: TensorKey, values: Tensor, axis: int) -> None:
        """Count a tensor."""
        self.tensors += 1
        self.bytes += values.numel() * values.element_size()
        self.channels += values.shape[axis] if values.dim() else 1


def copy_ms(count: int, device: torch.device) -> float:
    """Return the milliseconds that copying so many bytes to the CPU takes: the best of three, from at most 32 MiB."""
    sample = torch.ones(max(1, min(count, SAMPLE)), dtype=torch.uint8, device=device)
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        copied = sample.to("cpu", copy=True)
        taken.append(time.perf_counter() - start)
        del copied
    return 1000 * min(taken) * count / len(sample)
