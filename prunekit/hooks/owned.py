"""A hook that belongs to its owner: it acts while the owner is active, and a copy of it never does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

from prunekit.hooks.checks import HookWarning, recomputing


class Active(Protocol):
    """What a hook asks of its owner, and tells it.

    Attributes:
        called: set whenever a hook runs.
    """

    called: bool

    @property
    def active(self) -> bool: ...


class OwnedHook:
    """Calls a function while its owner is active, and does nothing otherwise.

    `copy.deepcopy(model)` and pickling take a module's hooks along: what arrives there is inert, so that a copy is
    neither masked nor counted, whatever becomes of the owner.
    """

    def __init__(self, owner: Active | None, function: Callable[..., Any], *, again: bool = True) -> None:
        self._owner, self._function, self._again = owner, function, again

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._owner is None or not self._owner.active:
            return None
        self._owner.called = True
        if not self._again and recomputing():
            self._again = True  # said once
            warnings.warn(
                f"{type(self._owner).__name__}: a forward hook runs a second time for one batch, because activation "
                "checkpointing recomputes the forward pass; count batches and not calls (prunekit.hooks.recomputing)",
                HookWarning,
                stacklevel=2,
            )
        return self._function(*arguments, **named)

    def acts_for(self, kind: type) -> bool:
        """Whether its owner is of a kind, and active."""
        owner = self._owner
        return owner is not None and isinstance(owner, kind) and owner.active

    @property
    def inert(self) -> bool:
        """Whether this is what a copy left of a hook."""
        return self._owner is None

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnedHook:
        return _inert()

    def __reduce__(self) -> tuple[Callable[[], OwnedHook], tuple[()]]:
        return _inert, ()


def _inert() -> OwnedHook:
    return OwnedHook(None, _nothing)


def _nothing(*arguments: Any, **named: Any) -> None:
    return None
