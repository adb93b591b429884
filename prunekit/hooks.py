"""Hooks come and go with their owner: registered on enter, removed on exit, also on an error."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor, nn

from prunekit.errors import ModelError

GradientChange = Callable[[Tensor], Tensor | None]
"""Takes a gradient and returns the one to use in its place; None leaves it."""


class Removable(Protocol):
    """Anything that `remove()` takes away again, and a second `remove()` does no harm."""

    def remove(self) -> None: ...


class HookOwner:
    """Base of everything that registers hooks. Subclasses override `register` and call `self.own(handle)` in it.

    Owners nest and compose: each removes its own handles only, last in first out, and exactly once.
    """

    def __init__(self) -> None:
        self._handles: list[Removable] = []

    def register(self) -> None:
        """Registers this owner's hooks; called once by `__enter__`."""
        raise NotImplementedError

    def own(self, handle: Removable) -> None:
        """Takes charge of a handle: it is removed when this owner exits."""
        self._handles.append(handle)

    def own_output_gradient(self, module: nn.Module, change: GradientChange, *, rewritten: bool) -> None:
        """Passes the gradient of a module's first output through `change`, before the module's own backward sees it.

        The in-place guard: a full-backward hook hands the caller a view of the output, and autograd refuses to let a
        view like that be overwritten. Where that happens the gradient is caught by a hook on the output itself.
        On the gradient of the output the two agree.

        Args:
            module: its first output is a tensor, or the call is left alone.
            change: returns the new gradient, or None to leave it; not called any more once this owner has exited,
                also for graphs that were recorded before.
            rewritten: whether the output, or an input, is written to in place afterwards (by a later in-place ReLU,
                by `out += identity`, by the module itself); also where no input has a gradient.
        """

        def guarded(gradient: Tensor) -> Tensor | None:
            return change(gradient) if self.active else None

        if rewritten or getattr(module, "inplace", False):
            self.own(module.register_forward_hook(_gradient_from_output(guarded)))
        else:
            self.own(module.register_full_backward_pre_hook(_gradient_from_module(guarded)))

    @property
    def active(self) -> bool:
        """Whether hooks of this owner are registered now."""
        return bool(self._handles)

    def remove(self) -> None:
        """Removes every hook of this owner; harmless when called again."""
        while self._handles:
            self._handles.pop().remove()

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


def _gradient_from_module(change: GradientChange) -> Callable[..., Any]:
    def hook(module: nn.Module, gradients: tuple[Tensor | None, ...] | Tensor) -> Any:
        first, *rest = gradients
        changed = None if first is None else change(first)
        return None if changed is None else (changed, *rest)

    return hook


def _gradient_from_output(change: GradientChange) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(change)  # type: ignore[no-untyped-call]

    return hook


def refuse_compiled(model: nn.Module, owner: str) -> None:
    """Refuses a model that `torch.compile` has already compiled: it silently ignores hooks that come later.

    Raises:
        ModelError: the model, or a module in it, is compiled.
    """
    for path, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules:
            raise ModelError(
                f"{owner}: {path or 'the model'} is compiled, and hooks added after torch.compile are silently "
                "ignored; enter with the model as it was before, and compile it inside if at all"
            )


HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def is_ours(hook: object) -> bool:
    """Whether an owner of this package registered a hook: it belongs to its model and is not copied with it."""
    return str(getattr(hook, "__module__", "")).startswith("prunekit.")


def count_hooks(model: nn.Module) -> int:
    """Number of hooks registered on a model: on its modules, and on its parameters' gradients."""
    modules = sum(len(getattr(module, table, ())) for module in model.modules() for table in HOOK_TABLES)
    return modules + sum(_count_tensor_hooks(parameter) for parameter in model.parameters())


def _count_tensor_hooks(tensor: Tensor) -> int:
    return sum(len(getattr(tensor, table, None) or ()) for table in ("_backward_hooks", "_post_accumulate_grad_hooks"))
