"""Shared by the tests of the channel map, plans and compaction: random plans, and masks applied without prunekit's own
masking, so that masked == compact is judged by something that shares no code with what it judges."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.channels.cut.narrow_norms import NarrowNorms
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.channels.trial.trial import run_trial
from prunekit.compaction.compact_model import compact
from prunekit.hooks.model_copy import has_gradients
from prunekit.planning.plan import Plan
from prunekit.utils.tensors import as_real

TOLERANCE = 1e-9


class Net(nn.Module):
    """A net written as one function of itself and its inputs, with its parts as keyword arguments."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def image(channels: int = 3, size: int = 8, batch: int = 2) -> tuple[Tensor]:
    return (torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(1)),)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def assert_only_rounded(found: Mapping[Any, Tensor], wanted: Mapping[Any, Tensor]) -> None:
    """Fail unless two sets of tensors in float64 differ by rounding alone, as where sums are made in another order.

    What cancels is as exact as what it is made of: the bound is a share of the largest value of all.
    """
    assert found.keys() == wanted.keys()
    largest = max(float(tensor.detach().abs().max()) for tensor in wanted.values() if tensor.numel())
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype == torch.float64, key
        gap = float((found[key] - tensor).detach().abs().max()) if tensor.numel() else 0.0
        assert gap <= 1e-12 * largest, f"{key}: differs by {gap}, where the largest value is {largest}"


@torch.no_grad()
def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights, affines, biases and BatchNorm statistics: nothing is zero or one by itself."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in named_tensors(model):
        if not has_gradients(tensor):
            continue
        tensor = as_real(tensor)
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5, generator=generator)
        elif tensor.dim() < 2:
            tensor.uniform_(-0.3, 0.9, generator=generator)
        else:
            bound = (6 / tensor[0].numel()) ** 0.5
            tensor.uniform_(-bound, bound, generator=generator)
    return model


def random_keep(channel_map: ChannelMap, seed: int = 0, share: float = 1 / 3) -> Keep:
    """Drops a random share of every group's labels, in its steps: at least one of each group and never all."""
    generator = np.random.default_rng(seed)
    keep = np.ones(channel_map.n_labels, dtype=bool)
    for group, step, least in zip(channel_map.groups, channel_map.steps, channel_map.least, strict=True):
        size = group.labels.size
        count = min(max(1, round(share * size)), size - max(1, int(least)))
        count = size - max(1, (size - count) // int(step)) * int(step)
        keep[generator.permutation(group.labels)[:count]] = False
    return keep


def doubled(value: Any) -> Any:
    """The same nesting with every floating-point tensor in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: doubled(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **doubled(vars(value)))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(doubled(item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(doubled(item) for item in value)
    return value


@torch.no_grad()
def zero_removed(model: nn.Module, plan: Plan) -> nn.Module:
    """Multiplies what a plan removes by 0, in place; running variances stay, as they do in fine-tuning."""
    for name, tensor in named_tensors(model):
        mask = plan.mask(name)
        if mask is not None and not name.endswith("running_var"):
            tensor.mul_(mask.to(tensor.dtype))
    return model


def masked_double(model: nn.Module, plan: Plan) -> nn.Module:
    """A float64 copy with zeros where the plan prunes."""
    return zero_removed(copy.deepcopy(model).double(), plan)


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def difference(want: Any, got: Any) -> float:
    """Largest absolute difference over the largest absolute reference value; shapes must be the same."""
    worst = 0.0
    pairs = [(one.detach(), other.detach()) for one, other in zip(tensors_of(want), tensors_of(got), strict=True)]
    assert pairs
    for reference, value in pairs:
        assert reference.shape == value.shape, f"shape {tuple(value.shape)}, expected {tuple(reference.shape)}"
        assert reference.isfinite().all()
        assert value.isfinite().all()
        scale = float(reference.abs().max())
        worst = max(worst, float((reference - value).abs().max()) / max(scale, 1e-300))
    return worst


@torch.no_grad()
def parity(model: nn.Module, plan: Plan, example: tuple[Any, ...]) -> float:
    """How far masked and compact model are apart in eval mode and float64.

    Norms over channels run as prunekit lets them: what they must compute, `test_norms.py` writes out by hand.
    """
    masked = masked_double(model, plan).eval()
    small = compact(copy.deepcopy(model).double(), plan).eval()
    inputs = doubled(example)
    with NarrowNorms(masked, plan.channel_map, plan.keep):
        return difference(masked(*inputs), small(*inputs))


def heads_and_positions(kept: Labels, depth: int) -> tuple[list[int], list[int]]:
    """Which heads of a width are left, and which positions in each of them; the same in all."""
    heads, positions = np.unique(kept // depth), np.unique(kept % depth)
    assert np.array_equal(kept, (heads[:, None] * depth + positions).reshape(-1))
    return heads.tolist(), positions.tolist()


def settled_plan(model: nn.Module, example: tuple[Any, ...], seed: int = 0, share: float = 1 / 3) -> Plan:
    """A random plan that passed its trial."""
    settled = run_trial(model, trace(model, example), lambda chart: random_keep(chart, seed, share), [example])
    return Plan(settled.channel_map, settled.keep)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_tensors(model)}


def assert_unchanged(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    after = dict(named_tensors(model))
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
