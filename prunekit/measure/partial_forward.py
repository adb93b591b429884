"""Partial forward passes of masked models: calls before the first masked tensor return the dense model's results.

Until a masked model reads a masked tensor, it computes the same as the dense model on the same samples. So the calls of
torch's functions up to there are not run again: their recorded results are returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.channels.tracing.storages import storage_of
from prunekit.hooks.model_copy import named_tensors
from prunekit.statistics.linear_layers import CallInterceptor, FunctionCall
from prunekit.statistics.watch import PassHooks
from prunekit.utils.inputs import call, sample_count
from prunekit.utils.tensors import gather, map_tensors

MEMORY_BYTES = 2**31
"""Limit of the dense results that are kept for one batch; groups that need more run as a whole."""
WHOLE = 1
"""The first call: a pass from there on is a whole one."""

Masked = Callable[[str], AbstractContextManager[Any]]
"""Returns a context manager that masks a group, by its name."""


class DensePrefix:
    """Runs a model with a group masked, from the first call on that differs from the dense model.

    This is tried on a few samples, group by group: if the outputs are not the same to the last bit (as code that torch
    does not see reads a tensor, or writes to one), that group's passes run as a whole. So do all passes over a batch on
    which the dense model makes other calls, as a model that loops over its samples.

    Args:
        model: dense, in eval mode.
        inputs: a few samples, as a tensor or an example, see `prunekit.utils.inputs.as_example`; below too.
        tensors: by a group's name the names of the tensors that its masks change.
        masked: see `Masked`.
        batch: number of samples of the largest batch to come.
    """

    def __init__(
        self, model: nn.Module, inputs: Any, tensors: Mapping[str, Iterable[str]], masked: Masked, batch: int
    ) -> None:
        self._model = model
        self._results: dict[int, Any] = {}
        accesses = _MemoryAccesses(model)
        accesses.run(inputs)
        self._calls, self._alike = accesses.calls, True
        starts = {name: accesses.start(read) for name, read in tensors.items()}
        self.starts, self._needed = accesses.affordable(starts, MEMORY_BYTES * sample_count(inputs) // max(1, batch))
        self.record(inputs)
        for name in self.starts:
            with masked(name):
                if not _equal(self.run(name, inputs), call(model, _copied(inputs))):
                    self.starts[name] = WHOLE

    def record(self, inputs: Any) -> Any:
        """Run the dense model, and keep the results that later passes need until the next call of this."""
        self._results.clear()
        recorder = _DenseRecorder(self._model, self._needed, self._results)
        output = recorder.run(inputs)
        self._alike = recorder.calls == self._calls
        return output

    def run(self, name: str, inputs: Any) -> Any:
        """Run the model with a group masked, which the caller has done, on the inputs that were recorded last."""
        if self.starts[name] == WHOLE or not self._alike:
            return call(self._model, _copied(inputs))
        return _Replay(self._model, self.starts[name], self._results).run(inputs)


class _NumberedCalls(CallInterceptor):
    """Numbers the calls inside forward passes; masks make other calls before one begins."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.calls: list[str] = []
        self._model = model
        self._pass = _PassStart(model, self)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._pass.inside:
            return function(*args, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)

    def run(self, inputs: Any) -> Any:
        """Run one forward pass, on copies of the inputs, as a model may write to them."""
        given = _copied(inputs)
        with self._pass, self.intercepting():
            return call(self._model, given)


class _PassStart(PassHooks):
    """Notices the start of a pass of the model, after the hooks that exist already."""

    def __init__(self, model: nn.Module, counted: _NumberedCalls) -> None:
        super().__init__(model)
        self._counted = counted

    def register_hooks(self) -> None:
        """Look at nothing else."""

    def start_pass(self) -> None:
        self._counted.number = 0


class _MemoryAccesses(_NumberedCalls):
    """The calls that read, create and write to each piece of memory, in one dense forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._parameters = {name: _place(tensor) for name, tensor in named_tensors(model)}
        self._born: dict[int, int] = {}
        self._read: dict[int, list[float]] = {}
        self._written: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        self._made: dict[int, list[int]] = {}
        self._alive: list[Any] = []  # or another tensor would get the same place

    def run(self, inputs: Any) -> Any:
        output = super().run(inputs)
        for tensor in gather(output):
            self._read.setdefault(_place(tensor), []).append(math.inf)
        return output

    def call(self, call: FunctionCall) -> Any:
        """Note what it reads, writes to and creates."""
        self.calls.append(call.name)
        given = gather((call.args, dict(call.named)))
        versions = [tensor._version for tensor in given]
        result = call.run()
        made = gather(result)
        for tensor, version in zip(given, versions, strict=True):
            self._read.setdefault(_place(tensor), []).append(call.number)
            if tensor._version != version:
                self._written[_place(tensor)] = call.number
        for tensor in made:
            self._born.setdefault(_place(tensor), call.number)
            self._bytes[_place(tensor)] = tensor.numel() * tensor.element_size()
        self._made[call.number] = [_place(tensor) for tensor in made]
        self._alive.append((given, made))
        return result

    def start(self, names: Iterable[str]) -> int:
        """Return the first call that must run when some tensors change: none before it reads them.

        Nor does a later call write to a result of an earlier one: results are kept as they are at the end of the pass.
        """
        reads = [self._read.get(self._parameters[name], [math.inf])[0] for name in names]
        start = min([*reads, self.number + 1])
        while True:
            torn = [self._born.get(p, 0) for p, last in self._written.items() if self._born.get(p, 0) < start <= last]
            if not torn:
                return max(WHOLE, int(start))
            start = min(torn)

    def affordable(self, starts: Mapping[str, int], limit: int) -> tuple[dict[str, int], frozenset[int]]:
        """Return the starts whose results fit into the limit, late ones first, and the calls to keep results of."""
        places: set[int] = set()
        chosen = dict.fromkeys(starts, WHOLE)
        for name, start in sorted(starts.items(), key=lambda item: -item[1]):
            needed = {p for p, reads in self._read.items() if self._born.get(p, start) < start <= reads[-1]}
            if sum(self._bytes[place] for place in places | needed) <= limit:
                places |= needed
                chosen[name] = start
        return chosen, frozenset(number for number, made in self._made.items() if places.intersection(made))


class _DenseRecorder(_NumberedCalls):
    """Records the results of a dense pass: tensors if they are needed, else placeholders of their shape."""

    def __init__(self, model: nn.Module, needed: frozenset[int], results: dict[int, Any]) -> None:
        super().__init__(model)
        self._needed, self._results = needed, results

    def call(self, call: FunctionCall) -> Any:
        self.calls.append(call.name)
        result = call.run()
        self._results[call.number] = result if call.number in self._needed else map_tensors(result, _placeholder)
        return result


class _Replay(_NumberedCalls):
    """Returns recorded results up to a call, and runs from there on."""

    def __init__(self, model: nn.Module, start: int, results: Mapping[int, Any]) -> None:
        super().__init__(model)
        self._start, self._results = start, results

    def call(self, call: FunctionCall) -> Any:
        return call.run() if call.number >= self._start else self._results[call.number]


def _copied(inputs: Any) -> tuple[Any, ...]:
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    return tuple(map_tensors(item, torch.clone) for item in given)


def _place(tensor: Tensor) -> int:
    """Return the address of a tensor's values, or the tensor's own if it has no storage."""
    storage = storage_of(tensor)
    return id(tensor) if storage is None else storage.data_ptr()


def _placeholder(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _equal(one: Any, other: Any) -> bool:
    pairs = list(zip(gather(one), gather(other), strict=True))
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
