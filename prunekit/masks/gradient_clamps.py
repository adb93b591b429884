"""Gradient clamps: of activations while backward runs, and of weights before the step."""

import math
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prunekit.distributed.process_group import is_shard, local_part, total_of
from prunekit.errors import UsageError
from prunekit.hooks.gradient_hooks import GradientChange
from prunekit.hooks.hook import OwnedHook, called_leaves, refuse_compiled
from prunekit.hooks.owner import HookOwner
from prunekit.hooks.step_hooks import inner_optimizer, with_gradients
from prunekit.hooks.wrappers import unwrapped
from prunekit.masks.activation_masks import Side, require_floating
from prunekit.masks.module_values import (
    BLOCK,
    Count,
    Tally,
    count_beyond,
    module_paths,
    numbers_by_path,
    one_of,
    scratch_for,
)
from prunekit.utils.tensors import as_it_lies

By = Literal["value", "norm"]
LossScale = float | Tensor | torch.amp.GradScaler | Callable[[], float | Tensor]
"""The factor of the loss, or an object that knows it."""


def limited(gradient: Tensor, limit: float | Tensor, by: By, *, inplace: bool = False) -> tuple[Tensor | None, Count]:
    """Return a gradient with no value, or no l2 norm, beyond a limit; a shard has the norm of the whole gradient.

    By value, Inf becomes the limit and NaN stays NaN. By norm, a gradient whose norm is not finite stays as it is.
    """
    part = local_part(gradient)
    if by == "value":
        return _by_value(part, limit, inplace)
    # The norm of half-precision values may be beyond their range.
    wide = torch.float32 if part.dtype.itemsize < 4 else part.dtype
    norm = torch.linalg.vector_norm(as_it_lies(part), dtype=wide)
    return _by_norm(part, total_of(norm.double() ** 2).sqrt() if is_shard(gradient) else norm, limit, inplace)


def scaled(limit: float, scale: LossScale | None, device: torch.device) -> float | Tensor:
    """Return a limit for gradients that were multiplied by a loss scale; a number on the CPU."""
    if scale is None:
        return limit
    if isinstance(scale, torch.amp.GradScaler):
        scale = scale.scale(torch.ones((), device=device))  # `get_scale()` would wait for the device
    elif not isinstance(scale, (int, float, Tensor)):
        scale = scale()
    return limit * float(scale) if device.type == "cpu" else limit * scale


def _by_value(gradient: Tensor, limit: float | Tensor, inplace: bool) -> tuple[Tensor | None, Count]:
    if not isinstance(limit, Tensor) and limit > torch.finfo(gradient.dtype).max:
        return None, 0
    if gradient.device.type != "cpu" or gradient.requires_grad:  # a second-order gradient needs an operation with one
        beyond: Count = torch.count_nonzero(gradient.detach().abs() > limit)
        return (gradient.clamp_ if inplace else gradient.clamp)(-limit, limit), beyond  # type: ignore[arg-type]
    bound = float(limit)
    if not inplace:
        if _within(as_it_lies(gradient), bound):
            return None, 0
        gradient = gradient.clone()
    flat = as_it_lies(gradient)
    scratch, beyond = None, 0
    for block in torch.split(flat, BLOCK) if len(flat) > BLOCK else (flat,):
        if not _within(block, bound):  # the block is in the cache now, and is counted and clamped there
            scratch = scratch_for(flat) if scratch is None else scratch
            beyond += count_beyond(block, bound, scratch)
            block.clamp_(-bound, bound)
    if flat.data_ptr() != gradient.data_ptr():  # it lies with gaps, and `flat` was a copy
        gradient.clamp_(-bound, bound)
    return gradient, beyond


