"""Hooks come and go with their owner: registered on enter, removed on exit, also on an error."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

from torch import nn


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


def count_hooks(model: nn.Module) -> int:
    """Number of hooks registered on a model: on its modules, and on its parameters' gradients."""
    modules = sum(len(getattr(module, table, ())) for module in model.modules() for table in HOOK_TABLES)
    tensor_tables: Callable[[Any], int] = lambda p: len(p._backward_hooks or ()) + len(  # noqa: E731
        getattr(p, "_post_accumulate_grad_hooks", None) or ()
    )
    return modules + sum(tensor_tables(parameter) for parameter in model.parameters())
