"""Optimizer steps: hooks that run right before them, when gradients are complete, and the optimizer that steps."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from prunekit.errors import ArtifactError, UsageError
from prunekit.hooks.hook import OwnedHook
from prunekit.hooks.owner import HookOwner


class StepHook(HookOwner):
    """A hook right before each step of an optimizer of torch.optim, when the gradients are complete."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self._optimizer = optimizer

    def register(self) -> None:
        """Register the hook on the optimizer."""
        self.own(self._optimizer.register_step_pre_hook(OwnedHook(self, with_gradients(self.before_step))))

    def before_step(self, optimizer: Optimizer) -> None:
        """Read weights and gradients; subclasses override it."""
        raise NotImplementedError


def with_gradients(
    act: Callable[[Optimizer], object], before: Callable[[], object] = lambda: None
) -> Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]:
    """Return a step pre-hook that calls `act` when the step's gradients are complete.

    They are summed over micro-batches and reduced over processes then. A step with a closure makes them in the closure,
    any number of times, and `act` is called each time; and `before` ahead of each closure.
    """

    def hook(optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)
        if closure is None:
            act(optimizer)
            return None

        def closure_then_act() -> Any:
            before()
            loss = closure()
            act(optimizer)
            return loss

        return arguments[:1], {**named, "closure": closure_then_act}

    return hook


def unscaled(optimizer: Optimizer, value: Tensor) -> Tensor:
    """Return a value that is proportional to the gradients as it is without a loss scale; 0 if the step is skipped.

    Only fused optimizers are given a GradScaler's scale, and whether to skip the step: they handle both in the step.
    """
    scale, skipped = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is not None:
        value = value / scale.to(value.device)
    return value if skipped is None else value.where(skipped.to(value.device) == 0, 0)


def optimizer_of(model: nn.Module, optimizer: Any) -> Optimizer:
    """Return the optimizer inside wrappers that keep it in `.optimizer`; it has to be one of the model's parameters."""
    inner = inner_optimizer(optimizer)
    if not isinstance(inner, Optimizer):
        raise UsageError(
            "optimizer: expected a torch.optim.Optimizer, or a wrapper that keeps one in `.optimizer`, got "
            f"{type(optimizer).__name__}"
        )
    own = {id(parameter) for parameter in model.parameters()}
    if own and not any(id(parameter) in own for group in inner.param_groups for parameter in group["params"]):
        raise UsageError(
            f"optimizer: expected one of this {type(model).__name__}'s parameters, but this {type(inner).__name__} has "
            "none of them; make it from model.parameters(), after the model was moved or given other parameters"
        )
    return inner


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside wrappers that keep it in `.optimizer`."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def by_axis(found: Mapping[str, Tensor], model: nn.Module, where: str) -> dict[tuple[str, int], Tensor]:
    """Return the tensors of a state, {"name:axis": (..., size)}, by the name of a parameter and its axis."""
    parameters, result = dict(model.named_parameters()), {}
    for key, values in found.items():
        name, _, axis = key.rpartition(":")
        if name not in parameters or values.shape[-1:] != parameters[name].shape[int(axis) : int(axis) + 1]:
            raise ArtifactError(f"{where}: {key} is of another model")
        result[name, int(axis)] = values.to(parameters[name].device)
    return result
