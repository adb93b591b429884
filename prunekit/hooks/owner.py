"""Hooks come and go with their owner: registered on enter, removed on exit, also on an error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor, nn

from prunekit.hooks.gradient_hooks import Check, GradientChange, InputGradients, OutputGradients, Traced, at
from prunekit.hooks.hook import OwnedHook, require_not_compiled, warn_if_ignored

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
    """Anything that `remove()` takes away again, and a second `remove()` does no harm."""

    def remove(self) -> object: ...


class _Undo:
    def __init__(self, remove: Callable[[], object]) -> None:
        self.remove = remove


class HookOwner:
    """Base of everything that registers hooks. Subclasses override `register` and call the `own` methods in it.

    Owners nest and compose: each removes its own handles only, last in first out, and exactly once; the hooks of
    several owners run in the order in which they were registered. Hooks do nothing once their owner has left, also in
    graphs recorded before; copies of the model made meanwhile carry none that act.

    A `HookWarning` says where a hook would never run or runs twice: on a compiled module, on
    `nn.MultiheadAttention.out_proj`, and under activation checkpointing.
    """

    def __init__(self) -> None:
        self._handles: list[Removable] = []
        self._active = False  # its own, for torch.compile, which cannot ask lists of handles
        self._forward = False  # whether there are hooks that forward passes run
        self.called = False

    def register(self) -> None:
        """Register this owner's hooks; called once by `__enter__`."""
        raise NotImplementedError

    def own(self, handle: Removable) -> None:
        """Take charge of a handle: it is removed when this owner exits."""
        self._handles.append(handle)
        self._active = True

    def own_context(self, context: AbstractContextManager[Any]) -> None:
        """Enter a context, and leave it when this owner exits."""
        stack = ExitStack()
        stack.enter_context(context)
        self.own_undo(stack.close)

    def own_undo(self, undo: Callable[[], object]) -> None:
        """Have something undone when this owner exits."""
        self.own(_Undo(undo))

    def own_forward_pre(self, module: nn.Module, hook: Before, *, again: bool = False, first: bool = False) -> None:
        """Run a hook before a module's forward; it may change the arguments.

        Args:
            module: a module that is called, as `module(...)`.
            hook: see `Before`.
            again: whether the hook is meant to run again when activation checkpointing recomputes; without this the
                second run is warned of.
            first: whether it runs before the hooks that are there already.
        """
        warn_if_ignored(module, type(self).__name__)
        self._forward = True
        owned = OwnedHook(self, hook, again=again)
        self.own(before_forward(module, owned, prepend=first, with_kwargs=True))

    def own_forward(
        self, module: nn.Module, hook: After, *, again: bool = False, always: bool = False, first: bool = False
    ) -> None:
        """Run a hook after a module's forward; it may change the result.

        Args:
            module, again: as for `own_forward_pre`.
            hook: see `After`.
            always: whether it runs also when the forward raised; the result is then None.
            first: whether it runs before the hooks that are there already, so that they see what it returns.
        """
        warn_if_ignored(module, type(self).__name__)
        self._forward = True
        owned = OwnedHook(self, hook, again=again)
        self.own(after_forward(module, owned, prepend=first, with_kwargs=True, always_call=always))

    def own_output_gradients(
        self, module: nn.Module, change: GradientChange, check: Check | None = None, traced: Traced | None = None
    ) -> None:
        """Pass the gradients of a module's results through `change`, before its own backward sees them.

        What a full-backward pre-hook does, for every module: see `prunekit.hooks.gradient_hooks`. A tensor that a
        module hands through unchanged has one gradient, the sum over all its readers.

        Args:
            module: its result may be a tensor, or tensors nested in tuples, lists and dictionaries.
            change: see `GradientChange`.
            check: gets each result first, and raises if it won't do.
            traced: what a graph of `torch.compile` has in the place of `change`; None: that goes through Python.
        """
        self.own_forward(module, OutputGradients(self, lambda: change, check, traced).after, again=True)

    def own_input_gradients(self, module: nn.Module, change: GradientChange, check: Check | None = None) -> None:
        """Pass the gradients that a module sends back to its inputs through `change`.

        What a full-backward hook does to `grad_input`, for every module: see `prunekit.hooks.gradient_hooks`. Gradients
        of the module's parameters are not affected.

        Args:
            module: its arguments may be tensors, or tensors nested in tuples, lists and dictionaries.
            change: see `GradientChange`.
            check: gets a pair of the arguments and the named ones first, and raises if they won't do.
        """
        inputs = InputGradients(self, lambda: change, check)
        self.own_forward_pre(module, inputs.before, again=True)
        self.own_forward(module, inputs.after, again=True, always=True)

    def own_tensor_gradient(self, tensor: Tensor, change: GradientChange) -> None:
        """Pass the gradient of one tensor through `change`; for a parameter, each batch's before it is added up."""
        self.own(tensor.register_hook(at(self, change, 0)))  # type: ignore[no-untyped-call]

    def own_parameter_gradient(self, parameter: Tensor, hook: Callable[[Tensor], None]) -> None:
        """Run a hook on a parameter each time its `.grad` has been added to; it may write to that."""
        self.own(parameter.register_post_accumulate_grad_hook(OwnedHook(self, hook)))  # type: ignore[no-untyped-call]

    def own_hearing(self, model: nn.Module) -> None:
        """Has forward passes of a model fail that leave this owner's hooks on its modules out; call it after these.

        `torch.compile` compiles once for what it does not know to have changed, and hooks that come later are no such
        change to it, also where only a model of the same class was compiled.
        """
        if self._forward:
            self.own_context(Hearing(self, model))

    @property
    def active(self) -> bool:
        """Whether hooks of this owner are registered now."""
        return self._active

    def remove(self) -> None:
        """Remove every hook of this owner; harmless when called again."""
        while self._handles:
            self._handles.pop().remove()
        self._active = self._forward = False

    def __enter__(self) -> Self:
        if self.active:
            raise RuntimeError(f"{type(self).__name__} is already active: one owner registers its hooks once")
        try:
            self.register()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class Hearing(HookOwner):
    """Looks whether the hooks of another owner run.

    Raises:
        ModelError: in a forward pass, when none did, and code of the model is compiled.
    """

    def __init__(self, owner: HookOwner, model: nn.Module) -> None:
        super().__init__()
        self._owner, self._model = owner, model

    def register(self) -> None:
        self.own_forward_pre(self._model, self._begin, again=True)
        self.own_forward(self._model, self._end, again=True)

    def _begin(self, *_: Any) -> None:
        self._owner.called = False

    def _end(self, *_: Any) -> None:
        if not self._owner.called:
            require_not_compiled(self._model, type(self._owner).__name__)
