"""What is to be seen right before an optimizer's step: gradients that are complete, and what they were scaled by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from prunekit.errors import ArtifactError
from prunekit.hooks.hook import OwnedHook
from prunekit.hooks.owner import HookOwner


class StepHook(HookOwner):
    """Looks at weights and gradients right before each step of an optimizer, when the gradients are complete.

    Args:
        optimizer: torch's own, whose steps count.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self._optimizer = optimizer

    def register(self) -> None:
        """Hook the optimizer's step."""
        self.own(self._optimizer.register_step_pre_hook(OwnedHook(self, with_gradients(self.before_step))))

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at them."""
        raise NotImplementedError


def by_axis(found: Mapping[str, Tensor], model: nn.Module, where: str) -> dict[tuple[str, int], Tensor]:
    """Return what a state has for axes of parameters, {"name:axis": (..., size)}, by name and axis.

    Raises:
        ArtifactError: it is of another model; the message begins with `where`.
    """
    parameters, result = dict(model.named_parameters()), {}
    for key, values in found.items():
        name, _, axis = key.rpartition(":")
        if name not in parameters or values.shape[-1:] != parameters[name].shape[int(axis) : int(axis) + 1]:
            raise ArtifactError(f"{where}: {key} is of another model")
        result[name, int(axis)] = values.to(parameters[name].device)
    return result


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
