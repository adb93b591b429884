"""Gradient clamps: of activations while backward runs, and of weights before the step."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prunekit.distributed.shards import local
from prunekit.errors import UsageError
from prunekit.hooks import GradientChange, HookOwner, OwnedHook, refuse_compiled
from prunekit.hooks.steps import with_gradients
from prunekit.masking.activations import Side, require_floating
from prunekit.masking.counting import Tally
from prunekit.masking.limiting import By, LossScale, limited, scaled
from prunekit.masking.selection import leaf_paths, module_paths, numbers_by_path, one_of
from prunekit.masking.weights import inner_optimizer
from prunekit.wrappers import unwrapped


class GradientClamp(HookOwner):
    """What the two clamps have in common: limits by module path, and how often they were needed.

    Attributes:
        limits: by module path, for unscaled gradients.
    """

    def __init__(self, limits: Mapping[str, float], by: By) -> None:
        super().__init__()
        self.limits = dict(limits)
        self._by = by
        self._beyond = Tally()

    def shares(self) -> dict[str, float]:
        """Share of the values (by norm: of the gradients) that were beyond the limit so far, by module path, 0..1."""
        return self._beyond.shares()

    def counts(self) -> dict[str, tuple[int, int]]:
        """How many of how many were beyond the limit so far, by module path."""
        totals = self._beyond.totals()
        return {path: (count, totals[path]) for path, count in self._beyond.counts().items()}

    def state_dict(self) -> dict[str, Any]:
        """How often it was needed so far."""
        return self._beyond.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Counts on from a state."""
        self._beyond.load_state_dict(state)

    def _limited(self, path: str, gradient: Tensor, scale: LossScale | None, *, inplace: bool) -> Tensor | None:
        limit = scaled(self.limits[path], scale, gradient.device)
        clamped, beyond = limited(gradient, limit, self._by, inplace=inplace)
        self._beyond.add(path, beyond, local(gradient).numel() if self._by == "value" else 1)
        return clamped


class ActivationGradientClamp(GradientClamp):
    """See `clamp_activation_grad`."""

    def __init__(
        self,
        model: nn.Module,
        limits: Mapping[str, float],
        by: By,
        side: Side,
        loss_scale: LossScale | None,
        chosen: Container[str],
    ) -> None:
        super().__init__(limits, by)
        self._model, self._side, self._scale, self._chosen = model, side, loss_scale, chosen

    def register(self) -> None:
        """Hooks the modules' gradients."""
        refuse_compiled(self._model, "clamp_activation_grad")
        own = self.own_output_gradients if self._side == "output" else self.own_input_gradients
        for path in self.limits:
            where = f"{self._side} of {path}"
            own(
                self._model.get_submodule(path),
                self._clamp(path),
                partial(require_floating, where=where, chosen=path in self._chosen),
            )

    def _clamp(self, path: str) -> GradientChange:
        return lambda gradient, index: self._limited(path, gradient, self._scale, inplace=False)


class WeightGradientClamp(GradientClamp):
    """See `clamp_weight_grad`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, limits: Mapping[str, float], by: By) -> None:
        super().__init__(limits, by)
        self._model, self._optimizer = model, inner_optimizer(optimizer)

    def register(self) -> None:
        """Hooks the optimizer's step."""
        theirs = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        modules = [self._model.get_submodule(path) for path in self.limits]
        if not any(id(p) in theirs for module in modules for p in module.parameters(recurse=False)):
            raise UsageError(
                f"clamp_weight_grad: expected an optimizer of this model's parameters, but this "
                f"{type(self._optimizer).__name__} steps none of those to be clamped"
            )
        self.own(self._optimizer.register_step_pre_hook(OwnedHook(self, with_gradients(self._clamp))))

    @torch.no_grad()
    def _clamp(self, optimizer: Optimizer) -> None:
        # A fused optimizer under a GradScaler is given the scale and unscales in its step; or skips that.
        scale, skipped = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if skipped is not None and skipped.device.type == "cpu" and skipped:
            return
        left = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for path in self.limits:
            for parameter in self._model.get_submodule(path)._parameters.values():
                if parameter is None or parameter.grad is None or id(parameter) not in left:
                    continue
                left.discard(id(parameter))  # a parameter that modules share is clamped once
                if parameter.grad.is_sparse:  # one value for each entry, and those are what is limited
                    parameter.grad = parameter.grad.coalesce()
                    self._limited(path, parameter.grad.values(), scale, inplace=True)
                else:
                    self._limited(path, parameter.grad, scale, inplace=True)


