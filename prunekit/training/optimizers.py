"""Optimizers built from settings: learning rates, gradient clamps, and paused runs cut to the compact model."""

import math
from bisect import bisect_right
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from prunekit.channels.cut.slicing import cut
from prunekit.channels.labels.label_union import Labels
from prunekit.compaction.optimizer_transfer import cut_state
from prunekit.distributed.process_group import gather_values
from prunekit.errors import PlanError, UsageError
from prunekit.masks.gradient_clamps import GradientClamp, clamp_activation_grad, clamp_weight_grad
from prunekit.planning.plan import Plan, require_plan
from prunekit.settings.train import ClampSettings, TrainSettings
from prunekit.training.callbacks.averaging import Average
from prunekit.training.callbacks.callback import ClampRow, PausedRun
from prunekit.training.callbacks.pruning_schedule import PruningSchedule

MakeOptimizer = Callable[..., Optimizer]
"""The user's own optimizer: called as `make(groups, lr=lr)`, such as a class. Groups have their weight decay."""


def build_optimizer(model: nn.Module, settings: TrainSettings, own: MakeOptimizer | None = None) -> Optimizer:
    """Return SGD with momentum, Adam, AdamW or the user's own optimizer over the trainable parameters.

    Weight decay acts on weights of two or more axes; norms and biases are left alone (He et al. 2019, "Bag of Tricks").
    """
    if (settings.optimizer == "own") != (own is not None):
        given = "was given" if own is not None else "was not given"
        raise UsageError(
            f"optimizer is {settings.optimizer!r} and one of your own {given}: expected 'own' together with one"
        )
    if settings.nesterov and (settings.optimizer != "sgd" or settings.momentum == 0):
        raise UsageError(f"nesterov: expected sgd with momentum, got {settings.optimizer} with {settings.momentum:g}")
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.lr == "auto":
        raise UsageError("lr: expected a number here, got 'auto', which only a whole training finds")
    if own is None:
        # Fused, one pass updates weight, gradient and momentum, on the CPU as on CUDA. Not under a loss scale: if the
        # first step is skipped, fused SGD continues with a momentum that was never written. Nor with shards: torch 2.15
        # has no fused SGD for them.
        fused = settings.precision != "fp16" and settings.sharding != "full"
        if settings.optimizer == "sgd":
            return SGD(groups, settings.lr, settings.momentum, nesterov=settings.nesterov, fused=fused)
        kind = Adam if settings.optimizer == "adam" else AdamW
        return kind(groups, settings.lr, fused=fused)
    optimizer = own(groups, lr=settings.lr)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"your own optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    return optimizer


def build_schedule(optimizer: Optimizer, steps: int, warmup: float, restarts: Sequence[int] = ()) -> LambdaLR:
    """Return a linear warm-up followed by a cosine to zero (Loshchilov & Hutter 2017).

    Both start again before the steps `restarts`, ascending, which rewinds the learning rate (Renda et al. 2020).
    """
    return LambdaLR(optimizer, rate_factor(steps, warmup, restarts))


def rate_factor(steps: int, warmup: float, restarts: Sequence[int] = ()) -> Callable[[int], float]:
    """Return by which factor of the largest rate each step is made, counted from 0; see `build_schedule`."""
    edges = [0, *restarts, steps]

    def factor(step: int) -> float:
        which = min(bisect_right(edges, step), len(edges) - 1)
        begin, length = edges[which - 1], edges[which] - edges[which - 1]
        step, rising = step - begin, round(length * warmup)
        if step < rising:
            return (step + 1) / (rising + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, length - rising)))

    return factor


def set_rate(optimizer: Optimizer, schedule: LRScheduler, rate: float) -> None:
    """Make a schedule that has not begun one of another largest rate, as if the optimizer had been built with it."""
    assert isinstance(schedule, LambdaLR)
    rates = [rate * factor(0) for factor in schedule.lr_lambdas]
    for group, first in zip(optimizer.param_groups, rates, strict=True):
        group.update(initial_lr=rate, lr=first)
    schedule.load_state_dict({**schedule.state_dict(), "base_lrs": [rate] * len(rates), "_last_lr": rates})


