"""The owner of hooks: a context manager that registers them on enter and removes them on exit, also on an error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor, nn

from prunekit.hooks.gradient_hooks import (
    GradientChange,
    InputGradients,
    OutputGradients,
    TracedChange,
    ValueCheck,
    tensor_hook,
)
from prunekit.hooks.hook import OwnedHook, require_not_compiled, warn_if_ignored
from prunekit.modes.public_call import own_part

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[Any, Any] | None]
"""Gets a module, its arguments and its named arguments; returns the two that are to be used, or None."""
After = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]
"""Gets a module, its arguments, its named arguments and its result; returns the result to be used, or None."""


def before_forward(module: nn.Module, hook: Any, **settings: Any) -> Removable:
    """Register a forward pre-hook, also on a scripted or traced module, whose own method for it raises."""
    return nn.Module.register_forward_pre_hook(module, hook, **settings)


def after_forward(module: nn.Module, hook: Any, **settings: Any) -> Removable:
    """Register a forward hook, also on a scripted or traced module, whose own method for it raises."""
    return nn.Module.register_forward_hook(module, hook, **settings)


class Removable(Protocol):
    """Anything with a `remove()` that may be called twice."""

    def remove(self) -> object:
        """Remove it."""


class HookOwner:
    """An owner of hooks, which are registered on enter and removed on exit.

    Subclasses override `register`, and call the `own` methods in it. An owner with nothing but hooks needs no class:
    `HookOwner(function)` calls the function with itself, which then calls these methods.

    Owners nest and compose: each removes its own handles only, last in first out, and exactly once; the hooks of
    several owners run in the order in which they were registered. Hooks do nothing once their owner has left, also in
    graphs recorded before, and in copies of the model.

    A `HookWarning` says where a hook would never run: on a compiled module, and on `nn.MultiheadAttention.out_proj`.
    """

    def __init__(self, hooks: Callable[[HookOwner], object] | None = None) -> None:
        self._hooks = hooks
        self._undo: list[Callable[[], object]] = []
        self.active = False  # whether its hooks are registered now
        self._forward = False  # whether there are hooks that forward passes run
        self.called = False  # whether one of them has run

    def register(self) -> None:
        """Register this owner's hooks; called once by `__enter__`."""
        if self._hooks is None:
            raise NotImplementedError
        self._hooks(self)

    def begin_pass(self) -> None:
        """Drop what a pass noted that failed: a whole one over the same batch begins, see `observers.watch`."""

    def own(self, handle: Removable) -> None:
        """Remove a handle when this owner exits."""
        self._undo.append(handle.remove)
        self.active = True

    def own_context(self, context: AbstractContextManager[Any]) -> None:
        """Enter a context, and leave it when this owner exits."""
        context.__enter__()
        self.own_undo(partial(context.__exit__, None, None, None))

    def own_undo(self, undo: Callable[[], object]) -> None:
        """Call a function when this owner exits; again if an interruption comes meanwhile."""
        self._undo.append(undo)
        self.active = True

    def own_forward_pre(self, module: nn.Module, hook: Before, *, first: bool = False) -> None:
        """Run a hook before a module's forward, also where activation checkpointing recomputes that (`recomputing`).

        It may change the arguments.
        """
        warn_if_ignored(module, type(self).__name__)
        self._forward = True
        self.own(before_forward(module, OwnedHook(self, hook), prepend=first, with_kwargs=True))

    def own_forward(self, module: nn.Module, hook: After, *, always: bool = False, first: bool = False) -> None:
        """Run a hook after a module's forward, also where that is recomputed; it may change the result."""
        warn_if_ignored(module, type(self).__name__)
        self._forward = True
        owned = OwnedHook(self, hook)
        self.own(after_forward(module, owned, prepend=first, with_kwargs=True, always_call=always))

    def own_output_gradients(
        self,
        module: nn.Module,
        change: GradientChange,
        check: ValueCheck | None = None,
        traced: TracedChange | None = None,
    ) -> None:
        """Pass the gradients of a module's results through `change`, before its own backward sees them.

        Like a full-backward pre-hook, but for every module: see `prunekit.hooks.gradient_hooks`. A tensor that a module
        returns unchanged has one gradient, the sum over all its readers.
        """
        self.own_forward(module, OutputGradients(self, lambda: change, check, traced).after)

    def own_input_gradients(self, module: nn.Module, change: GradientChange, check: ValueCheck | None = None) -> None:
        """Pass the gradients that a module sends back to its inputs through `change`.

        Like a full-backward hook on `grad_input`, but for every module: see `prunekit.hooks.gradient_hooks`. Gradients
        of the module's parameters are not affected.
        """
        inputs = InputGradients(self, lambda: change, check)
        self.own_forward_pre(module, inputs.before)
        self.own_forward(module, inputs.after, always=True)

    def own_tensor_gradient(self, tensor: Tensor, change: GradientChange) -> None:
        """Pass the gradient of one tensor through `change`; that of a parameter before it is added to `.grad`."""
        self.own(tensor.register_hook(tensor_hook(self, change, 0)))  # type: ignore[no-untyped-call]

    def own_parameter_gradient(self, parameter: Tensor, hook: Callable[[Tensor], None]) -> None:
        """Run a hook on a parameter each time a gradient was added to its `.grad`, which it may overwrite."""
        self.own(parameter.register_post_accumulate_grad_hook(OwnedHook(self, hook)))  # type: ignore[no-untyped-call]

    def own_compile_check(self, model: nn.Module) -> None:
        """Make forward passes of a model fail that leave out this owner's hooks on its modules; call it after these.

        `torch.compile` does not compile again when hooks are added later, and may leave them out even where only
        another model of the same class was compiled.
        """
        if self._forward:
            self.own_context(HookOwner(partial(_check_called, self, model)))

    def remove(self) -> None:
        """Remove every hook of this owner; harmless when called again."""
        try:
            with own_part():
                self._undo_all()
        finally:
            self._undo_all()  # what is left where an interruption came meanwhile
            self.active = self._forward = False

    def _undo_all(self) -> None:
        """Call what is to be called on exit, last in first out, all of it also if some raise."""
        failed: Exception | None = None
        while self._undo:
            try:
                self._undo[-1]()
            except Exception as error:
                failed = error
            self._undo.pop()
        if failed is not None:
            raise failed

    def __enter__(self) -> Self:
        if self.active:
            raise RuntimeError(f"{type(self).__name__} is already active: one owner registers its hooks once")
        try:
            with own_part():
                self.register()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _check_called(owner: HookOwner, model: nn.Module, check: HookOwner) -> None:
    """Raise a `ModelError` in a forward pass in which no hook of an owner runs and code of the model is compiled."""

    def begin(*_: Any) -> None:
        owner.called = False

    def end(*_: Any) -> None:
        if not owner.called:
            require_not_compiled(model, type(owner).__name__)

    check.own_forward_pre(model, begin)
    check.own_forward(model, end)