def _within(values: Tensor, limit: float) -> bool:
    """Return whether no value is beyond a limit; NaN is."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return -limit <= float(low) and float(high) <= limit


def _by_norm(gradient: Tensor, norm: Tensor, limit: float | Tensor, inplace: bool) -> tuple[Tensor | None, Count]:
    beyond: Count
    factor: float | Tensor
    if gradient.device.type == "cpu":
        size = float(norm)
        if not limit < size < math.inf:
            return None, 0
        factor, beyond = float(limit) / size, 1
    else:
        needed = (norm > limit) & norm.isfinite()
        factor, beyond = torch.where(needed, limit / norm, 1.0), needed.long()
    return gradient.mul_(factor) if inplace else gradient * factor, beyond


class GradientClamp(HookOwner):
    """Base of the two clamps: limits by module path, and how often they were exceeded."""

    def __init__(self, limits: Mapping[str, float], by: By) -> None:
        super().__init__()
        self.limits = dict(limits)  # of unscaled gradients
        self._by = by
        self._beyond = Tally()

    def shares(self) -> dict[str, float]:
        """Return the share of values (by norm: of gradients) that were beyond the limit so far, 0..1 by module path."""
        return self._beyond.shares()

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return by path how many values (by norm: gradients) were beyond the limit so far, and how many there were."""
        totals = self._beyond.totals()
        return {path: (count, totals[path]) for path, count in self._beyond.counts().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts so far."""
        return self._beyond.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the counts of a state."""
        self._beyond.load_state_dict(state)

    def _limited(self, path: str, gradient: Tensor, scale: LossScale | None, *, inplace: bool) -> Tensor | None:
        limit = scaled(self.limits[path], scale, gradient.device)
        clamped, beyond = limited(gradient, limit, self._by, inplace=inplace)
        self._beyond.add(path, beyond, local_part(gradient).numel() if self._by == "value" else 1)
        return clamped


class ActivationGradientClamp(GradientClamp):
    """The clamp that `clamp_activation_grad` returns."""

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
        """Register hooks on the modules' gradients."""
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
    """The clamp that `clamp_weight_grad` returns."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, limits: Mapping[str, float], by: By) -> None:
        super().__init__(limits, by)
        self._model, self._optimizer = model, inner_optimizer(optimizer)

    def register(self) -> None:
        """Register a hook on the optimizer's step."""
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
                if parameter.grad.is_sparse:  # one value for each entry, and those are limited
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
    """Clamp the gradients of activations while they flow back, as a context manager.

    A module's backward computes from the clamped gradient, for its weights and for earlier modules. NaN stays NaN. By
    value, Inf becomes the limit: in float16 a value beyond the range became Inf. By norm, a gradient with Inf or NaN
    stays as it is, so that a GradScaler sees it.

    Args:
        model: not compiled; may write in place anywhere.
        limits: one for every module without children, or glob over module paths -> limit (the last that matches
            decides); at least 0.
        by: `value` limits each value to -limit..limit, `norm` the l2 norm of each gradient tensor of each call.
        side: gradients of a module's results (`grad_output`) or of its inputs (`grad_input`).
        loss_scale: the factor of the loss; limits are multiplied by it too.

    Raises:
        UsageError: a limit is negative, a glob matches nothing, or `by` or `side` is something else.
        ModelError: on enter, when the model is compiled; in a hook, when a module that was chosen by its path
            has no floating-point tensor there (others without one are skipped).

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
    paths = module_paths(model)
    found = numbers_by_path(limits, "clamp_activation_grad", paths=paths, alike=called_leaves(model))
    return ActivationGradientClamp(model, found, by, side, loss_scale, limits if isinstance(limits, Mapping) else ())


def clamp_weight_grad(
    model: nn.Module, optimizer: Optimizer, limits: float | Mapping[str, float], *, by: By = "value"
) -> WeightGradientClamp:
    """Clamp the gradients of weights right before each optimizer step, as a context manager.

    The gradient is complete: summed over micro-batches, reduced over processes, and unscaled (fused optimizers under a
    GradScaler unscale in their step: then the limit is scaled instead). NaN and Inf: as for `clamp_activation_grad`.

    Args:
        model: has the parameters; those without a gradient, such as frozen ones, are skipped.
        optimizer: the optimizer in use, or a wrapper that keeps it in `.optimizer`; its parameters alone are clamped.
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