def transfer_run(run: PausedRun, plan: Plan) -> PausedRun:
    """Return a run that `fit` paused under the masks of its final plan as a run of the compact model.

    Weights, the best so far, the optimizer's state and the average of weights keep the entries of kept channels;
    learning-rate schedule, random state, position in the epoch and everything else don't change. The `PruningSchedule`
    is no longer among the callbacks: give `fit` the others, in the same order.
    """
    require_plan(plan)
    state = run.state
    training, optimizer = state["training"], state["training"]["optimizer"]
    kept = _kept_indices(training["model"] | training["buffers"], plan)
    callbacks = [
        {"average": _cut_all(saved["average"], kept, "module.", plan.lost)} if kind is Average else saved
        for kind, saved in zip(run.callbacks, state["callbacks"], strict=True)
        if kind is not PruningSchedule
    ]
    left = [index for index, name in enumerate(run.parameters) if name not in plan.lost]
    number = {index: position for position, index in enumerate(left)}
    moments = {
        number[index]: {
            key: cut_state(key, value, training["model"][run.parameters[index]], run.parameters[index], plan)
            for key, value in values.items()
        }
        for index, values in optimizer["state"].items()
        if index in number
    }
    groups = [
        {**group, "params": [number[index] for index in group["params"] if index in number]}
        for group in optimizer["param_groups"]
    ]
    carried = {
        **training,
        "model": _cut_all(training["model"], kept, lost=plan.lost),
        "buffers": _cut_all(training["buffers"], kept, lost=plan.lost),
        "optimizer": {**optimizer, "state": moments, "param_groups": groups},
    }
    offered = {part: _cut_all(state["best"][part], kept, lost=plan.lost) for part in ("weights", "buffers")}
    kinds = tuple(kind for kind in run.callbacks if kind is not PruningSchedule)
    parameters = type(run.parameters)(run.parameters[index] for index in left)
    best = {**state["best"], **offered}
    return PausedRun({**state, "callbacks": callbacks, "training": carried, "best": best}, parameters, kinds)


Kept = Mapping[str, tuple[Labels | None, ...]]


def _kept_indices(tensors: Mapping[str, Tensor], plan: Plan) -> Kept:
    """Return the plan's kept indices by every name of a tensor that has several, of which the plan has the first."""
    first: dict[tuple[int, torch.Size], str] = {}
    names = {name: first.setdefault((tensor.data_ptr(), tensor.shape), name) for name, tensor in tensors.items()}
    shapes = plan.channel_map.shapes
    for name in (*names.values(), *plan.kept_indices):
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != shapes.get(name):
            raise PlanError(
                f"{name!r}: of shape {found} in the run, and {shapes.get(name)} in the plan (None: there is none); "
                "give the plan that masked this run"
            )
    return {**plan.kept_indices, **{n: plan.kept_indices[of] for n, of in names.items() if of in plan.kept_indices}}


def _cut_all(
    tensors: Mapping[str, Tensor], kept: Kept, prefix: str = "", lost: Container[str] = ()
) -> dict[str, Tensor]:
    named = {name: name.removeprefix(prefix) for name in tensors}
    return {name: cut(tensors[name], kept.get(own, ())).clone() for name, own in named.items() if own not in lost}


class GradientClamps:
    """The gradient clamps that the settings ask for; a `UsageError` if one of their globs matches nothing."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, settings: TrainSettings, scaler: torch.amp.GradScaler | None
    ) -> None:
        self._clamps: dict[str, tuple[GradientClamp, ClampSettings]] = {}
        if (wanted := settings.clamp_activation_grad) is not None:
            activation = clamp_activation_grad(model, _limits(wanted), by=wanted.by, loss_scale=scaler)
            self._clamps["clamp_activation_grad"] = activation, wanted
        if (wanted := settings.clamp_weight_grad) is not None:
            weight = clamp_weight_grad(model, optimizer, _limits(wanted), by=wanted.by)
            self._clamps["clamp_weight_grad"] = weight, wanted

    @property
    def contexts(self) -> list[GradientClamp]:
        """The clamps as contexts, in which gradients are clamped."""
        return [clamp for clamp, _ in self._clamps.values()]

    def state_dict(self) -> dict[str, Any]:
        """Return how often each was needed so far."""
        return {name: clamp.state_dict() for name, (clamp, _) in self._clamps.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counting from a state."""
        for name, (clamp, _) in self._clamps.items():
            clamp.load_state_dict(state[name])

    def counts(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Return by clamp and module path how many were beyond the limit so far, and of how many, in all processes."""
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for name, (clamp, _) in self._clamps.items():
            sums = found[name] = {}
            for counts in gather_values(clamp.counts()):
                for path, (beyond, of) in counts.items():
                    before = sums.get(path, (0, 0))
                    sums[path] = before[0] + beyond, before[1] + of
        return found

    def rows(self) -> tuple[ClampRow, ...]:
        """Return one row for each module whose gradients were checked, over all processes."""
        return tuple(
            ClampRow(name, path, wanted.by, clamp.limits[path], beyond / total)
            for (name, (clamp, wanted)), counts in zip(self._clamps.items(), self.counts().values(), strict=True)
            for path, (beyond, total) in counts.items()
            if total
        )


def check_clamps(model: nn.Module, settings: TrainSettings) -> None:
    """Raise UsageError, before anything is trained, if a glob of the clamps matches no module."""
    any_optimizer = build_optimizer(model, replace(settings, optimizer="sgd", nesterov=False, lr=1.0))
    GradientClamps(model, any_optimizer, settings, None)


def _limits(settings: ClampSettings) -> float | Mapping[str, float]:
    return settings.limit if settings.modules is None else dict.fromkeys(settings.modules, settings.limit)
