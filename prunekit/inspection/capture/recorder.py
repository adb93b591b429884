"""Capture of what chosen layers read and return, and the gradients of both, copied or reduced.

Copies are in memory or in files, up to a limit.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from prunekit.errors import UsageError, nearest
from prunekit.hooks.hook import refuse_nested
from prunekit.inspection.capture.layer_hooks import LayerHooks, Layers, TensorKey, What
from prunekit.utils.context import device_of
from prunekit.utils.display import Displayed, Table, plural
from prunekit.utils.files import StrPath, atomic_file
from prunekit.utils.private_torch import without_torch_function
from prunekit.utils.tensors import gather, map_tensors

Named = Literal["mean", "moments", "extremes"]
Reducer = Callable[[Tensor], Any]
"""A function of a tensor, whose result is kept; the tensor may be overwritten later."""
ByChannel = Callable[[Tensor, int], Any]
"""A `Reducer` that also gets the axis of the channels."""


def capture(
    model: nn.Module,
    layers: Layers,
    what: What | Iterable[What] = "output",
    *,
    reduce: Named | Reducer | None = None,
    every: int = 1,
    to: StrPath = "cpu",
    limit_mib: float | None = None,
) -> Capture:
    """Capture what layers read and return, call by call, while the `with` lasts.

    Each tensor is copied or reduced at once, so that no in-place operation changes it afterwards. Gradients are
    captured in the backward pass, which belongs inside the `with`. `grad_input` is the gradient that the layer itself
    returns, without those of other readers of the same tensor; inputs that need no gradient have none. Works on dense,
    masked and compact models, alone or with other hooks, which run in the order in which they were registered. When
    the `with` ends, even by an exception, no hook is left.

    Projections of attention modules, whose weights are used without a call of their modules, are captured if they
    are chosen: `*.out_proj`, `*.in_proj_weight` (one call if queries, keys and values are computed from one tensor,
    else three in this order). Attention modules are then replaced by equivalent ones, which differ at most by rounding.
    The second forward pass of activation checkpointing is not captured.

    Args:
        model: the model, which is not compiled; it is not changed.
        layers: globs over module paths (`*` also matches dots), classes of modules (`nn.Conv2d`), channel groups, or
            several of these.
        what: `input`, `output`, `grad_input`, `grad_output`, or several of them.
        reduce: what is kept instead of a copy: the result of a function of a tensor, `mean` (channels,), `moments`
            (2, channels: mean and root mean square) or `extremes` (2, channels); channels are on the last axis behind
            linear layers, else on axis 1.
        every: only the first of so many forward passes is captured; calls outside of `model(...)` always are.
        to: `cpu`; `device`, where the tensors are; or a new folder, with a safetensors file for each tensor.
        limit_mib: limit of what is kept; None: half of the free memory, or of the free disk space.

    Raises:
        UsageError: a glob, a class or a group matches nothing; or, in a forward pass, what is kept exceeds the limit;
            the message says how much it takes and which reducer avoids it.
        ModelError: the model is compiled: hooks added after `torch.compile` are silently ignored.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> with pk.capture(model, torch.nn.Linear, what=("output", "grad_output")) as record:
        ...     model(torch.randn(8, 4)).sum().backward()
        >>> for entry in record:
        ...     print(entry.path, entry.what, tuple(entry.value.shape))
        0 output (8, 16)
        2 output (8, 2)
        2 grad_output (8, 2)
        0 grad_output (8, 16)
    """
    return Capture(model, layers, what, reduce=reduce, every=every, to=to, limit_mib=limit_mib)


class Capture(Displayed, LayerHooks):
    """Captured tensors, in the order in which they were computed; see `capture`.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> with pk.capture(model, "*") as seen:
        ...     y = model(x)
        >>> print(seen)
        Capture: 3 tensors of 3 layers, kept as copies, 544 B
        <BLANKLINE>
          layer  what    batch  call  position  shape
          0      output      0     0         0  4x16
          1      output      0     0         0  4x16
          2      output      0     0         0  4x2
        >>> bool((seen["1"][0].value >= 0).all())
        True
    """

    purpose = "capture"

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        what: What | Iterable[What],
        *,
        reduce: Named | Reducer | None,
        every: int,
        to: StrPath,
        limit_mib: float | None,
    ) -> None:
        super().__init__(model, layers, what, every)
        self._reduced, self._reduce = reduce is not None, reducer_of(reduce)
        self._store = TensorStore(to, limit_mib, device_of(model))
        self._entries: list[Captured] = []
        self._whole = self._channels = 0  # bytes and channels of all tensors so far, before they were reduced

    def __iter__(self) -> Iterator[Captured]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, path: str) -> list[Captured]:
        """Return all tensors of one layer."""
        if not isinstance(path, str):
            raise UsageError(f"record[...]: expected the path of a module, such as 'layer1.0', got {path!r}")
        found = [entry for entry in self._entries if entry.path == path]
        if not found:
            raise KeyError(f"{path!r}: nothing of it was captured; {nearest(path, {e.path for e in self._entries})}")
        return found

    def find(
        self, pattern: str = "*", what: What | None = None, *, batch: int | None = None, call: int | None = None
    ) -> list[Captured]:
        """Return the tensors of the layers that a glob matches, of one kind, of one forward pass or call."""
        return [
            entry
            for entry in self._entries
            if (entry.path == pattern or fnmatchcase(entry.path, pattern))
            and what in (None, entry.what)
            and batch in (None, entry.batch)
            and call in (None, entry.call)
        ]

    def values(self, pattern: str = "*", what: What | None = None) -> list[Any]:
        """Return the values of the tensors that `find` returns."""
        return [entry.value for entry in self.find(pattern, what)]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for every captured tensor: its key, and its shape as text."""
        return [
            {
                **{name: getattr(entry, name) for name in TensorKey._fields},
                "shape": "x".join(map(str, entry.shape)) or "scalar",
            }
            for entry in self._entries
        ]

    def _headline(self) -> str:
        layers = plural(len({entry.path for entry in self._entries}), "layer")
        kept = "reduced" if self._reduced else "as copies"
        return f"{plural(len(self), 'tensor')} of {layers}, kept {kept}, {mib(self.bytes)}"

    def _parts(self) -> Iterator[str | Table]:
        yield f"Capture: {self._headline()}"
        cells = [["" if value is None else value for value in row.values()] for row in self.rows()]
        if cells:
            yield Table(("layer", "what", "batch", "call", "position", "shape"), cells, text=("what", "shape"))

    @property
    def bytes(self) -> int:
        """Bytes that are kept."""
        return self._store.bytes

    def clear(self) -> None:
        """Remove all captured tensors; files stay."""
        self._entries.clear()
        self._store.bytes = self._whole = self._channels = 0

    def on_tensor(self, key: TensorKey, values: Tensor, axis: int) -> None:
        """Keep a copy of a tensor, or the result of the reducer."""
        refuse_nested(values, str(key))
        with without_torch_function(), torch.no_grad():
            if self._reduced:
                with torch.autocast(values.device.type, enabled=False):
                    made = self._reduce(values.detach(), axis)
            else:
                made = values
            self._whole += values.numel() * values.element_size()
            self._channels += values.shape[axis] if values.dim() else 1
            kept = self._store.keep(made, values, f"{key.path}_{key.what}", partial(self._full, key))
        self._entries.append(Captured(*key, tuple(values.shape), kept))

    def _full(self, key: TensorKey, needed: int) -> UsageError:
        kept = f"{plural(len(self._entries), 'tensor')} of {plural(max(self._begun, 1), 'forward pass', 'es')}"
        least = 4 * self._channels  # of a number for each channel
        where = "memory" if self._store.folder is None else "disk"
        advice = f"every=, to=FOLDER or limit_mib={-(-self._whole // MIB)}"
        if least < self._whole:
            advice = f"reduce='mean' ({mib(least)} instead of {mib(self._whole)}), {advice}"
        return UsageError(
            f"capture: {key} takes {mib(needed)} more, after {kept} that take {mib(self._store.bytes)}, and the limit "
            f"of {where} is {mib(self._store.limit)}; use {advice}"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Captured:
    """One tensor of one call of a layer."""

    # path, what, batch, call, position: see `TensorKey`
    path: str
    what: What
    batch: int | None
    call: int
    position: int
    shape: tuple[int, ...]  # shape of the tensor, before it was reduced
    _kept: Any

    def __repr__(self) -> str:
        size = "x".join(map(str, self.shape)) or "scalar"
        batch = "" if self.batch is None else f", batch {self.batch}"
        return f"<Captured: {self.what} {self.position} of {self.path or 'the model'}{batch}, call {self.call}: {size}>"

    @property
    def value(self) -> Any:
        """The copy, read from its file if it is in one; or the result of the reducer."""
        return load_file(self._kept.path)["value"] if isinstance(self._kept, TensorFile) else self._kept


def reducer_of(given: Named | Reducer | None) -> ByChannel:
    """Return the reducer of a name, or a function as one; None returns the tensor itself."""
    if given is None:
        return lambda values, axis: values
    if callable(given):
        return lambda values, axis: given(values)
    if given not in REDUCERS:
        raise UsageError(f"reduce: expected a function, or the name of one; {nearest(str(given), get_args(Named))}")
    named = REDUCERS[given]
    return lambda values, axis: named(values, axis) if values.dim() else named(values[None], 0)


def mean(values: Tensor, axis: int) -> Tensor:
    """Return the mean of each channel, (channels,)."""
    return _wide(values).mean(_others(values, axis))


def moments(values: Tensor, axis: int) -> Tensor:
    """Return mean and root mean square of each channel, (2, channels)."""
    others, wide = _others(values, axis), _wide(values)
    count = max(values.numel() // max(values.shape[axis], 1), 1)
    return torch.stack((wide.mean(others), torch.linalg.vector_norm(wide, dim=others) / count**0.5))


def extremes(values: Tensor, axis: int) -> Tensor:
    """Return the least and the greatest value of each channel, (2, channels)."""
    others = _others(values, axis)
    return torch.stack((values.amin(others), values.amax(others)))


def _others(values: Tensor, axis: int) -> tuple[int, ...]:
    return tuple(other for other in range(values.dim()) if other != axis)


def _wide(values: Tensor) -> Tensor:
    """Return values in a dtype that has fractions and that sums do not overflow."""
    return values if values.dtype in (torch.float32, torch.float64) or values.is_complex() else values.float()


REDUCERS: dict[str, ByChannel] = {"mean": mean, "moments": moments, "extremes": extremes}


MIB = 2**20
SHARE = 0.5
"""Share of the free memory or disk space that a capture may take if no limit is given."""


class TensorStore:
    """A store of copies of tensors in memory or in a folder, see `capture`."""

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

    def keep(self, value: Any, source: Tensor, name: str, too_much: Callable[[int], Exception]) -> Any:
        """Copy the tensors of a reducer's result, so that writing to `source` does not change them."""
        needed = sum(tensor.numel() * tensor.element_size() for tensor in gather(value))
        if self.bytes + needed > self.limit:
            raise too_much(needed)
        self.bytes += needed
        if self.folder is None:
            return map_tensors(value, lambda tensor: self._copied(tensor, source))
        if not isinstance(value, Tensor):
            return map_tensors(value, lambda tensor: tensor.detach().cpu().clone())
        path = self.folder / f"{next(self._numbers):06d}_{name}.safetensors"
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


def mib(count: float) -> str:
    """Return bytes as text."""
    for size, unit in ((2**30, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
