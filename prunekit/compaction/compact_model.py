"""Compact models: masked channels are removed, and the weights can be written back into the dense model."""

import sys
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.channels.cut.shorter_model import AbsentModule, ConstantModule, EmptyModule, ShorterModule
from prunekit.channels.cut.slicing import narrowed
from prunekit.channels.rewrite.source_rewriter import original_of
from prunekit.channels.tracing.substitutes import SizedAttention
from prunekit.errors import PlanError
from prunekit.hooks.model_copy import named_tensors
from prunekit.hooks.wrappers import is_frozen, unwrapped
from prunekit.models.hugging_face import set_noted_config, unsayable
from prunekit.modes.public_call import public_call
from prunekit.planning.plan import Plan, require_plan
from prunekit.planning.stored_plan import LIBRARY_CONFIG

Found = TypeVar("Found", bound=Tensor)


@public_call
def compact(model: nn.Module, plan: Plan) -> nn.Module:
    """Return a new, smaller model of the same class without the channels that a plan removes.

    Args:
        model: the masked model, in its dense size; not changed. Its values at removed entries are not checked:
            `prunekit.measure.verification` tells whether they were zero.
        plan: made for this model.

    Returns:
        A model of the same class, in the same train or eval mode and on the same device, each of its parameters
        trainable or frozen as in the model given. Methods of an instance that Accelerate or torch wrapped, as in
        autocast, are not wrapped in the compact model: prepare it again.

    Raises:
        UsageError: the plan is no `Plan`.
        PlanError: the plan is that of another model; the message names the first tensor that does not fit.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> plan = pk.plan(model, torch.randn(1, 4), macs=0.5)
        >>> [tuple(parameter.shape) for parameter in pk.compact(model, plan).parameters()]
        [(8, 4), (8,), (2, 8), (2,)]
    """
    model = unwrapped(model)
    require_plan(plan, model)
    small = narrowed(model, plan.channel_map, plan.keep, plan.kept_indices)
    set_noted_config(small, plan.provenance.get(LIBRARY_CONFIG))
    return small


def remarks(small: nn.Module) -> tuple[str, ...]:
    """Return remarks on a compact model for its user: which classes are not the user's, and whether it is frozen."""
    classes = {type(module) for module in small.modules()}
    of_blocks = {AbsentModule, ConstantModule, EmptyModule, ShorterModule}
    named = {
        "methods compiled again with explicit sizes": {
            original_of(cls) for cls in classes if original_of(cls) is not cls
        },
        "modules with explicit sizes in place of torch's or the model's own": {
            cls for cls in classes if issubclass(cls, SizedAttention)
        },
        "modules in place of blocks that are gone": classes & of_blocks,
    }
    parts = [f"{what}: {', '.join(sorted(cls.__name__ for cls in found))}" for what, found in named.items() if found]
    found = []
    if parts:
        found.append(
            f"{'; '.join(parts)}. Pickled, as by torch.save(model), it loads where prunekit is installed; "
            "plain_classes=True keeps all classes as they are, and prunes less"
        )
    if "transformers" in sys.modules and (said := unsayable(small)) is not None:
        found.append(said)
    count = sum(1 for _ in small.parameters())
    if count and is_frozen(small):
        found.append(
            f"all {count} parameters are frozen (requires_grad=False), as in the model that was given; call "
            "model.requires_grad_(True) before fine-tuning"
        )
    return tuple(found)


@torch.no_grad()
def spread_(model: nn.Module, small: nn.Module, plan: Plan) -> None:
    """Write a compact model's parameters and buffers into the model that it was cut from, in place.

    Afterwards `compact(model, plan)` equals `small`, value by value, and the model is masked: pruned entries are 0.0,
    except for variances of BatchNorms, which stay as they were. `small` may have been trained since it was cut.
    """
    require_plan(plan, model)
    compact_tensors = dict(named_tensors(small))
    left = [(name, tensor) for name, tensor in named_tensors(model) if name not in plan.lost]
    pairs = [(name, tensor, counterpart(name, tensor, compact_tensors.pop(name, None), plan)) for name, tensor in left]
    if compact_tensors:
        raise PlanError(f"{next(iter(compact_tensors))}: in the compact model, but not in the dense one")
    plan.zero(model)
    for name, tensor, there in pairs:
        values, axes = there.to(tensor.device, tensor.dtype), plan.kept_indices.get(name)
        if axes is None:
            tensor.copy_(values)
        else:
            sizes = zip(tensor.shape, axes, strict=True)
            tensor[np.ix_(*(np.arange(size) if index is None else index for size, index in sizes))] = values


def counterpart(name: str, dense: Tensor, found: Found | None, plan: Plan) -> Found:
    """Return the tensor of a compact model for one of the dense model; raise if it is not what the plan keeps of that.

    None stands for a tensor that the compact model lacks.
    """
    kept = plan.kept_indices.get(name, (None,) * dense.dim())
    wanted = tuple(size if index is None else len(index) for size, index in zip(dense.shape, kept, strict=True))
    if found is None or tuple(found.shape) != wanted:
        got = "no such tensor" if found is None else f"the shape {tuple(found.shape)}"
        raise PlanError(f"{name}: expected {wanted} in the compact model, got {got}; make it from this model and plan")
    return found
