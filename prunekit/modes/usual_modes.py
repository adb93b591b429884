"""Torch's usual modes: gradients on, no autocast, tensors made on the CPU in float32, whatever the caller has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from prunekit.errors import UsageError
from prunekit.utils.private_torch import FakeTensorMode, in_function_transform

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
            modes.enter_context(_defaults_noted(device, dtype))
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
    inside = "FakeTensorMode" if any(isinstance(one, FakeTensorMode) for one in modes) else ""
    inside = inside or ("a transform of torch.func, such as vmap" if in_function_transform() else "")
    if inside:
        raise UsageError(f"{called}: expected to be called outside of {inside}, where tensors have no values")


@contextmanager
def _defaults_noted(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    before = _DEFAULTS.get()
    try:
        _DEFAULTS.set((device, dtype))
        yield
    finally:
        _DEFAULTS.set(before)


@contextmanager
def _defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
