"""Sparsity regularizers: training that makes whole channels small, so that little is lost when they are removed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from prunekit.channels.cut.model_match import require_model
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.criteria.magnitude import NORMS
from prunekit.errors import UsageError
from prunekit.planning.plan import Plan
from prunekit.settings.train import RegularizerSettings
from prunekit.training.callbacks.callback import Callback, TrainingRun
from prunekit.utils.tensors import accumulation_dtype

LASSO, CEILING = 1e-4, 1.0
"""Strengths if the settings give none."""


class SparsityRegularizer(Callback):
    """Adds the gradient of a sparsity penalty to that of the loss, once a step, before gradients are clamped.

    The penalty is not part of the training loss that epochs report. Its gradient passes through the optimizer as that
    of the loss: Adam rescales it, and weight decay is added.

    The last epoch is kept and not the best one, because accuracy is highest before channels shrink. With `growing` the
    best one is chosen among the epochs in which lambda is at its ceiling. Only `growing` needs a plan: it shrinks the
    channels that the plan removes.

    Raises:
        UsageError: `growing` has no plan; on enter, when `bn_l1` finds no norm to act on.
        PlanError: on enter, when the map is that of another model.
    """

    def __init__(self, settings: RegularizerSettings, channel_map: ChannelMap, plan: Plan | None = None) -> None:
        if settings.method == "growing" and plan is None:
            raise UsageError(
                "regularize.method 'growing' shrinks the channels that a plan removes, and there is no plan here; "
                "use it in `sparsify`, or use 'group_lasso' or 'bn_l1'"
            )
        self._settings, self._map, self._plan = settings, channel_map, plan
        self._penalty: GroupLasso | Growing | None = None
        self._step = 0

    @contextmanager
    def active(self, run: TrainingRun) -> Iterator[None]:
        """Build the penalty, and add its gradient before each step."""
        self._penalty = self._build(run)
        handle = run.optimizer.register_step_pre_hook(self._add)
        try:
            yield
        finally:
            handle.remove()

    def _build(self, run: TrainingRun) -> GroupLasso | Growing:
        require_model(self._map, run.model, "the channel map")
        settings = self._settings
        trained: dict[str, Tensor] = {
            name: parameter for name, parameter in run.model.named_parameters() if parameter.requires_grad
        }
        if self._plan is not None and settings.method == "growing":
            increases = max(1, round(settings.rise * run.steps * run.epochs / settings.every))
            ceiling = settings.strength or CEILING
            return Growing(self._plan, trained, ceiling=ceiling, increases=increases, every=settings.every)
        if settings.method == "bn_l1":
            norms = [path for path, module in run.model.named_modules() if isinstance(module, NORMS)]
            scales = [f"{path}.weight" if path else "weight" for path in norms]
            trained = {name: trained[name] for name in scales if name in trained}
        lasso = GroupLasso(self._map, trained, settings.strength or LASSO)
        if lasso.empty:
            raise UsageError(
                f"regularize.method {settings.method!r}: no channel that can be pruned lies on "
                f"{'the scale of a norm' if settings.method == 'bn_l1' else 'a weight that is trained'}; "
                "use 'group_lasso', or leave `regularize` out"
            )
        return lasso

    def _add(self, optimizer: Optimizer, *_: Any) -> None:
        # A fused optimizer under a GradScaler is given the scale and unscales in its step; others see true gradients.
        scale = getattr(optimizer, "grad_scale", None)
        assert self._penalty is not None
        with torch.no_grad():
            self._penalty.add_gradients_(max(1, self._step), 1.0 if scale is None else float(scale))

    def before_step(self, step: int) -> None:
        """Note the step, on which the penalty depends."""
        self._step = step

    def eligible_for_best(self, epoch: int) -> bool:
        """Return whether the penalty has its final strength."""
        return self._penalty is not None and self._penalty.final(self._step)

    def progress_metrics(self) -> Mapping[str, Any]:
        """Return the value of the penalty."""
        return {} if self._penalty is None else {"penalty": f"{self._penalty.value(max(1, self._step)):.3g}"}


class GroupLasso:
    """strength * sum over labels of sqrt(n) * |w|, over the n entries w of all slices that carry a label.

    Yuan & Lin 2006, on channels as in Wen et al. 2016 ("Structured sparsity learning"), but over everything that is
    removed with a channel: the filters that compute it, their biases and norms, and the columns that read it, across
    shortcuts. Each entry is pulled by strength * w / rms(w), so that a strength means the same in groups of any size.
    An entry that carries two labels, as the weight of a convolution does, belongs to the slices of both.

    Over the scales of norms alone it is network slimming (Liu et al. 2017): strength * |gamma| if one norm carries a
    label; if several do, as behind a shortcut, they shrink together.
    """

    def __init__(self, channel_map: ChannelMap, parameters: Mapping[str, Tensor], strength: float) -> None:
        self._n_labels = channel_map.n_labels
        self._carriers: list[_Carrier] = []
        for name, parameter in parameters.items():
            axes = [
                (axis, torch.from_numpy(deciding).to(parameter.device))
                for axis, labels in enumerate(channel_map.labels.get(name, ()))
                if labels is not None and labels.any()
                for deciding in channel_map.deciding(labels)
            ]
            if axes:
                self._carriers.append(_Carrier(parameter, tuple(axes)))
        counts = self._sums((each, torch.ones(each.parameter.shape)) for each in self._carriers)
        self._weights = strength * counts.sqrt()  # (n_labels,)

    @property
    def empty(self) -> bool:
        """True if no free label lies on any of the parameters."""
        return not bool(self._weights.any())

    def value(self, step: int) -> float:
        """Return the value for the present weights."""
        return float((self._weights * self._norms()).sum())

    def _norms(self) -> Tensor:
        """Return |w| of each label, (n_labels,) float64 (float32 if the device has none); 0 for locked labels."""
        return self._sums((each, each.parameter.detach().square()) for each in self._carriers).sqrt()

    def _sums(self, values: Iterable[tuple[_Carrier, Tensor]]) -> Tensor:
        total: Tensor | None = None
        for carrier, entries in values:
            device = carrier.parameter.device
            if total is None:
                total = torch.zeros(self._n_labels, dtype=accumulation_dtype(device), device=device)
            labeled = {axis for axis, _ in carrier.axes}
            rest = [axis for axis in range(entries.ndim) if axis not in labeled]
            small = entries.sum(rest, keepdim=True) if rest else entries  # read once, whatever axes there are
            for axis, labels in carrier.axes:
                others = [other for other in range(small.ndim) if other != axis]
                along = small.sum(others) if others else small
                total.index_add_(0, labels, along.to(device, total.dtype))
        total = torch.zeros(self._n_labels) if total is None else total
        total[0] = 0
        return total

    def add_gradients_(self, step: int, scale: float) -> None:
        """Add `scale` times the gradient to the parameters'; a parameter that the loss did not reach gets none."""
        norms = self._norms()
        # At 0 the penalty has no gradient; 0 is among its subgradients, and leaves pruned channels at 0.
        factors = torch.where(norms > 0, scale * self._weights / norms, 0.0)
        for carrier in self._carriers:
            parameter, added = carrier.parameter, torch.zeros((), device=carrier.parameter.device)
            if parameter.grad is None:
                continue
            for axis, labels in carrier.axes:
                along = [-1 if position == axis else 1 for position in range(parameter.ndim)]
                added = added + factors[labels].to(parameter.dtype).view(along)
            parameter.grad.addcmul_(parameter.detach(), added)

    def final(self, step: int) -> bool:
        """Return False: channels shrink until the last epoch, for which training is meant."""
        return False


