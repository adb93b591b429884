"""Forward passes that stop at a call, keep what the calls behind it read, and go on from there later.

A pass that goes on runs the model's Python from the start; calls that were made before are not made again: each gives
what was kept of its result, or a blank of the same shape where nothing behind reads it. So whatever Python a model is
made of, memory is that of the tensors that are live at one place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from prunekit.calibration.layers import Call, CallWatch
from prunekit.nested import gather
from prunekit.repair.kept import Blank, Kept, rebuilt
from prunekit.repair.lifetimes import Key, Lifetimes


class DivergedError(BaseException):
    """A pass made other calls than the one before it, or needs what was not kept."""


class _Stopped(BaseException):
    """Unwinds a forward pass; no `except Exception` of a model stops it."""


class _Mark(NamedTuple):
    """On a tensor: which pass made it, and where; and what it stands for if it has no values."""

    owner: object
    key: Key
    blank: Blank | None = None


class ResumableRun(CallWatch):
    """Runs a model on one batch after another, each from where it was kept.

    Args:
        model: in eval mode.
        norms: as for `CallWatch`.

    Attributes:
        lifetimes: how long results are needed, from `learn`.
    """

    def __init__(self, model: nn.Module, norms: Iterable[str] = ()) -> None:
        super().__init__(model, norms)
        self.lifetimes = Lifetimes()
        self._model = model
        self._fixed = frozenset(
            tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]
        )
        self._learning = False
        self._kept: Kept | None = None
        self._begin(None, 0, 0)

    def before(self, call: Call) -> None:
        """What happens before a call, also one that is not made again."""

    def after(self, call: Call, result: Any) -> None:
        """What happens after it."""

    def learn(self, inputs: tuple[Tensor, ...]) -> None:
        """Runs the model on a few samples to see how long each result is needed, and how large it is."""
        self._learning, self.lifetimes = True, Lifetimes(samples=len(inputs[0]))
        try:
            self._run(inputs, None, 0, 0)
        finally:
            self._learning = False

    def run(self, inputs: tuple[Tensor, ...], kept: Kept | None, keep_at: int, stop_at: int) -> Kept | None:
        """One pass over one batch.

        Args:
            inputs: the batch.
            kept: where to go on from; None: the start.
            keep_at: number of the call before which the pass is kept; 0: it stays as it was.
            stop_at: number of the call that is not made any more.

        Returns:
            What is kept now.

        Raises:
            DivergedError: `kept` does not fit this pass.
        """
        again = kept is not None and not keep_at
        self._run(inputs, kept.copied(self._fixed) if again and kept is not None else kept, keep_at, stop_at)
        return self._found if keep_at else kept

    def _run(self, inputs: tuple[Tensor, ...], kept: Kept | None, keep_at: int, stop_at: int) -> None:
        self._begin(kept, keep_at, stop_at)
        given = [self._input(i, tensor) for i, tensor in enumerate(inputs)]
        with self.watching():
            try:
                self._model(*given)
            except _Stopped:
                pass
            finally:
                self._kept = None
                self._live.clear()
                self._blanks.clear()

    def _begin(self, kept: Kept | None, keep_at: int, stop_at: int) -> None:
        self._owner, self._step, self._new = object(), 0, 0
        self._kept, self._keep_at, self._stop_at = kept, keep_at, stop_at
        self._skip = 0 if kept is None else len(kept.calls)
        self._calls: list[tuple[str, Any]] = []
        self._found: Kept | None = None
        self._live: dict[Key, weakref.ref[Tensor]] = {}
        self._blanks: dict[Key, Tensor] = {}

    def _input(self, index: int, tensor: Tensor) -> Tensor:
        """A model may write into what it is given, so it gets a copy; where nothing reads it any more, a blank."""
        key = (0, index)
        if self._kept is None:
            copy = tensor.clone()
            if self._learning:
                self.lifetimes.born(key, copy)
            return self._marked(copy, key)
        kept = self._kept.tensors.get(key)
        return self._tensor(Blank.of(key, tensor)) if kept is None else self._marked(kept, key)

    def _marked(self, tensor: Tensor, key: Key, blank: Blank | None = None) -> Tensor:
        tensor._prunekit_place = _Mark(self._owner, key, blank)  # type: ignore[attr-defined]
        if blank is None:
            self._live[key] = weakref.ref(tensor)
        return tensor

    def _mark(self, tensor: Tensor) -> _Mark | None:
        mark: _Mark | None = getattr(tensor, "_prunekit_place", None)
        return mark if mark is not None and mark.owner is self._owner else None

    def real(self, tensor: Tensor) -> Tensor:
        """A tensor that has values.

        Raises:
            DivergedError: they were not kept.
        """
        mark = self._mark(tensor)
        if mark is not None and mark.blank is not None:
            raise DivergedError
        return tensor

    def call(self, call: Call) -> Any:
        """Keeps, stops or goes on."""
        if call.number == self._keep_at:
            self._found = self._keep(self._stop_at > self._keep_at)
        if self._learning:
            self.lifetimes.steps[call.number] = self._step
        self.before(call)
        if call.number == self._stop_at:
            raise _Stopped
        result = call.run()
        self.after(call, result)
        return result

    def look(self, name: str, function: Any, /, *args: Any, **named: Any) -> Any:
        """A blank has its own strides in memory."""
        mark = self._mark(args[0]) if name == "stride" and args else None
        if mark is None or mark.blank is None:
            return function(*args, **named)
        return mark.blank.stride[args[1]] if len(args) > 1 else mark.blank.stride

    def compute(self, name: str, function: Any, /, *args: Any, **named: Any) -> Any:
        """Makes a call, or gives what it gave before."""
        self._step, self._new = self._step + 1, 0
        if self._step <= self._skip:
            return self._again(name)
        inputs = [self.real(tensor) for tensor in gather((args, named))]
        made = [(mark.key, tensor) for tensor in inputs for mark in [self._mark(tensor)] if mark is not None]
        if self._learning:
            self.lifetimes.read((key for key, _ in made), self._step)
        result = function(*args, **named)
        if name == "__iter__":
            result = list(result)
        self._calls.append((name, self._noted(result, inputs, made)))
        return iter(result) if name == "__iter__" else result

    def _noted(self, result: Any, inputs: list[Tensor], made: list[tuple[Key, Tensor]]) -> Any:
        """A result without its values; tensors that were there before are themselves."""
        if isinstance(result, (tuple, list)):
            return rebuilt(result, [self._noted(item, inputs, made) for item in result])
        if not isinstance(result, Tensor):
            return result
        mark = self._mark(result)
        if mark is None:
            if any(result is tensor for tensor in inputs):
                return result  # a parameter, or what an earlier pass left in a module
            key = (self._step, self._new)
            self._new += 1
            if self._learning:
                self.lifetimes.born(key, result, made)
            self._marked(result, key)
            return Blank.of(key, result)
        return Blank.of(mark.key, result)

    def _again(self, name: str) -> Any:
        assert self._kept is not None
        known, result = self._kept.calls[self._step - 1]
        if known != name:
            raise DivergedError
        self._calls.append((known, result))
        given = self._given(result)
        return iter(given) if name == "__iter__" else given

    def _given(self, result: Any) -> Any:
        if isinstance(result, Blank):
            return self._tensor(result)
        if isinstance(result, (tuple, list)):
            return rebuilt(result, [self._given(item) for item in result])
        return result

    def _tensor(self, blank: Blank) -> Tensor:
        assert self._kept is not None
        kept = self._kept.tensors.get(blank.key)
        if kept is not None:
            return self._marked(kept, blank.key)
        if blank.key not in self._blanks:
            self._blanks[blank.key] = self._marked(blank.tensor(), blank.key, blank)
        return self._blanks[blank.key]

    def _keep(self, copied: bool) -> Kept:
        found = {key: self._live[key]() for key in self.lifetimes.live(self._step) if key in self._live}
        kept = Kept(list(self._calls), {key: tensor for key, tensor in found.items() if tensor is not None})
        return kept.copied(self._fixed) if copied else kept
