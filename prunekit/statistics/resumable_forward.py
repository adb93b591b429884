"""Resumable forward passes: they stop at a call, save the tensors that later calls read, and continue from there.

A model's Python can't be entered in the middle. So a pass that continues runs it from the start, but makes no earlier
call of torch's functions again: each returns its saved result, or a blank of the same shape if no later call reads it.

    step    call             first pass     saved before step 4      continued pass
    1       a = conv(x)      computed       shape of a               a blank
    2       b = relu(a)      computed       b, as step 5 reads it    b
    3       c = bn(a)        computed       c, as step 4 reads it    c
    4       d = conv(c)      stop                                    computed
    5       e = d + b                                                computed

So memory is that of the tensors that are live at one place: those made at a step <= t and read at a step > t. Which
these are is learned from one pass over few samples (`Lifetimes`).

1. A step is one call of any function of torch; every pass over a batch makes the same ones, or raises `DivergedError`.
2. A tensor is known by (step, number) of where it was made, an attribute that the pass which made it gives to it.
3. Every read goes through `real`, so that a blank's values (NaN, or the largest number) get nowhere unseen.
4. Tensors of a state share memory as they did in the pass, and parameters with the model: it may change them meanwhile.
5. A pass is opaque from the first write or allocation that no function shows; no state is saved behind that.

Code that does not call torch's functions (scripted and traced code, C++ extensions, autograd's own) can't be skipped:
it runs again in every pass. Its operators are recorded at the dispatcher, so that what they read is saved in every
state. Nothing is saved behind an operation that can't be recorded there either, see `ResumableRun.opaque`.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from prunekit.channels.tracing.storages import is_plain, memory_of, storage_of
from prunekit.statistics.linear_layers import CallInterceptor, FunctionCall
from prunekit.utils.context import same_attributes
from prunekit.utils.inputs import call, sample_count
from prunekit.utils.private_torch import OpOverload, is_functorch_wrapper, without_torch_function
from prunekit.utils.tensors import gather, map_tensors, write_count

TensorKey = tuple[int, int]
"""Origin of a tensor: the step of the call, 0 for the inputs of the model, and its number among those made there."""


@dataclass
class Lifetimes:
    """The first and the last step at which each tensor of a forward pass is used.

    A step is one call of any of torch's functions.
    """

    samples: int = 1  # that the pass ran on
    # by the number of a call, as `CallInterceptor` counts them, the steps before it
    steps: dict[int, int] = field(default_factory=dict)
    _last: dict[TensorKey, int] = field(default_factory=dict)
    _pinned: set[TensorKey] = field(default_factory=set)
    _memory: dict[TensorKey, int] = field(default_factory=dict)
    _sizes: list[int] = field(default_factory=list)

    def born(self, key: TensorKey, tensor: Tensor, inputs: Iterable[tuple[TensorKey, Tensor]] = ()) -> None:
        """Record a tensor as it is made; it may be a view of one of the inputs."""
        storage = tensor.untyped_storage()
        shared = [self._memory[other] for other, given in inputs if given.untyped_storage()._cdata == storage._cdata]
        if not shared:
            self._sizes.append(storage.nbytes())
        self._memory[key] = shared[0] if shared else len(self._sizes) - 1
        self._last[key] = key[0]

    def read(self, keys: Iterable[TensorKey], step: int) -> None:
        """Record tensors that a call reads."""
        for key in keys:
            self._last[key] = max(step, self._last.get(key, 0))

    def pin(self, key: TensorKey) -> None:
        """Record a tensor that is read again whenever a pass continues, so that it is live from then on."""
        self._pinned.add(key)

    def live(self, step: int) -> Iterator[TensorKey]:
        """Return tensors that were made up to a step and are read later."""
        return (key for key, last in self._last.items() if key[0] <= step and (step < last or key in self._pinned))

    def held_bytes(self) -> dict[int, float]:
        """Return the memory of a sample's live tensors before each call, by the number of the call."""
        held = self._summed(0)
        return {number: float(held[step]) / self.samples for number, step in self.steps.items()}

    def peak_bytes(self) -> float:
        """Return the most memory that a sample's tensors take while any call runs, its result included."""
        return float(self._summed(1).max()) / self.samples

    def _summed(self, beyond: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the memory at each step of tensors that live until `beyond` steps after their last use."""
        spans: dict[int, tuple[int, int]] = {}
        end = 1 + max([0, *self._last.values(), *self.steps.values()])
        for key, memory in self._memory.items():
            first, last = spans.get(memory, (key[0], key[0]))
            until = end if key in self._pinned else self._last[key] + beyond
            spans[memory] = (min(first, key[0]), max(last, until))
        changes = np.zeros(2 + max((last for _, last in spans.values()), default=0), dtype=np.int64)
        for memory, (first, last) in spans.items():
            changes[first] += self._sizes[memory]
            changes[last] -= self._sizes[memory]
        total: np.ndarray[tuple[int], np.dtype[np.int64]] = np.cumsum(changes)
        padding = max(0, 1 + max(self.steps.values(), default=0) - len(total))
        return np.pad(total, (0, padding))


_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of results that stay the same; an array of NumPy or a storage shares memory."""
_ADDRESSES = frozenset({"data_ptr", "const_data_ptr", "mutable_data_ptr"})
_ALLOCATIONS = frozenset(
    {
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
    }
)
"""Operators whose memory is filled by something else than operators."""


class ResumableRun(CallInterceptor):
    """A model in eval mode that runs on one batch after another, each from its saved state."""

    def __init__(self, model: nn.Module, norms: Iterable[str] = ()) -> None:
        super().__init__(model, norms)
        self.lifetimes = Lifetimes()  # of the tensors of a pass, from `learn`
        self.expected: tuple[str, ...] | None = None  # names of the calls that a pass must make; None: any
        self._model = model
        storages = map(storage_of, [*model.parameters(), *model.buffers()])
        self._fixed = frozenset(storage.data_ptr() for storage in storages if storage is not None)
        self._learning = False
        self._empty: dict[Blank, Tensor] = {}  # of earlier passes, as making them takes longer than the calls
        self._kept: PassState | None = None
        self._depth = 0
        self._begin(None, 0, 0)

    def before(self, call: FunctionCall) -> None:
        """Act before a call, also one that is not made again; subclasses override it."""

    def after(self, call: FunctionCall, result: Any) -> None:
        """Act after a call; subclasses override it."""

    def learn(self, inputs: tuple[Any, ...], stop_at: int = 0) -> Any:
        """Run the model on a few samples to learn the lifetime and size of each result, up to a call (0: of all).

        Returns:
            What the model returns; None if it was stopped.
        """
        self._learning, self.lifetimes, self.expected = True, Lifetimes(samples=sample_count(inputs)), None
        try:
            return self._run(inputs, None, 0, stop_at)
        finally:
            self._learning = False

    def run(self, inputs: tuple[Any, ...], kept: PassState | None, keep_at: int, stop_at: int) -> PassState | None:
        """Run one pass over one batch."""
        again = kept is not None and not keep_at
        try:
            self._run(inputs, kept.copied(self._fixed) if again and kept is not None else kept, keep_at, stop_at)
        except Exception as error:  # of code that hides that a blank was read
            if kept is None:
                raise
            raise DivergedError from error
        if self._leaked:
            raise DivergedError
        return self._found if keep_at else kept

    def _run(self, inputs: tuple[Any, ...], kept: PassState | None, keep_at: int, stop_at: int) -> Any:
        self._begin(kept, keep_at, stop_at)
        numbers = count()
        given = map_tensors(inputs, lambda tensor: self._input(next(numbers), tensor))
        unfused = torch.jit.optimized_execution(False)  # type: ignore[attr-defined]
        with same_attributes(self._model), self.intercepting(), _DispatchMode(self), unfused:
            try:
                return call(self._model, given)
            finally:
                self._kept = None
                for table in (self._live, self._blanks, self._pinned, self._contents):
                    table.clear()
        return None  # it was stopped

    def _begin(self, kept: PassState | None, keep_at: int, stop_at: int) -> None:
        self._owner, self._step, self._new = object(), 0, 0
        self._kept, self._keep_at, self._stop_at = kept, keep_at, stop_at
        self._skip = 0 if kept is None else len(kept.calls)
        self._calls: list[tuple[str, Any]] = []
        self._found: PassState | None = None
        self._live: dict[TensorKey, weakref.ref[Tensor]] = {}
        self._blanks: dict[TensorKey, Tensor] = {}
        self._blank_ids: set[int] = set()
        # opaque: whether the pass did something that can't be resumed from a saved state: memory was made or written to
        # without torch's functions, or gradients or transforms of functions were taken
        self.opaque = self._leaked = False
        self._pinned: dict[TensorKey, Tensor] = {}
        self._untracked: dict[int, weakref.ref[Tensor]] = {}
        self._contents: dict[int, tuple[int, int]] = {}

    def _input(self, index: int, tensor: Tensor) -> Tensor:
        """Return a copy of an input, as the model may write to it; a blank if no later call reads it."""
        key = (0, index)
        if self._kept is None:
            copy = tensor.clone()
            if self._learning:
                self.lifetimes.born(key, copy)
            return self._marked(copy, key)
        kept = self._kept.tensors.get(key)
        return self._restored(Blank.of(key, tensor)) if kept is None else self._marked(kept, key)

    def _marked(self, tensor: Tensor, key: TensorKey, blank: Blank | None = None) -> Tensor:
        tensor._prunekit_place = _TensorMark(self._owner, key, blank)  # type: ignore[attr-defined]
        if blank is None:
            self._live[key] = weakref.ref(tensor)
        return tensor

    def _mark(self, tensor: Tensor) -> _TensorMark | None:
        mark: _TensorMark | None = getattr(tensor, "_prunekit_place", None)
        return mark if mark is not None and mark.owner is self._owner else None

    def real(self, tensor: Tensor) -> Tensor:
        """Return a tensor if it has values."""
        mark = self._mark(tensor)
        if mark is not None and mark.blank is not None:
            raise DivergedError
        return tensor

    def call(self, call: FunctionCall) -> Any:
        """Save the state, stop, or make a call."""
        if self.expected is not None and self.expected[call.number - 1 : call.number] != (call.name,):
            raise DivergedError
        if call.number == self._keep_at and not self.opaque and call.number in self.lifetimes.steps:
            self._found = self._keep(self._stop_at > self._keep_at)
        if self._learning and not self.opaque:
            self.lifetimes.steps[call.number] = self._step
        self.before(call)
        if call.number == self._stop_at:
            self.stop()
        result = call.run()
        self.after(call, result)
        return result

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._depth += 1
        try:
            return super().__torch_function__(function, types, args, kwargs)
        finally:
            self._depth -= 1

    def leave_norm(self, given: tuple[Any, ...], result: Any) -> None:
        """Run the hooks of a module that is left, as part of a call."""
        with self._tracked():
            super().leave_norm(given, result)

    @contextmanager
    def _tracked(self) -> Iterator[None]:
        """Mark operators in this context as part of a call of one of torch's functions."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def on_transform(self) -> None:
        """Mark the pass as opaque: tensors of a transform of functions exist only in it."""
        self._mark_opaque()

    def _mark_opaque(self) -> None:
        """Mark the pass as opaque from here: anything that is live may be read and written to."""
        self.opaque = True
        self._read_all()

    def _read_all(self) -> None:
        if self._learning:
            self.lifetimes.read((key for key, known in self._live.items() if known() is not None), self._step)

    def is_tracked(self, function: Any, args: Any) -> bool:
        """Return whether an operator, as nearly all do, belongs to a call that has checked its arguments."""
        inside = self._depth > 0 and not self._learning and isinstance(function, OpOverload)
        return inside and self._blank_ids.isdisjoint(map(id, args))

    def run_operator(self, function: Any, args: Any, named: Any) -> Any:
        """Run an operator; what it reads without a call of torch's functions is saved in every state."""
        with self._tracked(), without_torch_function():
            tensors = gather((args, named))
            marks = [(tensor, mark) for tensor in tensors for mark in [self._mark(tensor)] if mark is not None]
            if any(mark.blank is not None for _, mark in marks):
                self._leaked = True
                raise DivergedError
            if not isinstance(function, OpOverload):  # of functions, which may have captured other tensors
                self._read_all()
            elif self._learning:
                self.lifetimes.read((mark.key for _, mark in marks), self._step)
            result = function(*args, **named)
            if self._depth == 1:
                self._record_untracked(function, result, marks)
            return result

    def _record_untracked(self, function: Any, result: Any, marks: list[tuple[Tensor, _TensorMark]]) -> None:
        """Record an operator that runs in every pass."""
        known = isinstance(function, OpOverload)
        if not known or function._schema.is_mutable or function.overloadpacket in _ALLOCATIONS:
            self._mark_opaque()
        for tensor, mark in marks:
            self._pinned[mark.key] = tensor
            if self._learning:
                self.lifetimes.pin(mark.key)
        self._untracked |= {memory_of(tensor): weakref.ref(tensor) for tensor in gather(result)}

    def _is_untracked(self, tensor: Tensor) -> bool:
        """Return whether its memory was made by an operator that runs in every pass."""
        made = self._untracked.get(memory_of(tensor))
        return made is not None and made() is not None

    def query(self, name: str, function: Any, /, *args: Any, **named: Any) -> Any:
        """Read an attribute; a blank gives the strides of the tensor, and blanks for tensors such as `mT`."""
        mark = self._mark(args[0]) if args and isinstance(args[0], Tensor) else None
        if mark is not None and mark.blank is not None:
            layout = name in {"stride", "is_contiguous"}
            args = (mark.blank.layout() if layout else mark.blank.tensor(), *args[1:])
        looked = function(*args, **named)
        if not isinstance(looked, (Tensor, tuple, *_PLAIN)):
            self._mark_opaque()
        return looked

    def compute(self, name: str, function: Any, /, *args: Any, **named: Any) -> Any:
        """Make a call, or return its saved result."""
        self._step, self._new = self._step + 1, 0
        if self._step <= self._skip:
            return self._replay(name)
        if name in _ADDRESSES:
            self._mark_opaque()
        inputs = [self.real(tensor) for tensor in gather((args, named))]
        made = [(mark.key, tensor) for tensor in inputs for mark in [self._mark(tensor)] if mark is not None]
        if self._learning:
            self.lifetimes.read((key for key, _ in made), self._step)
            for _, tensor in made:
                self._require_same(tensor)
        known = [write_count(tensor) for tensor in inputs]
        result = function(*args, **named)
        if name == "__iter__":
            result = list(result)
        self._written([tensor for tensor, version in zip(inputs, known, strict=True) if write_count(tensor) != version])
        self._calls.append((name, self._described(result, inputs, made)))
        if self._learning:
            for tensor in (*inputs, *gather(result)):
                if self._mark(tensor) is not None and _plain(tensor):
                    self._contents[memory_of(tensor)] = self._step, _checksum(tensor)
        return iter(result) if name == "__iter__" else result

    def _require_same(self, tensor: Tensor) -> None:
        """Compare memory with its checksum; if it was written to untracked, states are saved only before that step."""
        step, contents = self._contents.get(memory_of(tensor), (0, None))
        if contents is not None and contents != _checksum(tensor):
            self._mark_opaque()
            steps = self.lifetimes.steps
            self.lifetimes.steps = {number: earlier for number, earlier in steps.items() if earlier < step}

    def _written(self, tensors: list[Tensor]) -> None:
        """Mark the pass as opaque if memory was written to that does not belong to this pass alone."""
        for tensor in tensors:
            if (
                self._mark(tensor) is None
                or tensor.untyped_storage().data_ptr() in self._fixed
                or self._is_untracked(tensor)
                or any(memory_of(tensor) == memory_of(pinned) for pinned in self._pinned.values())
            ):
                self._mark_opaque()

    def _described(self, result: Any, inputs: list[Tensor], made: list[tuple[TensorKey, Tensor]]) -> Any:
        """Return a result with blanks for its tensors, except for those that existed before the pass."""
        if isinstance(result, (tuple, list)):
            return rebuilt(result, [self._described(item, inputs, made) for item in result])
        if not isinstance(result, Tensor):
            if not isinstance(result, _PLAIN):
                self._mark_opaque()
            return result
        mark = self._mark(result)
        if not _plain(result) or (mark is None and self._is_untracked(result)):
            self._mark_opaque()
            return None
        if mark is None:
            if any(result is tensor for tensor in inputs):
                return result  # a parameter, or a tensor that an earlier pass left in a module
            key = (self._step, self._new)
            self._new += 1
            if self._learning:
                self.lifetimes.born(key, result, made)
            self._marked(result, key)
            return Blank.of(key, result)
        return Blank.of(mark.key, result)

    def _replay(self, name: str) -> Any:
        assert self._kept is not None
        known, result = self._kept.calls[self._step - 1]
        if known != name:
            raise DivergedError
        self._calls.append((known, result))
        given = self._replayed(result)
        return iter(given) if name == "__iter__" else given

    def _replayed(self, result: Any) -> Any:
        if isinstance(result, Blank):
            return self._restored(result)
        if isinstance(result, (tuple, list)):
            return rebuilt(result, [self._replayed(item) for item in result])
        return result

    def _restored(self, blank: Blank) -> Tensor:
        assert self._kept is not None
        kept = self._kept.tensors.get(blank.key)
        if kept is not None:
            return self._marked(kept, blank.key)
        if blank.key not in self._blanks:
            if blank not in self._empty:
                self._empty[blank] = blank.tensor()
            self._blanks[blank.key] = self._marked(self._empty[blank], blank.key, blank)
            self._blank_ids.add(id(self._blanks[blank.key]))
        return self._blanks[blank.key]

    def _keep(self, copied: bool) -> PassState:
        found = {key: self._live[key]() for key in self.lifetimes.live(self._step) if key in self._live}
        kept = PassState(list(self._calls), {key: tensor for key, tensor in found.items() if tensor is not None})
        return kept.copied(self._fixed) if copied else kept


@dataclass(frozen=True, eq=False)
class PassState:
    """The saved state of a pass over one batch: results of its first calls, without values, and the live tensors."""

    calls: list[tuple[str, Any]]  # name and result of each call, with `Blank` for tensors
    tensors: dict[TensorKey, Tensor]  # live ones by where they were made; they share memory as they did in the pass

    def copied(self, fixed: frozenset[int]) -> PassState:
        """Return a copy with memory of its own, except for that at the addresses `fixed`."""
        storages: dict[int, torch.UntypedStorage] = {}
        return PassState(self.calls, {key: _copied(tensor, storages, fixed) for key, tensor in self.tensors.items()})


class Blank(NamedTuple):
    """The description of a tensor of a result, without its values."""

    key: TensorKey
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, key: TensorKey, tensor: Tensor) -> Blank:
        """Describe a tensor that was made there."""
        return cls(key, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def tensor(self) -> Tensor:
        """Return a tensor of this shape that takes no memory, with values that are noticed wherever they get to."""
        return torch.full((), _poison(self.dtype), dtype=self.dtype, device=self.device).expand(self.shape)

    def layout(self) -> Tensor:
        """Return a tensor of the same strides without memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class DivergedError(BaseException):
    """A pass made other calls than the one before it, or needs a tensor that was not saved."""


class _TensorMark(NamedTuple):
    """An attribute of a tensor: the pass that made it, where, and its description if it is a blank."""

    owner: object
    key: TensorKey
    blank: Blank | None = None


class _DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that passes all operators at the dispatcher to a run."""

    supports_higher_order_operators = True

    def __init__(self, run: ResumableRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._run.is_tracked(function, args):
            return function(*args, **(kwargs or {}))
        return self._run.run_operator(function, args, kwargs or {})


def rebuilt(result: Any, items: list[Any]) -> Any:
    """Return a tuple or list of the same type."""
    return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)


def _copied(tensor: Tensor, storages: dict[int, torch.UntypedStorage], fixed: frozenset[int]) -> Tensor:
    """Return a view like `tensor` of a copy of its memory, the same copy for all that share it."""
    storage = tensor.untyped_storage()
    if storage.data_ptr() in fixed:
        return tensor
    copy = storages.setdefault(storage.data_ptr(), storage.clone())  # type: ignore[no-untyped-call]
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())


def _plain(tensor: Tensor) -> bool:
    """Return whether a tensor is plain memory: not sparse, nor with gradients, nor within a transform."""
    own = is_plain(tensor) and not is_functorch_wrapper(tensor)
    return own and (not tensor.requires_grad or isinstance(tensor, nn.Parameter))


def _poison(dtype: torch.dtype) -> float:
    """Return NaN, or the largest value of a type without it."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _checksum(tensor: Tensor) -> int:
    """Return a checksum of all the memory that a tensor is in."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return zlib.crc32(memory.cpu().numpy().data)
