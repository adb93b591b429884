"""Watching a running model: hooks that act within whole forward passes, and get what layers with a weight read.

Such a layer is a consumer of channels. It is found by the identity of its weight, whatever its module.

`watch` runs a model once over each batch, forward, for all observers. What needs more runs the model itself: Taylor
terms and gains go backward, errors under masks compare several passes over a batch, and fits stop a pass and
resume it.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.channels.tracing.execution import without_fast_path
from prunekit.channels.tracing.storages import is_plain
from prunekit.channels.tracing.substitutes import substitute_all, substitute_of
from prunekit.errors import UsageError
from prunekit.hooks.hook import refuse_compiled
from prunekit.hooks.model_copy import named_tensors
from prunekit.hooks.owner import HookOwner
from prunekit.statistics.layer_stats import Side
from prunekit.statistics.linear_layers import WEIGHT_FUNCTIONS, CallInterceptor, FunctionCall
from prunekit.utils.context import device_of, training_mode, without_gradients
from prunekit.utils.inputs import (
    Counted,
    Keywords,
    call,
    counted_positions,
    decoder_shape,
    inputs_as_example,
    inputs_in,
    rows_of,
    running,
    sequence_shape,
    to_device,
)
from prunekit.utils.private_torch import in_function_transform, without_torch_function
from prunekit.utils.progress import tracked


@dataclass(frozen=True)
class Consumer:
    """A layer that multiplies its input channels with a weight."""

    weight: str  # its name in the model
    channels: int  # of its input
    groups: int = 1  # of channels that are read separately
    input_axis: int = 1  # axis of the weight that belongs to the input; 0 if it is stored transposed

    @property
    def path(self) -> str:
        """The key of its statistics: the module's path where the weight is called `weight`, else the weight's name."""
        module, _, name = self.weight.rpartition(".")
        return module if name == "weight" else self.weight

    def columns(self, weight: Tensor) -> Tensor:
        """Return the entries of the weight for each channel, (channels, outputs x taps)."""
        if self.input_axis == 0:
            return weight.flatten(1)
        rows = weight.reshape(self.groups, -1, *weight.shape[1:])  # (groups, outputs of each, channels of each, *taps)
        return rows.movedim(2, 1).flatten(0, 1).flatten(1)


_MIXING = frozenset(
    {"__get__", "t", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "flip", "roll", "rot90",
     "sort", "bmm", "mv", "dot", "einsum", "outer", "kron", "tensordot", "index_select", "gather", "take_along_dim"}
)  # fmt: skip
"""Functions that move the entries of a weight, or sum over them."""

ConsumerCallback = Callable[[Consumer, Tensor, int], Tensor | None]
"""Gets a consumer, its input or output, and which axis of that holds the channels; returns a replacement or None."""


class ConsumerInterceptor(CallInterceptor):
    """Passes each input and output of a layer with a weight to callbacks, before a later layer may overwrite it.

    A weight may be computed in the pass, as weight standardization does: a tensor that is made of the model's own
    tensors alone, entry by entry, and has the shape of exactly one of them stands for that one.
    """

    def __init__(self, model: nn.Module, before: ConsumerCallback, after: ConsumerCallback) -> None:
        super().__init__(model)
        self._before, self._after = before, after
        self._shapes = {name: tensor.shape for name, tensor in named_tensors(model)}
        self._made: dict[int, tuple[Tensor, frozenset[str]]] = {}

    def forget(self) -> None:
        """Forget the weights that were computed in a pass."""
        self._made.clear()

    def call(self, call: FunctionCall) -> Any:
        """Pass the input and output of a layer to the callbacks, and make its call."""
        function = WEIGHT_FUNCTIONS.get(call.name)
        if function is None:
            result = call.run()
            self._follow(call, result)
            return result
        values, weight = (call.argument(place, name) for place, name in zip(function[:2], function.names, strict=True))
        name = self._name_of(weight) if isinstance(weight, Tensor) and weight.dim() == function.spatial + 2 else None
        if name is None:
            return call.run()
        groups = call.argument(6, "groups") or 1
        consumer = Consumer(name, values.size(function.axis(values)), int(groups), function.input_axis)
        replaced = self._before(consumer, values, function.axis(values))
        result = (call if replaced is None else call.with_argument(function.inputs, function.names[0], replaced)).run()
        changed = self._after(consumer, result, function.axis(result))
        return result if changed is None else changed

    def _sources(self, tensor: Tensor) -> frozenset[str]:
        """Return the names of the model's tensors that a tensor is made of; none if it is also made of others."""
        name = self.names.get(id(tensor))
        if name is not None:
            return frozenset({name})
        made = self._made.get(id(tensor))
        return frozenset() if made is None else made[1]

    def _name_of(self, weight: Tensor) -> str | None:
        alike = [name for name in self._sources(weight) if self._shapes[name] == weight.shape]
        return alike[0] if len(alike) == 1 else None

    def _follow(self, call: FunctionCall, result: Any) -> None:
        found: frozenset[str] = frozenset()
        for value in (*call.args, *call.named.values()):
            if isinstance(value, Tensor):
                sources = self._sources(value)
                if not sources:
                    return
                found |= sources
        if found and isinstance(result, Tensor) and call.name not in _MIXING:
            self._made[id(result)] = result, found  # referenced, or its id might become another's