def clamp_activation_grad(
    model: nn.Module,
    limits: float | Mapping[str, float],
    *,
    by: By = "value",
    side: Side = "output",
    loss_scale: LossScale | None = None,
) -> ActivationGradientClamp:
    """Clamps the gradients of activations while they flow back, as a context manager.

    What a module's backward computes from a clamped gradient, for its weights and for what comes before, is computed
    from the clamped one. NaN stays NaN. Inf becomes the limit by value: in float16 it is what a value beyond the limit
    became; by norm a gradient with Inf or NaN stays as it is, so that a GradScaler sees it.

    Args:
        model: not compiled; may write in place wherever it likes.
        limits: one for every module without children, or glob over module paths -> limit (the last that matches
            decides); at least 0.
        by: `value` limits each value to -limit..limit, `norm` the l2 norm of each gradient tensor of each call.
        side: gradients of a module's results (`grad_output`) or of its inputs (`grad_input`).
        loss_scale: what the loss was multiplied by; limits are multiplied by it too.

    Raises:
        UsageError: a limit is negative, a glob matches nothing, or `by` or `side` is something else.
        ModelError: on enter, when the model is compiled; in a hook, when a module that was chosen by its path
            has no floating-point tensor there; others that have none are passed over.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> with pk.clamp_activation_grad(model, {"2": 0.5}):
        ...     model(torch.randn(8, 4)).sum().backward()  # of which each output gets a gradient of 1
        >>> model[2].bias.grad  # 8 samples of 0.5 each
        tensor([4., 4.])
    """
    model = unwrapped(model, offloaded=True, compiled=False)
    one_of(by, get_args(By), "clamp_activation_grad: by")
    one_of(side, get_args(Side), "clamp_activation_grad: side")
    paths, alike = module_paths(model), leaf_paths(model)
    found = numbers_by_path(limits, "clamp_activation_grad", paths=paths, alike=alike)
    return ActivationGradientClamp(model, found, by, side, loss_scale, limits if isinstance(limits, Mapping) else ())


def clamp_weight_grad(
    model: nn.Module, optimizer: Optimizer, limits: float | Mapping[str, float], *, by: By = "value"
) -> WeightGradientClamp:
    """Clamps the gradients of weights right before each optimizer step, as a context manager.

    The gradient is the whole one: summed over micro-batches, reduced over processes, and unscaled (fused optimizers
    under a GradScaler unscale in their step: then the limit is scaled instead). NaN and Inf: as for
    `clamp_activation_grad`.

    Args:
        model: the modules whose own parameters are meant; those without a gradient, such as frozen ones, are left.
        optimizer: the optimizer in use, or a wrapper that keeps it in `.optimizer`; parameters of others are left.
        limits: one for all modules with parameters of their own, or glob over the paths of these -> limit.
        by: `value` limits each value to -limit..limit, `norm` the l2 norm of each parameter's gradient by itself.

    Raises:
        UsageError: a limit is negative, or a glob matches no module with parameters of its own; on enter, when the
            optimizer steps none of them.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with pk.clamp_weight_grad(model, optimizer, 0.5):
        ...     model(torch.randn(8, 4)).sum().backward()
        ...     optimizer.step()
        >>> model[2].bias.grad
        tensor([0.5000, 0.5000])
    """
    model = unwrapped(model)
    one_of(by, get_args(By), "clamp_weight_grad: by")
    paths = [path for path, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    key = "clamp_weight_grad, modules with parameters of their own"
    return WeightGradientClamp(model, optimizer, numbers_by_path(limits, key, paths=paths, alike=paths), by)
