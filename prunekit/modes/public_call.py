"""Public calls: each runs in torch's usual modes, and one that fails leaves process and models as they were.

Usual are gradients on, no autocast, and tensors made on the CPU in float32, whatever the caller has set.
`ProcessState`, `ModuleState` and `GradientState` are what a call that fails goes back to.
"""

from __future__ import annotations

import gc
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, _GeneratorContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import nn

from prunekit.errors import UsageError
from prunekit.utils import private_torch
from prunekit.utils.tensors import leaves

AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")
_DEFAULTS: ContextVar[tuple[torch.device, torch.dtype] | None] = ContextVar("prunekit defaults", default=None)
"""The caller's default device and dtype, inside of `usual_modes`, where they are not the usual ones."""


@contextmanager
def usual_modes() -> Iterator[None]:
    """Run in torch's usual modes; afterwards the caller's are on again.

    Other settings, such as deterministic algorithms and the number of threads, stay the caller's.
    """
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        if not torch.is_grad_enabled():
            modes.enter_context(torch.enable_grad())
        for kind in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        device, dtype = torch.get_default_device(), torch.get_default_dtype()
        if device.type != "cpu" or dtype != torch.float32:
            modes.callback(_DEFAULTS.set, _DEFAULTS.get())
            _DEFAULTS.set((device, dtype))
            modes.enter_context(_defaults(torch.device("cpu"), torch.float32))
        yield


def defaults_changed() -> bool:
    """Return whether the caller of a public call that runs has set defaults other than torch's usual ones."""
    return _DEFAULTS.get() is not None


@contextmanager
def callers_defaults(model: Any) -> Iterator[None]:
    """Let a model's forward make tensors as the caller's defaults say, where the model has others like them.

    A model that is made under a default dtype, or on a default device, may rely on it in its forward.
    """
    noted = _DEFAULTS.get()
    if noted is None or not isinstance(model, nn.Module):
        yield
        return
    device, dtype = noted
    own = [*model.parameters(), *model.buffers()]
    device = device if any(one.device == device for one in own) else torch.device("cpu")
    dtype = dtype if any(one.dtype == dtype for one in own) else torch.float32
    with _defaults(device, dtype):
        yield


