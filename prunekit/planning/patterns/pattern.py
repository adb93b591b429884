"""Patterns of zeros in the weight of a layer: which weights are zero together, and the masks that scores make.

A weight is seen as (outputs, inputs, taps): the inputs of a convolution's group, and the positions of its kernel; a
linear layer has one tap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from prunekit.errors import PlanError
from prunekit.planning.plan import Plan
from prunekit.settings.weight_pattern import KERNEL, PatternSettings
from prunekit.statistics.layer_graph import LayerGraph, calls_by_weight, merge_calls
from prunekit.statistics.linear_layers import LayerCall
from prunekit.utils.display import listed, share
from prunekit.utils.globs import matching

NAMED = 6
"""The most layers that a message names."""


@dataclass(frozen=True)
class Pattern:
    """A pattern: the weights of a layer that are zero together."""

    name: str  # as settings have it
    # outputs, inputs: of a block; 1 and 1 where weights are zero one by one
    outputs: int = 1
    inputs: int = 1
    whole_kernels: bool = False  # whether all taps of a kernel go together
    # (N, M): of each M neighbors along the inputs, N are kept; None for other patterns
    kept_of: tuple[int, int] | None = None

    @classmethod
    def of(cls, settings: PatternSettings) -> Pattern:
        """Return the pattern that settings name."""
        outputs, inputs = settings.block or (1, 1)
        return cls(settings.in_words, outputs, inputs, settings.kind == KERNEL, settings.kept_of)

    @property
    def along_inputs(self) -> int:
        """How many neighbors along the inputs belong together."""
        return self.inputs if self.kept_of is None else self.kept_of[1]

    def problem(self, shape: tuple[int, int, int]) -> str | None:
        """Return why a weight (outputs, inputs, taps) cannot have the pattern; None if it can."""
        outputs, inputs, _ = shape
        wrong = [
            f"{size} {what}, no multiple of {unit}"
            for what, size, unit in (("outputs", outputs, self.outputs), ("inputs", inputs, self.along_inputs))
            if size % unit
        ]
        return " and ".join(wrong) or None

    def units(self, values: Tensor) -> Tensor:
        """Return the sums of values (o, i, t) over the weights that go together, (o', i', t')."""
        outputs, inputs, _ = values.shape
        parts = values.view(outputs // self.outputs, self.outputs, inputs // self.inputs, self.inputs, -1).sum((1, 3))
        return parts.sum(2, keepdim=True) if self.whole_kernels else parts

    def spread(self, units: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """Return what units (o', i', t') say of each weight, (o, i, t)."""
        wide = units.repeat_interleave(self.outputs, 0).repeat_interleave(self.inputs, 1)
        return wide.expand(shape)

    def mask(self, scores: Tensor, zeros: float) -> Tensor:
        """Return a mask (o, i, t), False for a share of zeros: the units with the least sum of finite scores (o, i, t).

        N:M has its own share, in each group. Of equal scores, the first are zero.
        """
        outputs, inputs, taps = scores.shape
        if self.kept_of is None:
            return self.spread(highest(self.units(scores), zeros), (outputs, inputs, taps))
        kept, of = self.kept_of
        groups = scores.view(outputs, inputs // of, of, taps)
        least = groups.argsort(dim=2, stable=True)[:, :, : of - kept]
        return torch.ones_like(groups, dtype=torch.bool).scatter_(2, least, False).view(scores.shape)


def highest(scores: Tensor, zeros: float) -> Tensor:
    """Return bool in the shape of scores, False for a share of the entries: the lowest, of equal ones the first."""
    return ~lowest(scores.flatten(), round(zeros * scores.numel())).view(scores.shape)


def lowest(values: Tensor, number: int) -> Tensor:
    """Return bool (n,), True for so many of the values (n,), the lowest, of equal ones the first; none may be NaN.

    These are the first of a stable sort, which would take several times as long.
    """
    if not 0 < number < values.numel():
        return torch.full_like(values, number > 0, dtype=torch.bool)
    sort = torch.are_deterministic_algorithms_enabled()  # then GPUs refuse `kthvalue`, whose indices may differ
    edge = values.sort().values[number - 1] if sort else values.kthvalue(number).values
    chosen = values < edge
    equal = (values == edge).nonzero()[:, 0]
    chosen[equal[: number - int(chosen.sum())]] = True
    return chosen


@dataclass(frozen=True, eq=False)
class PatternLayer:
    """A layer whose weight gets zeros, in what its channels leave of it."""

    layer: LayerCall  # all calls of the weight as one
    # rows, columns: (o,) and (i,) kept indices of its outputs and inputs; inputs are those of a group
    rows: Tensor
    columns: Tensor
    taps: int  # positions of its kernel; 1 of a linear layer
    zeros: float | None = None  # share of zeros that settings name for it; None: what the budget leaves to it

    @property
    def weight(self) -> str:
        """Name of the parameter."""
        return self.layer.weight

    @property
    def path(self) -> str:
        """Path of the module that has the parameter."""
        return self.weight.rpartition(".")[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Kept outputs, inputs and taps."""
        return len(self.rows), len(self.columns), self.taps

    @property
    def size(self) -> int:
        """Number of weights."""
        return len(self.rows) * len(self.columns) * self.taps

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the kept entries of a tensor in the weight's dense shape, (o, i, taps)."""
        rows, columns = self.rows.to(weight.device), self.columns.to(weight.device)
        return self.layer.matrix(weight)[rows][:, columns].reshape(self.shape)

    def element_mask(self, mask: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a mask (o, i, taps) in the weight's dense shape, on the CPU; True for channels that are removed."""
        whole = torch.ones(*shape, dtype=torch.bool)
        matrix = self.layer.matrix(whole)
        matrix[self.rows[:, None], self.columns[None]] = mask.cpu().reshape(*self.shape[:2], *matrix.shape[2:])
        return whole


class PatternLayers(NamedTuple):
    """The layers of a model that get zeros."""

    layers: tuple[PatternLayer, ...]  # in the order in which they run
    # for each layer that stays dense its weight, how many weights are left of it, and the reason
    dense: tuple[tuple[str, int, str], ...]

    @property
    def size(self) -> int:
        """Number of weights of all layers, those that stay dense included."""
        return sum(layer.size for layer in self.layers) + sum(size for _, size, _ in self.dense)

    def element_masks(self, plan: Plan, masks: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return the masks (o, i, taps) of all layers, by weight, see `PatternLayer.element_mask`."""
        shapes = plan.channel_map.shapes
        return {
            layer.weight: layer.element_mask(mask, shapes[layer.weight])
            for layer, mask in zip(self.layers, masks, strict=True)
        }

    def notes(self) -> tuple[str, ...]:
        """Return a sentence for each reason why layers stay dense."""
        reasons: dict[str, list[str]] = {}
        for weight, _, reason in self.dense:
            reasons.setdefault(reason, []).append(weight.removesuffix(".weight"))
        return tuple(f"pattern: {listed(names, NAMED)} dense: {reason}" for reason, names in reasons.items())

    def require_zeros(self, settings: PatternSettings) -> None:
        """Raise if a budget cannot be reached, because layers that stay dense hold too many weights."""
        if settings.kept_of is not None:
            return
        fixed = sum(round((layer.zeros or 0) * layer.size) for layer in self.layers if layer.zeros is not None)
        free = sum(layer.size for layer in self.layers if layer.zeros is None)
        wanted = settings.zeros * self.size
        if fixed <= wanted < fixed + free or (not free and abs(wanted - fixed) < 1):
            return
        if wanted < fixed:
            raise PlanError(
                f"pattern.sparsity: {share(settings.zeros)} of {self.size:,} weights were asked for, but "
                f"pattern.layers makes {share(fixed / self.size)} zero already; raise the one or lower the others"
            )
        held = sorted(self.dense, key=lambda one: -one[1])[:NAMED]
        names = ", ".join(f"{weight.removesuffix('.weight')} ({share(size / self.size)})" for weight, size, _ in held)
        why = f"; layers that stay dense hold the rest: {names}" if held else ""
        raise PlanError(
            f"pattern.sparsity: {share(settings.zeros)} of {self.size:,} weights were asked for, at most "
            f"{share((fixed + free) / self.size)} is possible{why}; lower it, or let these layers have zeros "
            "(pattern.first_and_last, pattern.ignore, pattern.layers)"
        )


def pattern_layers(
    graph: LayerGraph, plan: Plan, settings: PatternSettings, *, unfinished: bool = False
) -> PatternLayers:
    """Return the layers that get zeros, and those that stay dense with the reason.

    While more channels will go (`unfinished`), layers that the pattern doesn't fit yet stay dense, and the budget need
    not be within reach.
    """
    pattern, calls = Pattern.of(settings), calls_by_weight(graph.layers)
    paths = {weight: weight.rpartition(".")[0] for weight in calls}
    ignored = _matching(settings.ignore, paths, "pattern.ignore")
    asked = {
        weight: zeros
        for glob, zeros in settings.layers.items()
        for weight in _matching([glob], paths, f"pattern.layers[{glob!r}]")
    }
    layers, dense, unfit = list[PatternLayer](), list[tuple[str, int, str]](), dict[str, str]()
    for weight, of in calls.items():
        merged = merge_calls(of)
        rows, columns = (torch.from_numpy(np.array(plan.kept(weight, axis))) for axis in merged.axes)
        layer = PatternLayer(merged, rows, columns, merged.geometry.taps, asked.get(weight))
        reason = _reason(layer, of, graph, settings, ignored)
        if not layer.size:
            continue
        if reason:
            dense.append((weight, layer.size, reason))
        elif (problem := pattern.problem(layer.shape)) is not None and unfinished:
            dense.append((weight, layer.size, problem))
        elif problem is not None:
            unfit[layer.path] = problem
        else:
            layers.append(layer)
    if unfit:
        named = "; ".join(f"{path} has {problem}" for path, problem in list(unfit.items())[:NAMED])
        more = f"; and {len(unfit) - NAMED} more" if len(unfit) > NAMED else ""
        raise PlanError(
            f"pattern: {settings.in_words} doesn't fit {len(unfit)} of the layers: {named}{more}. Leave them out with "
            f"pattern.ignore={list(unfit)}, take 'unstructured', or, where channels are pruned too, round_to="
            f"{settings.multiple}"
        )
    found = PatternLayers(tuple(layers), tuple(dense))
    if not layers and not unfinished:
        reasons = "; ".join(f"{weight}: {reason}" for weight, _, reason in dense)
        raise PlanError(f"pattern: no layer is left to have zeros: {reasons or 'there is none'}")
    if not unfinished:
        found.require_zeros(settings)
    return found


def _matching(globs: Iterable[str], paths: Mapping[str, str], key: str) -> set[str]:
    found = {path for glob in globs for path in matching(glob, sorted(set(paths.values())), key, PlanError, "layer")}
    return {weight for weight, path in paths.items() if path in found}


def _reason(
    layer: PatternLayer, calls: Sequence[LayerCall], graph: LayerGraph, settings: PatternSettings, ignored: set[str]
) -> str:
    """Return why a layer stays dense; empty if it does not."""
    if layer.weight in ignored:
        return "in pattern.ignore"
    if layer.zeros == 0:
        return "0 in pattern.layers"
    if calls[0].calls != len(calls):
        return "its weight is used elsewhere too"
    if len({(call.bias, call.transposed, call.geometry.groups) for call in calls}) > 1:
        return "its calls differ in bias or groups"
    if layer.zeros is None and not settings.first_and_last:
        if layer.weight in graph.first:
            return "a first layer, which reads the model's input"
        if layer.weight in graph.last:
            return "a last layer, whose output is the model's"
    along = Pattern.of(settings).along_inputs
    if along > 1 and layer.shape[1] == 1:
        return f"{settings.in_words} is along inputs, and it reads one, as a depthwise convolution does"
    return ""
