"""Activation masks: values of modules' activations below a threshold are zero."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.errors import ModelError, UsageError
from prunekit.hooks.hook import called_leaves, recomputing, refuse_compiled, refuse_nested
from prunekit.hooks.owner import HookOwner
from prunekit.hooks.wrappers import unwrapped
from prunekit.masks.module_values import Tally, count_zeros, module_paths, numbers_by_path, one_of
from prunekit.masks.pruned_entries import BITS
from prunekit.utils.tensors import gather, map_tensors

Side = Literal["input", "output"]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The types that `hardshrink` takes."""


@dataclass(frozen=True)
class ActivationSparsity:
    """Exact zeros among the values of activations behind their masks."""

    zeros: Mapping[str, int]  # how many, by module path
    values: Mapping[str, int]  # how many were counted, over all forward passes, calls and tensors of a module

    @property
    def layers(self) -> dict[str, float]:
        """Share of zeros by module path, 0..1."""
        return {path: self.zeros[path] / count for path, count in self.values.items() if count}

    @property
    def overall(self) -> float:
        """Share of zeros among all values, 0..1."""
        return sum(self.zeros.values()) / max(1, sum(self.values.values()))


class ActivationMasks(HookOwner):
    """Masks that zero every activation with |x| below a threshold, as a context manager of forward hooks.

    x stays where |x| >= threshold, and the gradient passes there alone; NaN stays NaN. Every floating-point tensor of
    a module's result (or arguments) is masked, also inside tuples, lists, dicts and dataclasses, in its own precision,
    and into a new tensor: nothing is overwritten. Code that ignores what a module returns, such as an in-place ReLU,
    and reads the tensor itself, reads it unmasked.

    Args:
        model: not compiled.
        thresholds: one for every module without children, or glob over module paths -> threshold (the last that
            matches decides), such as `calibrate_thresholds` returns. 0 leaves values as they are, and counts them.
        side: whether a module's outputs or its inputs are masked; None: the side that the thresholds were found for,
            and `output` for plain numbers.
        count: whether zeros are counted for `sparsity()`; counting costs about as much as masking.

    Raises:
        UsageError: a threshold is negative, a glob matches nothing, or the side is not that of the thresholds.
        ModelError: on enter, when the model is compiled, and in a forward pass that leaves these hooks out, because it
            was compiled before; in a hook, when a module that was chosen by its path has no floating-point tensor
            there (others without one are skipped).

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> with pk.ActivationMasks(model, {"1": 0.5}) as masks:  # what the ReLU returns
        ...     y = model(x)
        >>> masks.sparsity().values  # activations that were looked at
        {'1': 64}
    """

    def __init__(
        self, model: nn.Module, thresholds: float | Mapping[str, float], *, side: Side | None = None, count: bool = True
    ) -> None:
        model = unwrapped(model, offloaded=True, compiled=False)
        super().__init__()
        self._model = model
        paths = module_paths(model)
        self._thresholds = numbers_by_path(thresholds, "thresholds", paths=paths, alike=called_leaves(model))
        self._chosen = set(thresholds) if isinstance(thresholds, Mapping) else set()
        self._side = _side(side, getattr(thresholds, "side", None))
        self._zeros = Tally() if count else None

    def register(self) -> None:
        """Register hooks on the modules."""
        refuse_compiled(self._model, type(self).__name__)
        for path, threshold in self._thresholds.items():
            change_activations(
                self, self._model, path, self._side, self._mask(path, threshold), chosen=path in self._chosen
            )
        self.own_compile_check(self._model)

    def sparsity(self) -> ActivationSparsity:
        """Return the zeros that were counted so far; the recomputation of activation checkpointing counts once.

        Raises:
            UsageError: nothing was counted.
        """
        if self._zeros is None or not self._zeros.totals():
            raise UsageError("no activation was counted: run the model inside `with ActivationMasks(..., count=True)`")
        return ActivationSparsity(self._zeros.counts(), self._zeros.totals())

    def _mask(self, path: str, threshold: float) -> Callable[[Tensor], Tensor]:
        bounds = {dtype: _largest_below(threshold, dtype) for dtype in FLOATS} if threshold else {}

        def mask(tensor: Tensor) -> Tensor:
            if threshold:
                tensor = F.hardshrink(tensor, bounds[tensor.dtype])  # one pass, forward and backward
            if self._zeros is not None and not recomputing():
                self._zeros.add(path, count_zeros(tensor), tensor.numel())
            return tensor

        return mask


def _side(given: Side | None, found_for: Side | None) -> Side:
    if given is not None:
        one_of(given, get_args(Side), "side")
    if None not in (given, found_for) and given != found_for:
        raise UsageError(f"side: the thresholds were found for {found_for!r}, got {given!r}; leave `side` out")
    return given or found_for or "output"


def change_activations(
    owner: HookOwner,
    model: nn.Module,
    path: str,
    side: Side,
    change: Callable[[Tensor], Tensor],
    *,
    chosen: bool = True,
) -> None:
    """Register a hook that passes every floating-point tensor on one side of a module through `change`."""
    module, where = model.get_submodule(path), f"{side} of {path}"

    def each(tensor: Tensor) -> Tensor:
        return change(tensor) if tensor.is_floating_point() else tensor

    def before(module: nn.Module, arguments: Any, named: Any) -> Any:
        require_floating((arguments, named), where, chosen=chosen)
        return map_tensors((arguments, named), each)

    def after(module: nn.Module, arguments: Any, named: Any, result: Any) -> Any:
        require_floating(result, where, chosen=chosen)
        return map_tensors(result, each)

    if side == "input":
        owner.own_forward_pre(module, before)
    else:
        owner.own_forward(module, after)


def require_floating(value: Any, where: str, *, chosen: bool = True) -> None:
    """Raise if there are no plain floating-point tensors in a value.

    A module that was not chosen by its path, such as an optional norm that is given None, may have a value without any.
    """
    if isinstance(value, Tensor) and value.is_floating_point() and not value.is_nested:
        return
    found = gather(value)
    floating = [tensor for tensor in found if tensor.is_floating_point()]
    for tensor in floating:
        refuse_nested(tensor, where)
    if not floating and chosen:
        kinds = sorted({f"a tensor of {tensor.dtype}" for tensor in found}) or ["no tensor"]
        raise ModelError(
            f"{where}: expected floating-point tensors, alone or in tuples, lists, dicts and dataclasses; got "
            f"{type(value).__name__} with {' and '.join(kinds)}; choose other modules"
        )


def _largest_below(threshold: float, dtype: torch.dtype) -> float:
    """Return the largest number of a floating-point type that is below a threshold above 0."""
    rounded = torch.tensor(threshold, dtype=torch.float64).to(dtype)
    if rounded.double() >= threshold:
        rounded = (rounded.view(BITS[dtype.itemsize]) - 1).view(dtype)
    return float(rounded)
