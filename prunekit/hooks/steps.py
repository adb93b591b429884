"""What is to be seen right before an optimizer's step: gradients that are complete, and what they were scaled by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def with_gradients(act: Callable[[Optimizer], None]) -> Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]:
    """Return a step pre-hook that calls `act` when the step's gradients are complete.

    They are summed over micro-batches and reduced over processes then. Those of a step with a closure are made inside
    it, as often as the optimizer likes, and seen each time.
    """

    def hook(optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)
        if closure is None:
            act(optimizer)
            return None

        def seen() -> Any:
            loss = closure()
            act(optimizer)
            return loss

        return arguments[:1], {**named, "closure": seen}

    return hook


def unscaled(optimizer: Optimizer, value: Tensor) -> Tensor:
    """Return what was computed from gradients in proportion to them, as it is without a loss scale.

    Other optimizers step with unscaled gradients or not at all; fused ones are given a GradScaler's scale, and whether
    to skip the step, and see to both in it. What a skipped step shows is 0.
    """
    scale, skipped = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is not None:
        value = value / scale.to(value.device)
    return value if skipped is None else value.where(skipped.to(value.device) == 0, 0)
