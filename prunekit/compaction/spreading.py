"""The way back: a compact model's weights at their places in the dense-sized model, exact zeros everywhere else."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from prunekit.channels.copying import named_tensors
from prunekit.channels.slicing import blank, is_variance
from prunekit.errors import PlanError
from prunekit.planning import Plan, require_plan


@torch.no_grad()
def spread_(model: nn.Module, small: nn.Module, plan: Plan) -> None:
    """Writes a compact model's parameters and buffers into the model that it was cut from, in place.

    Afterwards `compact(model, plan)` is `small`, value by value, and the model is masked: what the plan prunes is 0.0,
    but for variances of BatchNorms, which stay what they were.

    Args:
        model: in its dense size.
        small: `compact(model, plan)`, which may have been trained since.
        plan: that it was made by.

    Raises:
        PlanError: they do not belong together; nothing was changed.
    """
    require_plan(plan, model)
    found = dict(named_tensors(small))
    places = {}
    for name, tensor in named_tensors(model):
        axes = plan.kept_indices.get(name, (None,) * tensor.ndim)
        kept = [np.arange(size) if index is None else index for size, index in zip(tensor.shape, axes, strict=True)]
        wanted = tuple(map(len, kept))
        there = found.pop(name, None)
        if there is None or tuple(there.shape) != wanted:
            got = "no such tensor" if there is None else f"the shape {tuple(there.shape)}"
            raise PlanError(
                f"{name}: expected {wanted} in the compact model, got {got}; make it from this model and plan"
            )
        places[name] = tensor, there, kept, name in plan.kept_indices
    if found:
        raise PlanError(f"{next(iter(found))}: the compact model has it and the dense one has no place for it")
    for name, (tensor, there, kept, shrinks) in places.items():
        if name in plan.masked_indices and tensor.is_floating_point() and not is_variance(name):
            blank(tensor, plan.masked_indices[name])
        values = there.to(tensor.device, tensor.dtype)
        if shrinks:
            tensor[np.ix_(*kept)] = values
        else:
            tensor.copy_(values)
