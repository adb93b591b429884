"""State that a public call leaves as it was if it fails: settings of the process, modes and gradients of modules."""

from __future__ import annotations

import gc
import random
import traceback
import warnings
from collections.abc import Callable, Container, Mapping, MutableMapping
from contextlib import _GeneratorContextManager, suppress
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from prunekit.modes.usual_modes import AUTOCAST_DEVICES
from prunekit.utils.private_torch import (
    compile_stance,
    dispatch_modes,
    function_modes,
    global_hooks,
    leave_dispatch_modes,
    set_compile_stance,
    set_function_modes,
    set_global_hooks,
)


class ProcessState:
    """The state of the process at one moment, to go back to.

    Every mode is entered by a context manager, which undoes it also on errors. Only an interruption may come between:
    after a mode was set and before the `with` statement knows of it.
    """

    def __init__(self) -> None:
        self._values = [read() for read, _ in _PARTS]

    def restore(self, error: BaseException) -> None:
        """Go back to this state, after what `error` interrupted has been closed."""
        _close_what_was_open(error)
        for (_, write), value in zip(_PARTS, self._values, strict=True):
            write(value)


def finished(undo: Callable[[], object]) -> None:
    """Undo something, once more from its beginning where an interruption comes meanwhile."""
    try:
        undo()
    except KeyboardInterrupt:
        undo()
        raise


def interruption_in(error: BaseException, handled: BaseException | None) -> KeyboardInterrupt | None:
    """Return the interruption that came before an error; None if there was none."""
    found: BaseException | None = error
    while found is not None and found is not handled:
        if isinstance(found, KeyboardInterrupt):
            return found
        found = found.__context__
    return None


def _close_what_was_open(error: BaseException) -> None:
    """Close contexts that an interruption kept from being left, before their frames are freed in whatever order."""
    for frame in reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)]):
        for value in [*frame.f_locals.values()]:
            with suppress(Exception):  # one that runs, or that raises itself
                if isinstance(value, _GeneratorContextManager):
                    value.gen.close()
                elif isinstance(value, torch.inference_mode):
                    value.__exit__(None, None, None)


def _autocast() -> tuple[int, bool, list[tuple[str, bool, torch.dtype]]]:
    states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in AUTOCAST_DEVICES]
    depth = min(torch.autocast_increment_nesting(), torch.autocast_decrement_nesting())
    return depth, torch.is_autocast_cache_enabled(), states


def _set_autocast(state: tuple[int, bool, list[tuple[str, bool, torch.dtype]]]) -> None:
    depth, cached, states = state
    while torch.autocast_increment_nesting() - 1 > depth:
        torch.autocast_decrement_nesting()
        torch.autocast_decrement_nesting()
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(cached)
    for kind, enabled, dtype in states:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _cuda_random_states() -> list[torch.Tensor]:
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_rng_state_all() if in_use else []


def _warnings() -> tuple[Any, list[Any], Any]:
    return warnings.filters, [*warnings.filters], warnings.showwarning


def _set_warnings(state: tuple[Any, list[Any], Any]) -> None:
    filters, content, shown = state
    if warnings.filters is not filters or [*filters] != content or warnings.showwarning is not shown:
        filters[:] = content
        vars(warnings).update(filters=filters, showwarning=shown)


_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
_PARTS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (function_modes, set_function_modes),  # the default device is one
    (dispatch_modes, leave_dispatch_modes),
    (compile_stance, set_compile_stance),
    (global_hooks, set_global_hooks),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (_autocast, _set_autocast),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    *(
        (getattr(torch.backends.cuda, f"{name}_sdp_enabled"), getattr(torch.backends.cuda, f"enable_{name}_sdp"))
        for name in _KERNELS
    ),
    (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    (_warnings, _set_warnings),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    (_cuda_random_states, torch.cuda.set_rng_state_all),
)
"""How each part of the state is read, and how it is written."""


_CONTAINERS = (dict, list, set)


class ModuleState:
    """The state of a model at one moment, to go back to.

    Dictionaries, lists and sets that are attributes, and those of parameters, buffers, submodules and hooks, hold
    afterwards what they held; what was written into a tensor stays.

    Args:
        model: that the state is of.
        without: attributes that are left as they are.
    """

    def __init__(self, model: nn.Module, without: Container[str] = ()) -> None:
        self._without = without
        self._modules = [_ModuleParts.of(module, without) for module in model.modules()]

    def restore(self) -> None:
        """Go back to this state."""
        for module, kind, own, held in self._modules:
            if type(module) is not kind:
                module.__class__ = kind
            attributes = vars(module)
            for name in [name for name in attributes if name not in own and name not in self._without]:
                del attributes[name]
            attributes.update(own)
            for value, content in held:
                value.clear()
                value.extend(content) if isinstance(value, list) else value.update(content)


class _ModuleParts(NamedTuple):
    """A module, its class, its attributes, and those of them that are containers, with a copy each."""

    module: nn.Module
    kind: type[nn.Module]
    own: dict[str, Any]
    held: list[tuple[Any, Any]]

    @classmethod
    def of(cls, module: nn.Module, without: Container[str]) -> _ModuleParts:
        own = {name: value for name, value in vars(module).items() if name not in without}
        held = [(value, copy(value)) for value in own.values() if isinstance(value, _CONTAINERS)]
        return cls(module, type(module), own, held)


class GradientState:
    """The gradients of a model's parameters, who of them has any, and the hooks on them, to go back to."""

    def __init__(self, model: nn.Module) -> None:
        self._leaves = [
            (one, one.requires_grad, one.grad, [{*hooks} for hooks in _hooks_of(one)])
            for one in model.parameters()
            if one.is_leaf
        ]

    def restore(self) -> None:
        """Go back to this state."""
        for tensor, wanted, gradient, before in self._leaves:
            if tensor.requires_grad != wanted:
                tensor.requires_grad_(wanted)
            if tensor.grad is not gradient:
                tensor.grad = gradient
            for hooks, known in zip(_hooks_of(tensor), before, strict=True):
                for key in [key for key in hooks if key not in known]:
                    del hooks[key]


def _hooks_of(tensor: torch.Tensor) -> tuple[MutableMapping[int, Any], ...]:
    found: tuple[Mapping[int, Any] | None, ...] = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    return tuple({} if hooks is None else hooks for hooks in found)  # type: ignore[misc]
