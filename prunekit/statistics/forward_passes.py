"""Hooks that act within whole forward passes of a model, and see what its layers read and make in them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.channels.rewrite.substitutes import substitute_all, substitutes
from prunekit.channels.tracing.execution import without_fast_path
from prunekit.channels.tracing.storages import is_plain
from prunekit.errors import UsageError
from prunekit.hooks.hook import refuse_compiled
from prunekit.hooks.owner import HookOwner
from prunekit.statistics.consumers import Consumer, ConsumerCallback, ConsumerInterceptor
from prunekit.utils.context import device_of, training_mode, without_gradients
from prunekit.utils.inputs import (
    Keywords,
    call,
    counted_positions,
    inputs_as_example,
    inputs_in,
    rows_of,
    running,
    sequence_shape,
    to_device,
)
from prunekit.utils.progress import tracked


class PassHooks(HookOwner):
    """Hooks between one that opens and one that closes each forward pass of a model.

    What runs outside of `model(...)`, such as the second forward of activation checkpointing, is not counted, and nor
    is a forward pass that raises. Subclasses override `register_hooks`, `start_pass` and `finish_pass`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._depth = 0
        self._passes = 0
        self._dealt = 0, 1
        self._calls: Counter[Hashable] = Counter()
        self._reads: ConsumerInterceptor | None = None
        self._reading = False
        self.counted: Tensor | None = None
        """Which positions of the running pass's samples are no padding, see `counted_positions`."""
        self.sequences: tuple[int, int] | None = None
        """(B, T) of samples that are sequences, see `sequence_shape`."""

    def dealt(self, rank: int, of: int) -> None:
        """Say that the passes are every `of`-th of a data set's, from number `rank`: they are numbered accordingly."""
        self._dealt = rank, of

    @property
    def number(self) -> int:
        """Of the running pass, or the next one, from 0."""
        rank, of = self._dealt
        return rank + of * self._passes

    def register_hooks(self) -> None:
        """Register the hooks that look into the pass."""
        raise NotImplementedError

    def start_pass(self) -> None:
        """Forget what a pass that raised has left."""

    def finish_pass(self) -> None:
        """Add what the finished pass showed."""

    def ordinal(self, *key: Hashable) -> int:
        """Return how often the running pass has asked for a key before, from 0: which call of a layer it is."""
        self._calls[key] += 1
        return self._calls[key] - 1

    def intercept_consumers(
        self, before: ConsumerCallback, after: ConsumerCallback, watch: type[ConsumerInterceptor] = ConsumerInterceptor
    ) -> None:
        """Watch torch's functions while the model runs.

        Until this owner has left, attention modules that hide their projections from torch's functions are their
        equivalents, and attention's fast path is off.
        """
        self.own_context(without_fast_path())
        self.own_context(_substituted(self._model))
        self._reads = watch(self._model, before, after)

    def register(self) -> None:
        """Hooks the model.

        Raises:
            ModelError: it is compiled.
        """
        refuse_compiled(self._model, type(self).__name__)
        self._depth = 0
        self.own_forward_pre(self._model, self._enter, again=True)
        self.register_hooks()
        self.own_forward(self._model, self._finish, again=True)
        self.own_forward(self._model, self._leave, again=True, always=True)

    @property
    def inside(self) -> bool:
        """Whether a forward pass of the model is running, and no transform such as vmap: it hides values."""
        return self._depth > 0 and torch._C._functorch.peek_interpreter_stack() is None

    def require_passes(self) -> None:
        """Checks that there is something to return.

        Raises:
            UsageError: the model has not run inside the `with`.
        """
        if self._passes == 0:
            name = type(self).__name__
            raise UsageError(f"no forward pass was seen: call the model itself inside `with {name}(model)`")

    def measurable(self, values: Tensor, axis: int) -> tuple[Tensor, int] | None:
        """Return an activation and its channel axis; of a nested one all parts, one behind the other, channels last.

        None for one whose values aren't there one by one, as of sparse ones.
        """
        if values.is_nested:
            rows = torch.cat(values.unbind())
            return rows, rows.dim() - 1
        return (values, axis) if is_plain(values) else None

    def without_padding(self, values: Tensor, axis: int) -> tuple[Tensor, int]:
        """Return what an activation holds at positions that are no padding, and its channel axis.

        Args:
            values: (B, T, ..., channels) or (B, channels, T) of sequences; others stay as they are.
            axis: of the channels.
        """
        if self.counted is None or (axis == 1 and values.dim() > 3):
            return values, axis
        last = values.movedim(axis, -1) if values.dim() == 3 else values
        found = rows_of(last, self.counted)
        return (values, axis) if found is last else (found, axis + found.dim() - values.dim() if axis > 1 else 1)

    def _enter(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._depth == 0:
            with torch._C.DisableTorchFunction():  # what is computed here is not the model's
                example = (*given, Keywords(named))
                self.counted = counted_positions(self._model, example)
                self.sequences = sequence_shape(self._model, example)
            self._calls.clear()
            self.start_pass()
        self._depth += 1  # a model may call itself
        if self._depth == 1 and self._reads is not None:
            self._reads.__enter__()  # type: ignore[no-untyped-call]
            self._reading = True

    def _finish(self, *forward: Any) -> None:
        if self._depth == 1:
            self._passes += 1
            self.finish_pass()

    def _leave(self, *forward: Any) -> None:
        if self._depth == 1:
            self._stop_reading()
        self._depth -= 1

    def remove(self) -> None:
        """Remove every hook of this owner, also when a pass was interrupted."""
        super().remove()
        self._stop_reading()

    def _stop_reading(self) -> None:
        if self._reading and self._reads is not None:
            self._reading = False
            self._reads.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._reads.forget()


class MeasurementCache:
    """What was measured of tensors in the running pass, as long as nobody writes to them; it keeps none of them alive.

    Most inputs are another module's output.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], int, Hashable, Any]] = {}
        self.clear = self._found.clear

    def get(self, tensor: Tensor, how: Hashable) -> Any:
        """Return what was put for a tensor that was measured in the same way; None without."""
        if tensor.is_inference() or id(tensor) not in self._found:
            return None
        reference, version, known, found = self._found[id(tensor)]
        return found if reference() is tensor and (version, known) == (tensor._version, how) else None

    def put(self, tensor: Tensor, how: Hashable, found: Any) -> None:
        """Take note of what was measured of a tensor."""
        if not tensor.is_inference():  # without a version counter nobody knows whether it was written to
            self._found[id(tensor)] = weakref.ref(tensor), tensor._version, how, found


class ConsumerHooks(PassHooks):
    """Sees the input of every layer with a weight in each forward pass; subclasses say what becomes of it.

    Inside the `with`, attention modules that hide their projections from torch's functions are their equivalents, and
    attention's fast path is off.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.consumers: dict[str, Consumer] = {}
        """Those that were called so far, by their path."""
        self._running: dict[Any, Any] = {}
        self._measured = MeasurementCache()

    def start_pass(self) -> None:
        """Forget what a pass that raised has left."""
        self._running.clear()
        self._measured.clear()

    def on_input(self, consumer: Consumer, values: Tensor, axis: int) -> None:
        """Take note of an input, which a later layer may overwrite; `axis` holds the channels."""

    def on_output(self, consumer: Consumer, values: Tensor, axis: int) -> None:
        """Take note of an output."""

    def register_hooks(self) -> None:
        """Prepare the watch over torch's functions, which is on while the model runs."""
        self.intercept_consumers(self._before, self._after)

    def _before(self, consumer: Consumer, values: Tensor, axis: int) -> None:
        if self.inside and values.is_floating_point():
            self.consumers.setdefault(consumer.path, consumer)
            self._hand(self.on_input, consumer, values, axis)

    def _after(self, consumer: Consumer, values: Tensor, axis: int) -> None:
        if self.inside and values.is_floating_point():
            self._hand(self.on_output, consumer, values, axis)

    def _hand(
        self, note: Callable[[Consumer, Tensor, int], None], consumer: Consumer, values: Tensor, axis: int
    ) -> None:
        with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            found = self.measurable(values, axis)
            if found is not None:
                note(consumer, *found)


def run_passes(model: nn.Module, batches: Iterable[Any], device: torch.device | str | None, *owners: HookOwner) -> None:
    """Run a model over batches, in eval mode without gradients, while the owners look on.

    Args:
        model: every module is afterwards in the mode it had.
        batches: inputs as `inputs_as_example` takes them, or tuples and lists whose first entry is that.
        device: where they go; None: where the model's parameters are.
    """
    place = device_of(model, device)
    with training_mode(model, False), torch.compiler.set_stance("force_eager"), ExitStack() as entered:
        for owner in owners:
            entered.enter_context(owner)
        for batch in tracked(batches, "calibration"):
            given = to_device(inputs_as_example(model, inputs_in(batch)), place)
            with running(model, given):
                without_gradients(partial(call, model, given))


def find_consumers(model: nn.Module, inputs: Any) -> dict[str, Consumer]:
    """Return the layers that read channels through a weight, by their path, in the order in which they first run.

    Args:
        model: runs once, in eval mode without gradients; every module is afterwards in the mode it had.
        inputs: a few samples, as `inputs_as_example` takes them.
    """
    finder = ConsumerHooks(model)
    run_passes(model, [(inputs,)], None, finder)
    return finder.consumers


@contextmanager
def _substituted(model: nn.Module) -> Iterator[None]:
    """Put equivalents in place of attention modules that read their weights out of torch's sight."""
    originals = [module for module in model.modules() if type(module) in substitutes()]
    before = [(module, type(module), dict(vars(module))) for module in originals]
    substitute_all(model)
    changes = [(module, kind, _changed(vars(module), old), old) for module, kind, old in before]
    try:
        yield
    finally:
        for module, kind, names, old in reversed(changes):
            module.__class__ = kind
            for name in names:
                if name in old:
                    setattr(module, name, old[name])
                else:
                    delattr(module, name)


def _changed(now: dict[str, Any], old: dict[str, Any]) -> list[str]:
    return [name for name, value in now.items() if name not in old or old[name] is not value]