class PassHooks(HookOwner):
    """Hooks that act within each forward pass of a model.

    Calls outside of `model(...)`, such as the second forward of activation checkpointing, do not count, and neither
    does a forward pass that raises. Subclasses override `register_hooks`, `start_pass` and `finish_pass`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._depth = 0
        self._passes = 0
        self._dealt = 0, 1
        self._calls: Counter[Hashable] = Counter()
        self._interceptor: ConsumerInterceptor | None = None
        self._intercepting = False
        self.counted: Counted | None = None  # which positions of the pass are not padding, see `counted_positions`
        self.sequences: list[tuple[int, int]] = []  # (B, T) of samples that are sequences, and of a decoder's

    def dealt(self, rank: int, of: int) -> None:
        """Take the passes for every `of`-th of a data set's, from number `rank`; `number` counts accordingly."""
        self._dealt = rank, of

    @property
    def number(self) -> int:
        """Number of the running pass, or of the next one, from 0."""
        rank, of = self._dealt
        return rank + of * self._passes

    def register_hooks(self) -> None:
        """Register the hooks that act within a pass."""
        raise NotImplementedError

    def start_pass(self) -> None:
        """Prepare for a pass; the one before may have raised."""

    def finish_pass(self) -> None:
        """Add the results of the finished pass."""

    def ordinal(self, *key: Hashable) -> int:
        """Return how often the running pass asked for this key before: the number of a layer's call, from 0."""
        self._calls[key] += 1
        return self._calls[key] - 1

    def intercept_consumers(self, before: ConsumerCallback, after: ConsumerCallback) -> None:
        """Pass the inputs and outputs of consumers to callbacks while the model runs.

        Until this owner exits, attention modules that hide their projections from torch's functions are replaced by
        equivalents, and attention's fast path is off.
        """
        self.own_context(without_fast_path())
        self.own_context(_substituted(self._model))
        self._interceptor = ConsumerInterceptor(self._model, before, after)

    def register(self) -> None:
        """Register the hooks on the model."""
        refuse_compiled(self._model, type(self).__name__)
        self._depth = 0
        self.own_forward_pre(self._model, self._enter)
        self.register_hooks()
        self.own_forward(self._model, self._finish)
        self.own_forward(self._model, self._leave, always=True)

    @property
    def inside(self) -> bool:
        """True if a forward pass of the model is running, without a transform such as vmap, which hides values."""
        return self._depth > 0 and not in_function_transform()

    def require_passes(self) -> None:
        """Raise `UsageError` if the model has not run inside the `with`."""
        if self._passes == 0:
            name = type(self).__name__
            raise UsageError(f"no forward pass was seen: call the model itself inside `with {name}(model)`")

    def measurable(self, values: Tensor, axis: int) -> tuple[Tensor, int] | None:
        """Return an activation and its channel axis; the parts of a nested one are concatenated, channels last.

        None for one whose values are not stored one by one, such as a sparse one.
        """
        if values.is_nested:
            rows = torch.cat(values.unbind())
            return rows, rows.dim() - 1
        return (values, axis) if is_plain(values) else None

    def without_padding(self, values: Tensor, axis: int) -> tuple[Tensor, int]:
        """Return an activation without the positions that are padding, and its channel axis.

        Only activations of sequences are changed, (B, T, ..., channels) or (B, channels, T).
        """
        if self.counted is None or (axis == 1 and values.dim() > 3):
            return values, axis
        last = values.movedim(axis, -1) if values.dim() == 3 else values
        found = rows_of(last, self.counted)
        return (values, axis) if found is last else (found, axis + found.dim() - values.dim() if axis > 1 else 1)

    def _enter(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._depth == 0:
            with without_torch_function():  # these computations are not the model's
                example = (*given, Keywords(named))
                self.counted = counted_positions(self._model, example)
                shapes = (of(self._model, example) for of in (sequence_shape, decoder_shape))
                self.sequences = [shape for shape in shapes if shape is not None]
            self._calls.clear()
            self.start_pass()
        self._depth += 1  # a model may call itself
        if self._depth == 1 and self._interceptor is not None:
            self._interceptor.__enter__()  # type: ignore[no-untyped-call]
            self._intercepting = True

    def _finish(self, *forward: Any) -> None:
        if self._depth == 1:
            self._passes += 1
            self.finish_pass()

    def _leave(self, *forward: Any) -> None:
        if self._depth == 1:
            self._stop_intercepting()
        self._depth -= 1

    def remove(self) -> None:
        """Remove every hook of this owner, also when a pass was interrupted."""
        super().remove()
        self._stop_intercepting()

    def _stop_intercepting(self) -> None:
        if self._intercepting and self._interceptor is not None:
            self._intercepting = False
            self._interceptor.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._interceptor.forget()


class MeasurementCache:
    """Measurements of tensors in the running pass, valid until they are written to; most inputs are another's output.

    It keeps no tensor alive.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], int, Hashable, Any]] = {}
        self.clear = self._found.clear

    def get(self, tensor: Tensor, how: Hashable) -> Any:
        """Return the measurement of a tensor in the same way; None if there is none."""
        if tensor.is_inference() or id(tensor) not in self._found:
            return None
        reference, version, known, found = self._found[id(tensor)]
        return found if reference() is tensor and (version, known) == (tensor._version, how) else None

    def put(self, tensor: Tensor, how: Hashable, found: Any) -> None:
        """Store the measurement of a tensor."""
        if not tensor.is_inference():  # it has no version counter, which tells whether it was written to
            self._found[id(tensor)] = weakref.ref(tensor), tensor._version, how, found


class ConsumerHooks(PassHooks):
    """Hooks that get the input and output of every consumer in each forward pass; subclasses handle them.

    Inside the `with`, attention modules are replaced as by `intercept_consumers`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.consumers: dict[str, Consumer] = {}  # those that were called so far, by their path
        self._running: dict[Any, Any] = {}
        self._cache = MeasurementCache()

    def start_pass(self) -> None:
        """Drop the results of a pass that raised."""
        self._running.clear()
        self._cache.clear()

    def on_values(self, consumer: Consumer, side: Side, values: Tensor, axis: int) -> None:
        """Handle an input or output, which a later layer may overwrite; `axis` holds the channels."""

    def register_hooks(self) -> None:
        """Intercept the consumers."""
        self.intercept_consumers(partial(self._hand, "input"), partial(self._hand, "output"))

    def _hand(self, side: Side, consumer: Consumer, values: Tensor, axis: int) -> None:
        if self.inside and values.is_floating_point():
            self.consumers.setdefault(consumer.path, consumer)
            with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
                found = self.measurable(values, axis)
                if found is not None:
                    self.on_values(consumer, side, *found)


def watch(
    model: nn.Module,
    batches: Iterable[Any],
    *observers: HookOwner | CallInterceptor,
    device: torch.device | str | None = None,
    title: str = "calibration",
    total: int | None = None,
) -> int:
    """Run a model over batches, in eval mode without gradients, watched by observers; return the number of batches.

    All observers see the same passes. An owner of hooks is entered once, before the first batch; an interceptor, which
    numbers the calls of a pass, anew for each batch, with the inputs of that pass. A batch is a model's inputs, or a
    tuple or list whose first entry they are. `title` and `total` are those of the progress bar.

    A model whose code takes gradients fails without them, and runs on the batch again: `begin_pass` of each owner is
    called before both passes.
    """
    place, count = device_of(model, device), 0
    owners = [owner for owner in observers if isinstance(owner, HookOwner)]

    def forward(given: tuple[Any, ...]) -> None:
        for owner in owners:
            owner.begin_pass()
        call(model, given)

    with training_mode(model, False), torch.compiler.set_stance("force_eager"), ExitStack() as entered:
        for owner in owners:
            entered.enter_context(owner)
        for batch in tracked(batches, title, total=total):
            count += 1
            given = to_device(inputs_as_example(model, inputs_in(batch)), place)
            with running(model, given), ExitStack() as during:
                for interceptor in observers:
                    if isinstance(interceptor, CallInterceptor):
                        during.enter_context(interceptor.during(given))
                without_gradients(partial(forward, given))
    return count


@contextmanager
def _substituted(model: nn.Module) -> Iterator[None]:
    """Replace attention modules whose projections torch's functions do not show by equivalents."""
    originals = [module for module in model.modules() if substitute_of(type(module)) is not None]
    before = [(module, type(module), dict(vars(module))) for module in originals]
    changes = []
    try:
        try:
            substitute_all(model)
        finally:
            for module, kind, old in before:
                names = [name for name, value in vars(module).items() if name not in old or old[name] is not value]
                changes.append((module, kind, names, old))
        yield
    finally:
        for module, kind, names, old in reversed(changes):
            module.__class__ = kind
            for name in names:
                if name in old:
                    setattr(module, name, old[name])
                else:
                    delattr(module, name)