def require_real_tensors(called: str) -> None:
    """Raise where a call computes nothing: among fake tensors, or inside of a transform of functions."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    inside = "FakeTensorMode" if any(isinstance(one, private_torch.FakeTensorMode) for one in modes) else ""
    inside = inside or ("a transform of torch.func, such as vmap" if private_torch.in_function_transform() else "")
    if inside:
        raise UsageError(f"{called}: expected to be called outside of {inside}, where tensors have no values")


@contextmanager
def _defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


class ProcessState:
    """The state of the process at one moment, to go back to.

    Every mode is entered by a context manager, which undoes it also on errors. Only an interruption may come between:
    after a mode was set and before the `with` statement knows of it.
    """

    def __init__(self) -> None:
        self._values = [read() for read, _ in _PARTS]
        self._handled = sys.exc_info()[1]  # what the caller is handling, which this call has nothing to do with

    def restore(self, error: BaseException) -> None:
        """Go back to this state, after what `error`, or an interruption that it replaced, left open has been closed."""
        for one in dict.fromkeys((interruption_in(error, self._handled) or error, error)):
            _close_what_was_open(one)
        for (_, write), value in zip(_PARTS, self._values, strict=True):
            write(value)


def finished(undo: Callable[[], object]) -> None:
    """Undo something; if an interruption comes meanwhile, undo it again from the beginning."""
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
    (private_torch.function_modes, private_torch.set_function_modes),  # the default device is one
    (private_torch.dispatch_modes, private_torch.leave_dispatch_modes),
    (private_torch.compile_stance, private_torch.set_compile_stance),
    (private_torch.global_hooks, private_torch.set_global_hooks),
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


def _content(value: Any) -> Any:
    """Return what a container holds; most are empty, and `copy.copy` takes five times as long for an `OrderedDict`."""
    if not value:
        return ()
    return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else set(value)


class ModuleState:
    """The state of a model at one moment, to go back to.

    Dictionaries, lists and sets that are attributes, and those of parameters, buffers, submodules and hooks, hold
    afterwards what they held; what was written into a tensor stays. Attributes named in `without` are left alone.
    """

    def __init__(self, model: nn.Module, without: Container[str] = ()) -> None:
        self._without = without
        self._modules: list[_ModuleParts] = []
        for module in model.modules():
            own = {name: value for name, value in vars(module).items() if name not in without}
            held = [(value, _content(value)) for value in own.values() if isinstance(value, (dict, list, set))]
            scripted = dict(module._buffers.items()) if isinstance(module, torch.jit.ScriptModule) else {}
            self._modules.append(_ModuleParts(module, type(module), own, held, scripted))

    def restore(self) -> None:
        """Go back to this state."""
        for module, kind, own, held, scripted in self._modules:
            if type(module) is not kind:
                module.__class__ = kind
            attributes = vars(module)
            for name in [name for name in attributes if name not in own and name not in self._without]:
                del attributes[name]
            attributes.update(own)
            for value, content in held:
                value.clear()
                value.extend(content) if isinstance(value, list) else value.update(content)
            for name, buffer in scripted.items():
                module._buffers[name] = buffer


class _ModuleParts(NamedTuple):
    """A module, its class, its attributes, and those of them that are containers, with a copy each."""

    module: nn.Module
    kind: type[nn.Module]
    own: dict[str, Any]
    held: list[tuple[Any, Any]]
    scripted: dict[str, Any]  # buffers of a scripted module, whose table is no dictionary


class GradientState:
    """The gradients of a model's parameters, which of them require any, and their hooks, to go back to."""

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


P = ParamSpec("P")
R = TypeVar("R")

_INSIDE: ContextVar[bool] = ContextVar("prunekit public call", default=False)


def public_call(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function one that users call: it computes the same in whatever modes of torch it is called.

    Where it raises, or is interrupted, the state of the process and of the modules among its arguments is what it was
    before. A public function that another one calls, itself or by code that it runs, is part of the other's call.
    """

    @wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        if _INSIDE.get():
            return function(*args, **named)
        require_real_tensors(function.__qualname__)
        models = [value for value in leaves([*args, named]) if isinstance(value, nn.Module)]
        undo = [undo for model in models for undo in (ModuleState(model).restore, GradientState(model).restore)]
        handled = sys.exc_info()[1]
        try:
            try:
                with own_part():
                    _INSIDE.set(True)
                    return function(*args, **named)
            except BaseException as error:
                for one in undo:
                    finished(one)
                interruption = interruption_in(error, handled)
                if interruption not in (None, error):
                    raise KeyboardInterrupt(*interruption.args) from error
                raise
            finally:
                _INSIDE.set(False)
        finally:
            _INSIDE.set(False)  # again, as an interruption may have come before
            # A frame that holds its own error is freed by the collector alone, in the middle of whatever runs then, and
            # with it torch's guards of modes, each of which sets what was on when it was made.
            handled = interruption = None

    return call


@contextmanager
def own_part() -> Iterator[None]:
    """Run code of this package inside the caller's, in torch's usual modes; after an error the process is as before."""
    if _INSIDE.get():
        yield
        return
    process, mode = ProcessState(), torch.inference_mode(False)
    try:
        with mode:  # the state before it comes back last, whatever is closed in which order
            try:
                with usual_modes():
                    yield
            except BaseException as error:
                finished(partial(process.restore, error))
                raise
    except KeyboardInterrupt:
        with suppress(AttributeError):  # it came before the mode was set
            mode.__exit__(None, None, None)  # does nothing the second time
        raise
