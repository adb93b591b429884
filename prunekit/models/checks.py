"""Can this model be trained?"""

from __future__ import annotations

from torch import nn

from prunekit.errors import ModelError


def is_frozen(model: nn.Module) -> bool:
    """Whether a model has no parameter that training could change (none at all counts as frozen)."""
    return not any(parameter.requires_grad for parameter in model.parameters())


def require_trainable(model: nn.Module) -> None:
    """Checks that training can change something.

    Raises:
        ModelError: every parameter is frozen, or there is none.
    """
    if is_frozen(model):
        count = sum(1 for _ in model.parameters())
        raise ModelError(
            f"{type(model).__name__}: expected parameters to train, but all {count} have requires_grad=False; "
            "unfreeze some with parameter.requires_grad_(True)"
        )
