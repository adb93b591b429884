"""The masked model: weight and gradient masks together, and the sparsity that they reach."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prunekit.errors import UsageError
from prunekit.hooks.hook import HookWarning
from prunekit.hooks.owner import HookOwner
from prunekit.hooks.step_hooks import optimizer_of
from prunekit.hooks.wrappers import is_frozen, unwrapped_for_hooks
from prunekit.masks.gradient_masks import GradientMasks, StraightThrough
from prunekit.masks.weight_masks import PrunedValues, WeightMasks
from prunekit.modes.public_call import GradientState, ModuleState, finished
from prunekit.planning.plan import Plan, require_plan


@contextmanager
def masked(
    model: nn.Module, plan: Plan, optimizer: Optimizer | None = None, *, restore: bool = True
) -> Iterator[nn.Module]:
    """Run with a plan's weight masks and gradient masks; yield the model.

    Inside, pruned entries are exactly 0, whatever the optimizer does. On leaving they get back the values that they had
    before, so that the caller's model stays unpruned; kept weights stay as they were trained. `compact(model, plan)`
    makes the same small model before and after.

    Args:
        model: changed in place.
        plan: which entries are pruned.
        optimizer: as for `WeightMasks`. A `HookWarning` says if it has nothing to change, because the whole model is
            frozen.
        restore: False: leaving keeps the zeros.

    Raises:
        PlanError: the plan is that of another model.
        ModelError: the model is compiled already; or sharded, where values cannot be held for `restore`.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> plan = pk.plan(model, torch.randn(1, 4), macs=0.5)
        >>> with pk.masked(model, plan, optimizer):
        ...     model(torch.randn(8, 4)).square().mean().backward()
        ...     optimizer.step()
        ...     zeros = (model[0].weight == 0).all(dim=1).sum()
        >>> int(zeros), bool((model[0].weight == 0).any())
        (8, False)
    """
    inner = unwrapped_for_hooks(model, "masked")
    if optimizer is not None and is_frozen(inner):
        warnings.warn(
            f"masked: every parameter of {type(inner).__name__} has requires_grad=False, so no step changes it; call "
            "model.requires_grad_(True) before fine-tuning",
            HookWarning,
            stacklevel=3,
        )
    weights = WeightMasks(inner, plan, optimizer, restore=restore)
    gradients = GradientMasks(inner, plan, entries=weights.entries)
    before, entered = (ModuleState(inner), GradientState(inner)), False
    try:
        with weights, gradients:
            entered = True
            yield model
    except BaseException:
        if not entered:
            for state in before:
                finished(state.restore)
        raise
    finally:  # again, where an interruption came while they were left
        gradients.remove()
        weights.remove()


class ChangingMasks(HookOwner):
    """Masks as of `masked`, whose plan may change while a model is trained.

    Args:
        model: changed in place.
        plan: the first.
        optimizer: as for `WeightMasks`.
        restore: whether leaving brings back the values of the entries that are pruned then; False: it keeps the zeros.
        gradients: whether gradients are masked too. Without that pruned weights are zero all the same, but their
            gradients count where gradients are clipped by norm, and enter the optimizer's momentum.
        straight_through: how fast the values behind masked single weights fade, which learn on with the gradients of
            the zeros in their place until `end_straight_through`, see `StraightThrough`; None: they rest.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(1, 4)
        >>> with pk.ChangingMasks(model, pk.plan(model, x, channels=0.75)) as masks:
        ...     few = int((model[0].weight == 0).all(dim=1).sum())
        ...     masks.update(pk.plan(model, x, channels=0.5))
        ...     more = int((model[0].weight == 0).all(dim=1).sum())
        >>> few, more
        (4, 8)
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: Optimizer | None = None,
        *,
        restore: bool = True,
        gradients: bool = True,
        straight_through: float | None = None,
    ) -> None:
        super().__init__()
        self.plan = plan
        model = unwrapped_for_hooks(model, "ChangingMasks")
        self._weights = WeightMasks(model, plan, optimizer, restore=restore, changing=True)
        entries = self._weights.entries
        self._gradients = GradientMasks(model, plan, entries=entries, changing=True) if gradients else None
        self._learning: StraightThrough | None = None
        if straight_through is not None:
            if optimizer is None:
                raise UsageError("straight_through: expected None without an optimizer, which weights learn by")
            self._learning = StraightThrough(model, optimizer_of(model, optimizer), straight_through)

    def register(self) -> None:
        """Enter both kinds of masks."""
        if self._learning is not None:
            self.own_context(self._learning)
        self.own_context(self._weights)
        if self._gradients is not None:
            self.own_context(self._gradients)
        if self._learning is not None:
            self._learning.use(self.plan, self._weights.held)
            self.spare_gradients(False)

    def update(self, plan: Plan, *, from_zero: bool = False) -> None:
        """Mask by another plan, between two steps; see `WeightMasks.update`."""
        if self._learning is not None:
            self._learning.write_to(self._weights.held)
        self._weights.update(plan, from_zero=from_zero)
        if self._gradients is not None:
            self._gradients.update(plan)
        self.plan = plan
        if self._learning is not None:
            self._learning.use(plan, self._weights.held)

    def spare_gradients(self, spare: bool) -> None:
        """Leave the gradients of masked single weights to the optimizer's step, or mask them as soon as they are there.

        Code that reads them before the step calls `mask_gradients` afterwards, so that the step sees zeros.
        """
        if self._gradients is not None:
            self._gradients.spare_single_weights(spare or self._learning is not None)

    def mask_gradients(self) -> None:
        """Mask all gradients now, unless masked weights learn by them."""
        if self._gradients is not None and self._learning is None:
            self._gradients.zero_()

    def end_straight_through(self) -> None:
        """Let masked weights rest from now on."""
        if self._learning is not None:
            self._learning.write_to(self._weights.held)
            self._learning.remove()
            self._learning = None
            self.spare_gradients(False)

    def load_held(self, values: Mapping[str, Tensor]) -> None:
        """Hold other values of the same pruned entries, as a run that is resumed does; see `PrunedValues.load`."""
        self._weights.held.load(values)
        if self._learning is not None:
            self._learning.use(self.plan, self._weights.held)

    @property
    def held(self) -> PrunedValues:
        """The values that pruned entries had when they were pruned; or have now, if they learn on."""
        if self._learning is not None:
            self._learning.write_to(self._weights.held)
        return self._weights.held


@dataclass(frozen=True)
class Sparsity:
    """The shares of a model that a plan removes."""

    weights: float
    """Share of exact zeros among the entries of all weights with two or more axes, in 0..1."""
    channels: float
    """Share of the prunable channels that the plan removes, in 0..1; coupled channels count once."""


def sparsity(model: nn.Module, plan: Plan) -> Sparsity:
    """Measure the sparsity of a masked model.

    Biases and the parameters of norms are left out of `weights`: new ones are zero without being pruned.
    """
    require_plan(plan)
    weights = [parameter.detach() for parameter in model.parameters() if parameter.ndim >= 2]
    zeros = sum(weight.numel() - int(torch.count_nonzero(weight)) for weight in weights)
    free = np.concatenate([group.labels for group in plan.channel_map.groups] or [np.zeros(0, np.int64)])
    removed = int(np.count_nonzero(~plan.keep[free]))
    total = sum(weight.numel() for weight in weights)
    return Sparsity(weights=zeros / total if total else 0.0, channels=removed / len(free) if len(free) else 0.0)
