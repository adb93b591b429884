"""Going on with the compact model: what training has gathered is carried over index by index."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from prunekit.channels.slicing import cut
from prunekit.compaction import compact
from prunekit.errors import PlanError
from prunekit.planning import Plan


def carry_over(optimizer: Optimizer, model: nn.Module, small: nn.Module, plan: Plan) -> None:
    """Makes an optimizer of the masked model one of the compact model, in place; training goes on as it would have.

    Parameters, gradients and every state of a parameter's shape (momentum, second moments, the maxima of AMSGrad) keep
    the entries of the channels that stay; step counts and other numbers stay as they are. Groups keep their settings
    and their order, and because the optimizer is the same object, learning-rate schedulers, loss scalers and hooks of
    its own go on with it. Masks (`prunekit.masked`) have to be left before: the compact model has nothing to mask.

    Losses afterwards equal those of masked training up to the order of sums, also where gradients are clipped by norm:
    what was masked contributes nothing. Dropout draws other numbers, because there are fewer activations.

    Args:
        optimizer: torch's own, or a user's; changed. Wrappers such as Accelerate's are given by what they wrap.
        model: in its dense size; not changed.
        small: `prunekit.compact(model, plan)`.
        plan: that the masks and the compact model were made by.

    Raises:
        PlanError: the optimizer has a parameter that is not the model's, the models do not belong together, or a state
            has a shape that says not where its entries belong (as of optimizers that factor their moments); nothing
            was changed.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters(remove_duplicate=False)}
    there = dict(small.named_parameters(remove_duplicate=False))
    dense_groups = [list(group["params"]) for group in optimizer.param_groups]
    groups = [[_counterpart(dense, names, there, plan) for dense in group] for group in dense_groups]
    states: dict[Tensor, Any] = {
        there[names[dense]]: {key: _state(key, value, dense, names[dense], plan) for key, value in state.items()}
        for dense, state in optimizer.state.items()
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


def carry_average(average: AveragedModel, plan: Plan) -> AveragedModel:
    """The average of weights (EMA, SWA) that goes on with the compact model: kept entries, and as many models in it.

    Args:
        average: of the masked model, in its dense size; not changed.
        plan: that the masks and the compact model were made by.
    """
    device = next((tensor.device for tensor in average.module.parameters()), None)
    carried = AveragedModel(
        compact(average.module, plan),
        device,
        average.avg_fn,
        average.multi_avg_fn,
        average.use_buffers,
    )
    carried.n_averaged.copy_(average.n_averaged)
    return carried


def _counterpart(dense: Parameter, names: dict[Tensor, str], there: dict[str, Parameter], plan: Plan) -> Parameter:
    if dense not in names:
        raise PlanError(
            f"the optimizer has a parameter of shape {tuple(dense.shape)} that is not the model's; give the model that "
            "it was made for"
        )
    name = names[dense]
    found = there.get(name)
    wanted = _left(dense, name, plan)
    if found is None or tuple(found.shape) != wanted:
        got = "no such parameter" if found is None else f"the shape {tuple(found.shape)}"
        raise PlanError(f"{name}: expected {wanted} in the compact model, got {got}; make it from this model and plan")
    return found


def _left(dense: Tensor, name: str, plan: Plan) -> tuple[int, ...]:
    kept = plan.kept_indices.get(name, (None,) * dense.dim())
    return tuple(size if index is None else len(index) for size, index in zip(dense.shape, kept, strict=True))


def _state(key: str, value: Any, dense: Tensor, name: str, plan: Plan) -> Any:
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
