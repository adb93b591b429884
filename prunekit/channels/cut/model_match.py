"""Checks, by names and shapes alone, that a model is the one that a channel map and its plans were made for."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from prunekit.channels.labels.branch import is_inside
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.errors import PlanError, nearest
from prunekit.hooks.model_copy import named_tensors

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each tensor, by name."""


def require_model(
    channel_map: ChannelMap, model: nn.Module, what: str = "the plan", *, narrow: Shapes | None = None
) -> None:
    """Raise unless a model is the one that a channel map was traced from.

    Parameters and buffers are compared by name and shape; a tied one may have any of its names. Buffers of the model's
    own classes, which forward may make again, count only if the map has free channels in them. It reads no values and
    takes about a millisecond. `narrow` are the shapes in the compact model of a plan, to recognize that one.
    """
    shapes = channel_map.shapes
    problem = _misfit(channel_map, model, shapes, what)
    if problem and narrow and not _misfit(channel_map, model, narrow, what):
        raise PlanError(f"{problem}; the model is compact already: give the dense one that {what} was made for")
    if problem:
        other = (
            f"was {what} made for another model? Give that one, or trace and plan this one as it is now: "
            "prunekit.plan(model, x, macs=0.5)"
        )
        raise PlanError(f"{problem}; {_inside(channel_map, model, shapes) or other}")


def require_compact(channel_map: ChannelMap, model: nn.Module, narrow: Shapes) -> None:
    """Raise unless a model is the compact one of a plan, whose tensors have the shapes `narrow`."""
    problem = _misfit(channel_map, model, narrow, "the plan")
    if problem and not _misfit(channel_map, model, channel_map.shapes, ""):
        raise PlanError(f"{problem}; the model is in its dense size: give prunekit.compact(model, plan)")
    if problem:
        other = "give prunekit.compact(model, plan) of the dense model that the plan was made for"
        raise PlanError(f"{problem}; {_inside(channel_map, model, narrow) or other}")


def _inside(channel_map: ChannelMap, model: nn.Module, shapes: Shapes) -> str:
    """Return advice to give a part of a model that fits, such as the model inside a wrapper; empty if none fits."""
    for path, part in model.named_modules() if shapes else ():
        if path and not _misfit(channel_map, part, shapes, ""):
            return f"what fits is a part of this {type(model).__name__}: give its `.{path}`"
    return ""


def own_buffers(model: nn.Module) -> set[str]:
    """Return the names of all buffers except those of torch's own layers, whose shapes are fixed."""
    own = [pair for pair in model.named_modules(remove_duplicate=False) if not _is_torchs(pair[1])]
    return {name for path, module in own for name, _ in module.named_buffers(path, False, False)}


def _misfit(channel_map: ChannelMap, model: nn.Module, shapes: Shapes, what: str) -> str:
    """Return the first tensor or module of a model that does not fit, in words; empty if all fit."""
    remade = {name for name in own_buffers(model) if not _is_free(channel_map, name)}
    first = {id(tensor): name for name, tensor in named_tensors(model)}
    modules = dict(model.named_modules(remove_duplicate=False))
    found = dict[str, torch.Tensor]()
    for path, module in modules.items():
        found.update([*module.named_parameters(path, False, False), *module.named_buffers(path, False, False)])
    for name, tensor in found.items():
        wanted, own = shapes.get(name), first[id(tensor)]
        parameter = isinstance(tensor, nn.Parameter)
        if name in remade or (wanted is None and (name != own or (not parameter and tensor.numel() < 2))):
            continue
        if tuple(tensor.shape) != wanted:
            here = f"{'parameter' if parameter else 'buffer'} {name!r} of shape {tuple(tensor.shape)}"
            return f"{here} does not fit {what}, which has {'none of that name' if wanted is None else wanted}"
        if name != own and not _lose_the_same(channel_map, name, own):
            return f"{name!r} and {own!r} are one tensor in the model, and two that lose different channels in {what}"
    for name, shape in shapes.items():
        owner, stored = modules.get(name.rpartition(".")[0]), channel_map.stored.get(name)
        fixed = stored is not None and not stored.parameter and not _is_free(channel_map, name)
        may_lack = owner is not None and not _is_torchs(owner) and fixed
        if name not in found and not may_lack:
            return f"{what} knows {name!r} of shape {shape}, which this model does not have; {nearest(name, found)}"
    gone = [branch for branch in channel_map.branches.found if not any(map(branch.loses, shapes))]
    parts = [path for branch in gone for path in (*branch.modules, *([] if branch.body is None else [branch.body]))]
    for path in (*channel_map.norms, *channel_map.blocks, *(size.module for size in channel_map.sizes)):
        if path not in modules and not is_inside(path, parts):
            return f"{what} knows a module {path!r}, which this model does not have; {nearest(path, modules)}"
    return ""


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "torch"


def _is_free(channel_map: ChannelMap, name: str) -> bool:
    """Return whether a plan may remove entries of a tensor."""
    return any(labels is not None and bool(labels.any()) for labels in channel_map.labels.get(name, ()))


def _lose_the_same(channel_map: ChannelMap, name: str, other: str) -> bool:
    """Return whether two tensors of a map, which are one in a model, lose the same entries under every plan."""
    pairs = zip(channel_map.labels[name], channel_map.labels[other], strict=True)
    return all(a is b or (a is not None and b is not None and np.array_equal(a, b)) for a, b in pairs)