class Growing:
    """lambda / 2 * |w|^2 over all entries w that a plan removes, where lambda grows with the steps.

    Wang et al. 2021 ("Neural pruning via growing regularization", GReg-1): from 0 by equal amounts every few steps up
    to a ceiling, so that the network adapts to the removal of channels while it trains.
    """

    def __init__(
        self, plan: Plan, parameters: Mapping[str, Tensor], *, ceiling: float, increases: int, every: int
    ) -> None:
        self._ceiling, self._increases, self._every = ceiling, increases, every
        masks = {name: plan.mask(name) for name in parameters}
        self._removed = [
            (parameters[name], (~mask).to(parameters[name].device, parameters[name].dtype))
            for name, mask in masks.items()
            if mask is not None
        ]

    def factor(self, step: int) -> float:
        """Return lambda at a step, counted from 1."""
        return self._ceiling * min(1.0, ((step - 1) // self._every) / self._increases)

    def value(self, step: int) -> float:
        """Return the value for the present weights."""
        sums = [float((parameter.detach().square() * removed).sum()) for parameter, removed in self._removed]
        return self.factor(step) / 2 * math.fsum(sums)

    def add_gradients_(self, step: int, scale: float) -> None:
        """Add `scale` times the gradient to the parameters'."""
        factor = scale * self.factor(step)
        for parameter, removed in self._removed:
            if parameter.grad is not None:
                parameter.grad.addcmul_(parameter.detach(), removed, value=factor)

    def final(self, step: int) -> bool:
        """Return whether lambda is at its ceiling, so that epochs may be compared by their accuracy."""
        return self.factor(step) == self._ceiling


@dataclass(frozen=True)
class _Carrier:
    """A parameter, and the labels along those of its axes that carry free ones."""

    parameter: Tensor
    # an axis is listed once for each label that decides on an index, as heads and positions in them do
    axes: tuple[tuple[int, Tensor], ...]  # (axis, int64 (size,)), on the parameter's device
