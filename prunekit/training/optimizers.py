"""Optimizers: built from settings with their learning-rate schedule, and transferred to the compact model."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

from prunekit.channels.cut.slicing import cut
from prunekit.channels.labels import Labels
from prunekit.compaction.compact_model import compact
from prunekit.errors import PlanError, UsageError
from prunekit.hooks.wrappers import unwrapped
from prunekit.modes.public_call import public_call
from prunekit.planning.plan import Plan, require_plan
from prunekit.settings.train import TrainSettings
from prunekit.training.callbacks.averaging import Average
from prunekit.training.callbacks.history import PausedRun
from prunekit.training.callbacks.scheduled_masks import PruningSchedule

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
    if own is None:
        return _OPTIMIZERS[settings.optimizer](groups, settings)
    optimizer = own(groups, lr=settings.lr)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"your own optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    return optimizer


def _fused(settings: TrainSettings) -> bool:
    """Return whether one pass updates weight, gradient and momentum, on the CPU as on CUDA.

    Not under a loss scale: if the first step is skipped, fused SGD continues with a momentum that was never written.
    Nor with shards: torch 2.15 has no fused SGD for them.
    """
    return settings.precision != "fp16" and settings.sharding != "full"


_OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], TrainSettings], Optimizer]] = {
    "sgd": lambda groups, s: SGD(groups, lr=s.lr, momentum=s.momentum, nesterov=s.nesterov, fused=_fused(s)),
    "adam": lambda groups, s: Adam(groups, lr=s.lr, fused=_fused(s)),
    "adamw": lambda groups, s: AdamW(groups, lr=s.lr, fused=_fused(s)),
}


def build_schedule(optimizer: Optimizer, steps: int, warmup: float, restarts: Sequence[int] = ()) -> LambdaLR:
    """Return a linear warm-up followed by a cosine to zero (Loshchilov & Hutter 2017).

    Args:
        restarts: steps before which the schedule starts again, ascending, each round with its own share of warm-up:
            the learning rate is rewound (Renda et al. 2020).
    """
    edges = [0, *restarts, steps]

    def factor(step: int) -> float:
        which = min(bisect_right(edges, step), len(edges) - 1)
        begin, length = edges[which - 1], edges[which] - edges[which - 1]
        step, rising = step - begin, round(length * warmup)
        if step < rising:
            return (step + 1) / (rising + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, length - rising)))

    return LambdaLR(optimizer, factor)


Stepper = TypeVar("Stepper", bound=Optimizer)


@public_call
def transfer(optimizer: Stepper, model: nn.Module, small: nn.Module, plan: Plan) -> Stepper:
    """Make an optimizer of the masked model one of the compact model, in place, so that training continues.

    Parameters, gradients and every state of a parameter's shape (momentum, second moments, the maxima of AMSGrad) keep
    the entries of kept channels; step counts and other numbers don't change. Groups keep their settings and order, and
    because the optimizer is the same object, learning-rate schedulers, loss scalers and its own hooks continue with it.
    Leave masks (`prunekit.masked`) before: the compact model has nothing to mask.

    Losses afterwards equal those of masked training up to the order of sums, also if gradients are clipped by norm,
    because masked entries contribute nothing. Dropout draws other numbers, because there are fewer activations.

    Args:
        optimizer: torch's own, or a user's; changed. For a wrapper such as Accelerate's, give the wrapped optimizer.
        model: in its dense size; not changed.
        small: `prunekit.compact(model, plan)`.
        plan: the plan of the masks and of the compact model.

    Returns:
        The optimizer that was given.

    Raises:
        PlanError: the plan is that of another model, the optimizer has a parameter that is not the model's, the models
            do not belong together, or a state's shape does not show which entries belong to which channel (as in
            optimizers that factor their moments); nothing was changed.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> plan = pk.plan(model, torch.randn(1, 4), macs=0.5)
        >>> small = pk.compact(model, plan)
        >>> optimizer = pk.transfer(optimizer, model, small, plan)
        >>> optimizer.param_groups[0]["params"][0] is small[0].weight
        True
    """
    model, small = unwrapped(model), unwrapped(small)
    require_plan(plan, model)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}  # its first, as plans
    there = dict(small.named_parameters(remove_duplicate=False))
    replaced = _replaced(optimizer, names)
    dense_groups = [
        [dense for dense in group["params"] if names.get(dense) not in plan.lost and dense not in replaced]
        for group in optimizer.param_groups
    ]
    groups = [[_counterpart(dense, names, there, plan) for dense in group] for group in dense_groups]
    states: dict[Tensor, Any] = {
        there[names[dense]]: {key: _cut_state(key, value, dense, names[dense], plan) for key, value in state.items()}
        for dense, state in optimizer.state.items()
        if names[dense] not in plan.lost
    }
    gradients = {
        there[names[dense]]: cut(dense.grad, plan.kept_indices.get(names[dense], ())).clone()
        for group in dense_groups
        for dense in group
        if dense.grad is not None
    }
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = parameters
    optimizer.state.clear()
    optimizer.state.update(states)
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    return optimizer


@public_call
def transfer_average(average: AveragedModel, plan: Plan) -> AveragedModel:
    """Return an average of weights (EMA, SWA) cut to the compact model, with the same number of averaged models.

    Args:
        average: of the masked model, in its dense size; not changed.
        plan: the plan of the masks and of the compact model.

    Raises:
        PlanError: the plan is that of another model.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> average = torch.optim.swa_utils.AveragedModel(model)
        >>> average.update_parameters(model)  # after each step of training under masks
        >>> plan = pk.plan(model, torch.randn(1, 4), macs=0.5)
        >>> small = pk.transfer_average(average, plan)
        >>> small.module[0].out_features, int(small.n_averaged)
        (8, 1)
    """
    device = next((tensor.device for tensor in average.module.parameters()), None)
    carried = AveragedModel(nn.Module(), device, average.avg_fn, average.multi_avg_fn, average.use_buffers)
    carried.module = compact(average.module, plan)
    carried.n_averaged.copy_(average.n_averaged)
    return carried


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
            key: _cut_state(key, value, training["model"][run.parameters[index]], run.parameters[index], plan)
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
    best = {**state["best"], "weights": _cut_all(state["best"]["weights"], kept, lost=plan.lost)}
    kinds = tuple(kind for kind in run.callbacks if kind is not PruningSchedule)
    parameters = type(run.parameters)(run.parameters[index] for index in left)
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


def _replaced(optimizer: Optimizer, names: Mapping[Tensor, str]) -> set[Tensor]:
    """Return parameters that the model put others in place of, as codebooks of moving averages do in each step.

    Nothing was trained of them. An optimizer without any parameter of the model is that of another model.
    """
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    idle = {one for one in every if one not in names and one.grad is None and not optimizer.state.get(one)}
    return idle if any(one in names for one in every) else set()


def _counterpart(dense: Parameter, names: dict[Tensor, str], there: dict[str, Parameter], plan: Plan) -> Parameter:
    if dense not in names:
        raise PlanError(
            f"the optimizer has a parameter of shape {tuple(dense.shape)} that is not the model's; give the model that "
            "it was made for"
        )
    name = names[dense]
    found = there.get(name)
    wanted = _kept_shape(dense, name, plan)
    if found is None or tuple(found.shape) != wanted:
        got = "no such parameter" if found is None else f"the shape {tuple(found.shape)}"
        raise PlanError(f"{name}: expected {wanted} in the compact model, got {got}; make it from this model and plan")
    return found


def _kept_shape(dense: Tensor, name: str, plan: Plan) -> tuple[int, ...]:
    kept = plan.kept_indices.get(name, (None,) * dense.dim())
    return tuple(size if index is None else len(index) for size, index in zip(dense.shape, kept, strict=True))


def _cut_state(key: str, value: Any, dense: Tensor, name: str, plan: Plan) -> Any:
    if not isinstance(value, Tensor) or not value.dim():
        return value
    if value.shape == dense.shape:
        return cut(value, plan.kept_indices.get(name, ()))
    if name not in plan.kept_indices:
        return value
    raise PlanError(
        f"{name}: the optimizer's state {key!r} has the shape {tuple(value.shape)} and the parameter "
        f"{tuple(dense.shape)}; only states of the parameter's own shape can be carried over"
    )
