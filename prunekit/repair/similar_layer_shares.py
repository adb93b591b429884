"""Shares of a cut among layers, which held-out samples choose: of similar ones where samples are few, and of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from prunekit.channels.cut.narrow_norms import NarrowNorms
from prunekit.channels.tracing.channel_map import ChannelGroup, ChannelMap
from prunekit.channels.tracing.substitutes import substituted_copy
from prunekit.criteria.criterion import Scores
from prunekit.errors import UsageError
from prunekit.hooks.model_copy import named_tensors
from prunekit.planning.plan import Plan
from prunekit.repair.held_out_images import Inputs, batches_of, difference, require_images
from prunekit.statistics.gram_matrices import PatchStats, too_few
from prunekit.statistics.layer_errors import shifted, without_channels
from prunekit.statistics.layer_graph import find_layers
from prunekit.statistics.output_error import OutputComparison
from prunekit.utils.context import release_memory, training_mode
from prunekit.utils.inputs import as_example, counted_positions, sample_count, select_samples
from prunekit.utils.tensors import gather

TRIED = (0.5, 1.0)
"""How far the curves of like groups are drawn together, besides not at all: half of the way, or all of it."""
GROWN = -1.0
"""Stands for errors that are multiplied by their growth on held-out samples."""
CLEAR = 0.98
"""Share of the error that another choice has at most: it has to be clearly better on few samples."""
AT_A_TIME = 8
"""Held-out samples that run at a time."""


def like_groups(channel_map: ChannelMap) -> list[list[ChannelGroup]]:
    """Return groups on the same axes of tensors of the same shapes, as layers that repeat have them; two at least."""
    found: dict[Any, list[ChannelGroup]] = {}
    for group in channel_map.groups:
        shapes = sorted((channel_map.shapes[name], axis) for name, axis in group.slots)
        found.setdefault((group.labels.size, tuple(shapes)), []).append(group)
    return [alike for alike in found.values() if len(alike) > 1]


def evened(scores: Scores, channel_map: ChannelMap, share: float) -> Scores:
    """Return scores by which like groups lose more alike shares of their channels; the same shares with `share` 1.

    Within a group the order stays. The score of each place in it becomes a geometric mean of its own, weighted by
    1 - `share`, and of the median over the groups.
    """
    result = np.array(scores, dtype=np.float64)
    for alike in like_groups(channel_map):
        every = np.stack([np.sort(scores[group.labels]) for group in alike])
        usual = np.median(every, 0)
        if np.isfinite(every).all():
            for group, own in zip(alike, every, strict=True):
                order = group.labels[np.argsort(scores[group.labels], kind="stable")]
                result[order] = own ** (1 - share) * usual**share
    return result


@dataclass(eq=False)
class ShareCheck:
    """A choice of how groups share what a budget takes, where the errors that elimination computes may mislead.

    Where layers read more columns than there are positions, errors tell more of the order within a group than of how
    much each group can lose: plans are tried in which like groups share more evenly, as in Wanda-sp and FLAP (An et al.
    2024). Where the growth of errors on held-out samples is known, a plan by errors times that is tried too. All layers
    are fitted at once to what they compute in the dense model, by least squares on some samples, and the error
    of the output on the held-out others decides. That error tells very different plans apart, and must not be what a
    search minimizes: it undervalues plans whose errors the sequential repair takes away, which made the best of 40
    plans of a ResNet-20 worse by 3 points.
    """

    model: nn.Module  # the dense one
    inputs: Inputs  # all samples; the last `held_out` of them judge
    held_out: float  # share of the samples
    collect: Callable[[Inputs], PatchStats]  # returns the moments of layers on some samples
    uneven: bool = True  # whether positions are too few
    share: float | None = None  # that was chosen, see `evened`, or `GROWN`; None before the first plan
    note: str = ""  # a sentence if it is not 0

    @classmethod
    def of(
        cls,
        model: nn.Module,
        samples: Any,
        channel_map: ChannelMap,
        patches: PatchStats,
        held_out: float,
        collect: Callable[[Inputs], PatchStats],
    ) -> ShareCheck | None:
        """Return the check; None without `parts`, where no like groups are read by layers with too few positions."""
        short = {(moments.layer.weight, moments.layer.axes[1]) for moments in patches.layers if too_few(moments)}
        uneven = any(short & {*group.slots} for alike in like_groups(channel_map) for group in alike)
        if not uneven and not patches.parts:
            return None
        return cls(model, require_images(as_example(model, samples)), held_out, collect, uneven)

    def best(
        self,
        scores: Scores,
        channel_map: ChannelMap,
        planned: Callable[[Scores], Plan],
        grown: Callable[[], Scores] | None = None,
    ) -> Plan:
        """Return the plan that the held-out samples choose, and share all later plans in the same way.

        `grown` returns scores by errors times their growth on held-out samples.
        """
        ways: dict[float, Callable[[], Scores]] = {0.0: lambda: scores}
        ways |= {share: partial(evened, scores, channel_map, share) for share in TRIED if self.uneven}
        ways |= {} if grown is None else {GROWN: grown}
        if self.share is not None:
            return planned(ways[self.share]())
        plans, errors, self.share = {0.0: planned(scores)}, dict[float, float](), 0.0
        held = max(1, round(sample_count(self.inputs) * self.held_out))
        patches = self.collect(select_samples(self.inputs, slice(sample_count(self.inputs) - held)))
        try:
            for share, way in ways.items():
                plans[share] = plans[share] if share in plans else planned(way())
                errors[share] = self.held_out_error(plans[share], patches)
        except UsageError:  # nothing of the outputs can be compared, or there is no such plan
            return plans[0.0]
        best = min(errors, key=errors.__getitem__)
        if errors[best] < CLEAR * errors[0.0]:
            self.share = best
            alike = f"like layers lose {'the same share' if best == 1 else 'more alike shares'} of their channels"
            grows = "errors count times their growth on held-out samples"
            why = grows if best == GROWN else f"samples are few, and {alike}"
            self.note = (
                f"elimination: {why}: the output's error on held-out samples is {errors[best]:.3g} of its variance "
                f"then, after a plain fit, not {errors[0.0]:.3g}"
            )
        return plans[self.share]

    def held_out_error(self, plan: Plan, patches: PatchStats) -> float:
        """Return the error of the output on the held-out samples once all layers are fitted at once."""
        device = gather(self.inputs)[0].device  # a job's model is on the CPU meanwhile
        dense = substituted_copy(self.model, own=lambda name: False).to(device)
        masked = substituted_copy(self.model, own=lambda name: True).to(device)
        with training_mode(dense, False), training_mode(masked, False), torch.no_grad():
            batches, fitted = batches_of(self.inputs, self.held_out, AT_A_TIME, counted_positions(dense, self.inputs))
            judge = OutputComparison.of(dense, select_samples(self.inputs, slice(3)), plan.channel_map.read)
            axes = {layer.weight: layer.axes[0] for layer in find_layers(dense, select_samples(self.inputs, slice(2)))}
            judge = judge.within(
                {name: torch.from_numpy(plan.kept(name, axes[name])) for name in judge.weights if name in axes}
            )
            plan.zero(masked)
            fit_plainly(masked, dense, plan, patches)
            with NarrowNorms(masked, plan.channel_map, plan.keep):
                found = difference(dense, masked, batches[fitted:], judge)
        release_memory(self.model, collect=False)
        return found


def fit_plainly(masked: nn.Module, dense: nn.Module, plan: Plan, patches: PatchStats) -> None:
    """Fit each layer of a masked model, in place, to what it computes in the dense model, by the moments of its inputs.

    Layers that run several times stay as they are.
    """
    tensors, modules, own = dict(named_tensors(masked)), dict(masked.named_modules()), dict(named_tensors(dense))
    for moments in patches.layers:
        layer = moments.layer
        weight = layer.matrix(own[layer.weight].detach())
        kept = torch.zeros(weight.shape[1], dtype=torch.bool, device=weight.device)
        kept[torch.from_numpy(plan.kept(layer.weight, layer.axes[1])).to(kept.device)] = True
        if layer.calls == 1 and layer.weight not in plan.lost and 0 < int(kept.sum()) < len(kept):
            shift = shifted(layer, tensors, modules)
            change, bias, _ = without_channels(moments, weight, kept, biased=shift is not None)
            tensors[layer.weight].copy_(layer.stored(weight + change))
            if shift is not None:
                shift[0].add_((shift[1] * bias).to(shift[0]))
        patches.memory.release()
    plan.zero(masked)
