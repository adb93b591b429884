"""Optimizers and averages of weights, cut to the compact model that training continues with."""

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from prunekit.channels.cut.slicing import cut
from prunekit.compaction.compact_model import compact, counterpart
from prunekit.errors import PlanError
from prunekit.hooks.wrappers import unwrapped
from prunekit.modes.public_call import public_call
from prunekit.planning.plan import Plan, require_plan

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
        there[names[dense]]: {key: cut_state(key, value, dense, names[dense], plan) for key, value in state.items()}
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


def _replaced(optimizer: Optimizer, names: Mapping[Tensor, str]) -> set[Tensor]:
    """Return untrained parameters that the model put others in place of, as codebooks of moving averages do."""
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    idle = {one for one in every if one not in names and one.grad is None and not optimizer.state.get(one)}
    # an optimizer without any parameter of the model is that of another model
    return idle if any(one in names for one in every) else set()


def _counterpart(dense: Parameter, names: dict[Tensor, str], there: dict[str, Parameter], plan: Plan) -> Parameter:
    if dense not in names:
        raise PlanError(
            f"the optimizer has a parameter of shape {tuple(dense.shape)} that is not the model's; give the model that "
            "it was made for"
        )
    return counterpart(names[dense], dense, there.get(names[dense]), plan)


def cut_state(key: str, value: Any, dense: Tensor, name: str, plan: Plan) -> Any:
    """Return an entry of an optimizer's state of a dense parameter, cut as the plan cuts the parameter."""
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
