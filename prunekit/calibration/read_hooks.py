"""Hooks that see what the layers of a model read and make in each forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.calibration.consumers import Consumer, ReadWatch, See
from prunekit.calibration.passes import PassHooks, run_passes
from prunekit.channels.substitutes import SUBSTITUTES, substitute_all

_Note = Callable[[Consumer, Tensor, int], None]


class WatchedPasses(PassHooks):
    """Passes in which the layers with a weight are seen at the level of torch's functions, where that is asked for."""

    _reads: ReadWatch | None = None
    _reading = False

    def watch_reads(self, before: See, after: See, watch: type[ReadWatch] = ReadWatch) -> None:
        """Watches torch's functions while the model runs.

        Until this owner has left, attention modules that hide their projections from torch's functions are their
        equivalents, and attention's fast path is off.
        """
        self.own(_SlowAttention())
        self.own(_Substituted(self._model))
        self._reads = watch(self._model, before, after)

    def remove(self) -> None:
        """Removes every hook of this owner, also when a pass was interrupted."""
        super().remove()
        self._stop_reading()

    def _enter(self, *forward: Any) -> None:
        super()._enter(*forward)
        if self._depth == 1 and self._reads is not None:
            self._reads.__enter__()  # type: ignore[no-untyped-call]
            self._reading = True

    def _leave(self, *forward: Any) -> None:
        if self._depth == 1:
            self._stop_reading()
        super()._leave(*forward)

    def _stop_reading(self) -> None:
        if self._reading and self._reads is not None:
            self._reading = False
            self._reads.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._reads.forget()


class ReadHooks(WatchedPasses):
    """Sees the input of every layer with a weight in each forward pass; subclasses say what becomes of it.

    Inside the `with`, attention modules that hide their projections from torch's functions are their equivalents, and
    attention's fast path is off.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.consumers: dict[str, Consumer] = {}
        """Those that were called so far, by their path."""

    def see(self, consumer: Consumer, values: Tensor, axis: int) -> None:
        """Takes note of an input, which a later layer may overwrite; `axis` holds the channels."""

    def made(self, consumer: Consumer, values: Tensor, axis: int) -> None:
        """Takes note of an output."""

    def watch(self) -> None:
        """Prepares the watch over torch's functions, which is on while the model runs."""
        self.watch_reads(self._before, self._after)

    def _before(self, consumer: Consumer, values: Tensor, axis: int) -> None:
        if self.inside and values.is_floating_point():
            self.consumers.setdefault(consumer.path, consumer)
            self._hand(self.see, consumer, values, axis)

    def _after(self, consumer: Consumer, values: Tensor, axis: int) -> None:
        if self.inside and values.is_floating_point():
            self._hand(self.made, consumer, values, axis)

    def _hand(self, note: _Note, consumer: Consumer, values: Tensor, axis: int) -> None:
        with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            found = self.measurable(values, axis)
            if found is not None:
                note(consumer, *found)


class _Finder(ReadHooks):
    def begin(self) -> None:
        """Nothing is kept between passes."""

    def keep(self) -> None:
        """Nothing is kept between passes."""


def find_consumers(model: nn.Module, inputs: Any) -> dict[str, Consumer]:
    """The layers that read channels through a weight, by their path, in the order in which they first run.

    Args:
        model: runs once, in eval mode without gradients; every module is afterwards in the mode it had.
        inputs: a few samples, as `arguments` takes them.
    """
    finder = _Finder(model)
    run_passes(model, [(inputs,)], None, finder)
    return finder.consumers


class _SlowAttention:
    """Attention's fast path off, until removed."""

    def __init__(self) -> None:
        self._before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)

    def remove(self) -> None:
        torch.backends.mha.set_fastpath_enabled(self._before)


class _Substituted:
    """Equivalents in place of attention modules that read their weights out of torch's sight, until removed."""

    def __init__(self, model: nn.Module) -> None:
        originals = [module for module in model.modules() if type(module) in SUBSTITUTES]
        before = [(module, type(module), dict(vars(module))) for module in originals]
        substitute_all(model)
        self._changes = [(module, kind, _changed(vars(module), old), old) for module, kind, old in before]

    def remove(self) -> None:
        while self._changes:
            module, kind, names, old = self._changes.pop()
            module.__class__ = kind
            for name in names:
                if name in old:
                    setattr(module, name, old[name])
                else:
                    delattr(module, name)


def _changed(now: dict[str, Any], old: dict[str, Any]) -> list[str]:
    return [name for name, value in now.items() if name not in old or old[name] is not value]
