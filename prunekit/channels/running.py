"""How a forward pass is run for a trace or a trial: its modes, and which module runs at each moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from prunekit.hooks import HookOwner


class ModuleStack(HookOwner):
    """Knows at every operator which module is running, and tells when one begins and ends."""

    def __init__(
        self,
        model: nn.Module,
        on_enter: Callable[[str, nn.Module, Any], None] | None = None,
        on_exit: Callable[[str, nn.Module, Any], None] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.on_enter, self.on_exit = model, on_enter, on_exit
        self.paths: list[str] = [""]
        self.failed: str | None = None

    @property
    def current(self) -> str:
        """Path of the innermost module that runs now; empty for the root."""
        return self.paths[-1]

    def register(self) -> None:
        """Adds a forward-pre and a forward hook to every module."""
        for path, module in self.model.named_modules():
            self.own(module.register_forward_pre_hook(self._enter(path)))
            self.own(module.register_forward_hook(self._leave(path)))

    def _enter(self, path: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            self.paths.append(path)
            if self.on_enter is not None:
                self.on_enter(path, module, args)

        return hook

    def _leave(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.on_exit is not None:
                self.on_exit(path, module, output)
            self.paths.pop()

        return hook


@contextmanager
def mode_for_trace(model: nn.Module, training: bool) -> Iterator[None]:
    """Train or eval mode for everything that has children; leaves (norms, dropout) always in eval mode."""
    before = [(module, module.training) for module in model.modules()]
    for module, _ in before:
        module.training = training and next(module.children(), None) is not None
    try:
        yield
    finally:
        for module, was in before:
            module.training = was


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention's fast path off: it would hide the projections from the trace."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
