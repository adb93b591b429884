"""Capture: what chosen layers read and make, and the gradients of both, copied or reduced while the model runs.

What is kept of a tensor in place of a copy: a function of it, or one of those here by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from prunekit.errors import UsageError, nearest
from prunekit.hooks.hook import refuse_nested
from prunekit.inspection.capture.layer_hooks import LayerHooks, What, Where
from prunekit.inspection.capture.layer_selection import Layers
from prunekit.inspection.capture.storage import OnDisk, Size, Store, copy_ms, mib, size_of
from prunekit.utils.context import device_of
from prunekit.utils.display import Displayed, Table, plural
from prunekit.utils.files import StrPath
from prunekit.utils.inputs import as_example

Named = Literal["mean", "moments", "extremes"]
Reducer = Callable[[Tensor], Any]
"""Gets a tensor, which a later layer may overwrite; what it returns is kept."""
ByChannel = Callable[[Tensor, int], Any]
"""Likewise with the axis that holds the channels."""


def reducer_of(given: Named | Reducer | None) -> ByChannel:
    """Return the function that a name stands for; None copies.

    Raises:
        UsageError: there is no such name.
    """
    if given is None:
        return lambda values, axis: values
    if callable(given):
        return lambda values, axis: given(values)
    if given not in REDUCERS:
        raise UsageError(f"reduce: expected a function, or the name of one; {nearest(str(given), get_args(Named))}")
    named = REDUCERS[given]
    return lambda values, axis: named(values, axis) if values.dim() else named(values[None], 0)


def mean(values: Tensor, axis: int) -> Tensor:
    """(channels,) The mean of each channel."""
    return _wide(values).mean(_others(values, axis))


def moments(values: Tensor, axis: int) -> Tensor:
    """(2, channels) Mean and root mean square of each channel, each in one pass over the values."""
    others, wide = _others(values, axis), _wide(values)
    count = max(values.numel() // max(values.shape[axis], 1), 1)
    return torch.stack((wide.mean(others), torch.linalg.vector_norm(wide, dim=others) / count**0.5))


def extremes(values: Tensor, axis: int) -> Tensor:
    """(2, channels) Least and greatest value of each channel."""
    others = _others(values, axis)
    return torch.stack((values.amin(others), values.amax(others)))


def _others(values: Tensor, axis: int) -> tuple[int, ...]:
    return tuple(other for other in range(values.dim()) if other != axis)


def _wide(values: Tensor) -> Tensor:
    """In a type that sums do not overflow, and that has fractions."""
    return values if values.dtype in (torch.float32, torch.float64) or values.is_complex() else values.float()


REDUCERS: dict[str, ByChannel] = {"mean": mean, "moments": moments, "extremes": extremes}


@dataclass(frozen=True, eq=False, repr=False)
class Captured:
    """One tensor of one call of a layer.

    Attributes:
        path, what, batch, call, position: see `Where`.
        shape: of the tensor, before it was reduced.
    """

    path: str
    what: What
    batch: int | None
    call: int
    position: int
    shape: tuple[int, ...]
    _kept: Any

    def __repr__(self) -> str:
        size = "x".join(map(str, self.shape)) or "scalar"
        batch = "" if self.batch is None else f", batch {self.batch}"
        return f"<Captured: {self.what} {self.position} of {self.path or 'the model'}{batch}, call {self.call}: {size}>"

    @property
    def value(self) -> Any:
        """The copy, read from its file where it is in one; or what the reducer made."""
        return self._kept.read() if isinstance(self._kept, OnDisk) else self._kept


class Capture(Displayed, LayerHooks):
    """What was captured, in the order in which it happened; see `capture`.

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
        example: Any,
    ) -> None:
        super().__init__(model, layers, what, every)
        self._layers, self._reduced, self._reduce = layers, reduce is not None, reducer_of(reduce)
        device = device_of(model)
        self._store = Store(to, limit_mib, device)
        self._entries: list[Captured] = []
        self._whole = self._channels = 0
        self.expected: Size | None = None
        """What one forward pass would add as full copies, where an example was given; in memory how long it takes."""
        if example is not None:
            self.expected = size_of(model, layers, what, as_example(model, example))
            if not self._reduced and self.expected.bytes > self._store.limit:
                raise self._too_much(f"one forward pass takes {mib(self.expected.bytes)}", self.expected)
            if to == "cpu" or (to == "device" and device.type == "cpu"):
                self.expected = replace(self.expected, copy_ms=copy_ms(self.expected.bytes, device))

    def __iter__(self) -> Iterator[Captured]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, path: str) -> list[Captured]:
        """Return all of one layer.

        Raises:
            KeyError: nothing of it was captured.
            UsageError: it is no path of a module.
        """
        if not isinstance(path, str):
            raise UsageError(f"record[...]: expected the path of a module, such as 'layer1.0', got {path!r}")
        found = [entry for entry in self._entries if entry.path == path]
        if not found:
            raise KeyError(f"{path!r}: nothing of it was captured; {nearest(path, {e.path for e in self._entries})}")
        return found

    def find(
        self, pattern: str = "*", what: What | None = None, *, batch: int | None = None, call: int | None = None
    ) -> list[Captured]:
        """Return those of the layers that a glob matches, of one kind, one forward pass, or the same call in each."""
        return [
            entry
            for entry in self._entries
            if (entry.path == pattern or fnmatchcase(entry.path, pattern))
            and what in (None, entry.what)
            and batch in (None, entry.batch)
            and call in (None, entry.call)
        ]

    def values(self, pattern: str = "*", what: What | None = None) -> list[Any]:
        """Return the values of what `find` finds."""
        return [entry.value for entry in self.find(pattern, what)]

    def rows(self) -> list[dict[str, Any]]:
        """Return every tensor in the order in which it was captured: which it is, and its shape as text."""
        return [
            {
                **{name: getattr(entry, name) for name in Where._fields},
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
        """How much is kept."""
        return self._store.bytes

    def clear(self) -> None:
        """Forget what was captured so far; files stay."""
        self._entries.clear()
        self._store.bytes = self._whole = self._channels = 0

    def seen(self, where: Where, values: Tensor, axis: int) -> None:
        """Keep a tensor, or what is made of it."""
        refuse_nested(values, str(where))
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if self._reduced:
                with torch.autocast(values.device.type, enabled=False):
                    made = self._reduce(values.detach(), axis)
            else:
                made = values
            self._whole += values.numel() * values.element_size()
            self._channels += values.shape[axis] if values.dim() else 1
            kept = self._store.keep(made, values, lambda: f"{where.path}_{where.what}", self._full(where))
        self._entries.append(Captured(*where, tuple(values.shape), kept))

    def _full(self, where: Where) -> Any:
        def error(needed: int) -> Exception:
            passes = max(self._begun, 1)
            so_far = Size(len(self._entries) + 1, self._whole, self._channels)
            kept = f"{plural(len(self._entries), 'tensor')} of {plural(passes, 'forward pass', 'es')}"
            text = f"{where} takes {mib(needed)} more, after {kept} that take {mib(self._store.bytes)}"
            return self._too_much(text, so_far)

        return error

    def _too_much(self, what: str, size: Size) -> UsageError:
        least = 4 * size.channels
        where = "memory" if self._store.folder is None else "disk"
        advice = f"every=, to=FOLDER or limit_mib={_enough(size.bytes)}"
        if least < size.bytes:
            advice = f"reduce='mean' ({mib(least)} instead of {mib(size.bytes)}), {advice}"
        return UsageError(f"capture: {what}, and the limit of {where} is {mib(self._store.limit)}; use {advice}")


def _enough(count: int) -> int:
    return -(-count // 2**20)


def capture(
    model: nn.Module,
    layers: Layers,
    what: What | Iterable[What] = "output",
    *,
    reduce: Named | Reducer | None = None,
    every: int = 1,
    to: StrPath = "cpu",
    limit_mib: float | None = None,
    example: Any = None,
) -> Capture:
    """Capture what layers read and make, every call in its order, for as long as the `with` lasts.

    Each tensor is copied, or reduced, when it is seen, so that nothing that is done in place changes it afterwards.
    A gradient is seen on its way: the backward pass belongs inside the `with`. `grad_input` is what the layer
    itself sends back, without what other readers of the same tensor do. Inputs that need no gradient have none. Works
    on dense, masked and compact models, alone or beside other hooks, which run in the order in which they were
    registered; when the `with` ends, also by an exception, no hook is left.

    Projections of attention modules, whose weights are used without their modules' being called, are captured where
    they are chosen: `*.out_proj`, `*.in_proj_weight` (one call where queries, keys and values are of one tensor, else
    three in this order). Attention modules are then computed by their equivalents, which
    differ from them in rounding at most. The second forward of activation checkpointing is not captured again.

    Args:
        model: not compiled, and not changed.
        layers: globs over module paths (`*` also stands for dots), classes of modules (`nn.Conv2d`), channel groups, or
            several of these.
        what: `input`, `output`, `grad_input`, `grad_output`, or several of them.
        reduce: what is kept in place of a copy: a function of a tensor, `mean` (channels,), `moments` (2, channels:
            mean and root mean square) or `extremes` (2, channels); channels are on the last axis behind linear
            layers, else on axis 1.
        every: of so many forward passes the first; calls outside of `model(...)` all count.
        to: `cpu`; `device`, where the tensors are; or a new folder, for a file of safetensors each.
        limit_mib: how much is kept at most; None: half of the memory, or of the disk, that is free.
        example: what the model is called with, a tensor, a tuple of positional arguments or a mapping of arguments by
            name: `expected` then says what full copies of a forward pass on it take before anything is captured, and
            how long copying that takes.

    Raises:
        UsageError: a glob, a class or a group matches nothing; or, in a forward pass or with `example` at once, full
            copies are beyond the limit; the message says how much they take and which reducer avoids it.
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
    return Capture(
        model, layers, what, reduce=reduce, every=every, to=to, limit_mib=limit_mib, example=example
    )  # fmt: skip
