"""Hooks that act within whole forward passes of a model."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.channels.storages import is_plain
from prunekit.context import device_of, training_mode, without_gradients
from prunekit.errors import UsageError
from prunekit.hooks import HookOwner, refuse_compiled
from prunekit.inputs import (
    Keywords,
    arguments,
    call,
    counted_positions,
    inputs_in,
    moved,
    rows_of,
    running,
    sequence_shape,
)
from prunekit.progress import tracked


class PassHooks(HookOwner):
    """Hooks between one that opens and one that closes each forward pass of a model.

    What runs outside of `model(...)`, such as the second forward of activation checkpointing, is not counted, and nor
    is a forward pass that raises. Subclasses override `watch`, `begin` and `keep`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._depth = 0
        self._passes = 0
        self._dealt = 0, 1
        self.counted: Tensor | None = None
        """Which positions of the running pass's samples are no padding, see `counted_positions`."""
        self.sequences: tuple[int, int] | None = None
        """(B, T) of samples that are sequences, see `sequence_shape`."""

    def dealt(self, rank: int, of: int) -> None:
        """Says that the passes are every `of`-th of a data set's, from number `rank`: they are numbered accordingly."""
        self._dealt = rank, of

    @property
    def number(self) -> int:
        """Of the running pass, or the next one, from 0."""
        rank, of = self._dealt
        return rank + of * self._passes

    def watch(self) -> None:
        """Registers the hooks that look into the pass."""
        raise NotImplementedError

    def begin(self) -> None:
        """Forgets what a pass that raised has left."""
        raise NotImplementedError

    def keep(self) -> None:
        """Adds what the finished pass showed."""
        raise NotImplementedError

    def register(self) -> None:
        """Hooks the model.

        Raises:
            ModelError: it is compiled.
        """
        refuse_compiled(self._model, type(self).__name__)
        self._depth = 0
        self.own_forward_pre(self._model, self._enter, again=True)
        self.watch()
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
        """An activation and its channel axis; of a nested one all parts, one behind the other, channels last.

        None for one whose values aren't there one by one, as of sparse ones.
        """
        if values.is_nested:
            rows = torch.cat(values.unbind())
            return rows, rows.dim() - 1
        return (values, axis) if is_plain(values) else None

    def without_padding(self, values: Tensor, axis: int) -> tuple[Tensor, int]:
        """What an activation holds at positions that are no padding, and its channel axis.

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
            self.begin()
        self._depth += 1  # a model may call itself

    def _finish(self, *forward: Any) -> None:
        if self._depth == 1:
            self._passes += 1
            self.keep()

    def _leave(self, *forward: Any) -> None:
        self._depth -= 1


def run_passes(model: nn.Module, batches: Iterable[Any], device: torch.device | str | None, *owners: HookOwner) -> None:
    """Runs a model over batches, in eval mode without gradients, while the owners look on.

    Args:
        model: every module is afterwards in the mode it had.
        batches: inputs as `arguments` takes them, or tuples and lists whose first entry is that.
        device: where they go; None: where the model's parameters are.
    """
    place = device_of(model, device)
    with training_mode(model, False), torch.compiler.set_stance("force_eager"), ExitStack() as entered:
        for owner in owners:
            entered.enter_context(owner)
        for batch in tracked(batches, "calibration"):
            given = moved(arguments(model, inputs_in(batch)), place)
            with running(model, given):
                without_gradients(partial(call, model, given))
