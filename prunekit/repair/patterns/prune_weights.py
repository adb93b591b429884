"""Zeros among single weights in one shot, layer after layer, from unlabeled images, without training."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from prunekit.distributed.shared_work import sharing_work
from prunekit.hooks.model_copy import named_tensors, with_tensors
from prunekit.planning.patterns.pattern import Pattern, PatternLayer, PatternLayers, highest, pattern_layers
from prunekit.planning.plan import Plan
from prunekit.repair.held_out_images import Inputs
from prunekit.repair.layer_fit import LayerFitter, why_not_read
from prunekit.repair.layer_samples import LayerSample
from prunekit.repair.least_squares import MOST_GROUPS, WeightChange, chunks
from prunekit.repair.memory_budget import chunk_values, kept_groups
from prunekit.repair.patterns.group_problem import GroupProblem, Shape, SmallGroups
from prunekit.repair.patterns.zero_shares import shares_by_error, uniform_shares
from prunekit.repair.repair_model import LayerWalk, RepairSetup
from prunekit.repair.repair_report import LayerRepair, RepairReport
from prunekit.settings.calibration import RepairSettings
from prunekit.settings.weight_pattern import PatternMethod, PatternSettings
from prunekit.statistics.linear_layers import LayerCall

EXACT = 2e8
"""Entries of the inverses of all outputs up to which each output has an order of its own: half a minute of a core."""


@dataclass(frozen=True, eq=False)
class Zeros:
    """Zeros of the layers of a model: where, how many, and by what they are chosen."""

    pattern: Pattern  # where they may lie
    method: PatternMethod  # by what they are chosen
    shares: Mapping[str, float]  # of zeros, for each weight
    fitted: bool  # whether kept weights are fitted to the dense outputs

    @property
    def compensated(self) -> bool:
        """True if kept weights take over for the others."""
        return self.fitted or self.method in ("obs", "sparsegpt")

    def by_scores(self, scores: Tensor, share: float) -> Tensor:
        """Return the mask of scores (o, i, taps): of single weights by Wanda, in each output by itself."""
        if self.method == "wanda" and self.pattern == Pattern(self.pattern.name):
            return torch.cat([self.pattern.mask(row[None], share) for row in scores])
        return self.pattern.mask(scores, share)

    def by_costs(self, costs: Tensor, shape: Shape, share: float) -> Tensor:
        """Return the mask of what the removal of each unit costs, (o', units)."""
        if self.pattern.kept_of is not None:
            return self.pattern.spread(costs.isinf().view(shape), shape)
        taps = 1 if self.pattern.whole_kernels else shape[2]
        return self.pattern.spread(highest(costs, share).view(len(costs), -1, taps), shape)


class PatternFitter(LayerFitter):
    """A fitter that chooses the zeros of one layer after another, and fits its kept weights.

    A layer is first fitted as if all of its weights were kept, so that it corrects the errors of the layers before it;
    its zeros are chosen from there, and then what is kept is fitted.
    """

    def __init__(
        self,
        original: nn.Module,
        masked: nn.Module,
        plan: Plan,
        settings: RepairSettings,
        layers: Mapping[str, PatternLayer],
        zeros: Zeros,
    ) -> None:
        super().__init__(original, masked, plan, settings)
        self._layers, self._zeros = layers, zeros

    def refit(self, layer: LayerCall, dense: LayerSample | None, running: LayerSample | None) -> None:
        """Choose a layer's zeros, and write what is fitted; a layer without zeros is fitted as in a repair."""
        target = self._layers.get(layer.weight)
        if target is None:
            if self._zeros.fitted:
                super().refit(layer, dense, running)
        elif (note := why_not_read(dense, running)) or dense is None or running is None:
            self.choose_by_size(target, note)
        elif len(kept_groups(layer, self._plan)) > MOST_GROUPS:
            self._many_groups(target, dense, running)
        else:
            self._few_groups(target, dense, running)

    def choose_by_size(self, target: PatternLayer, note: str) -> None:
        """Choose the zeros of a layer by the size of its weights, and fit nothing."""
        weight = target.matrix(self._tensors[target.weight].detach())
        mask = self._zeros.pattern.mask(weight.double().abs(), self._zeros.shares[target.weight])
        self._set_zeros(target, mask)
        self.reports.append(LayerRepair(target.weight, note=f"zeros by magnitude: {note}"))

    def _set_zeros(self, target: PatternLayer, mask: Tensor) -> None:
        """Keep a layer's mask (o, i, taps), and write its zeros."""
        self.masks[target.weight] = mask = mask.cpu()
        weight = self._tensors[target.weight]
        with torch.no_grad():
            weight.masked_fill_(~target.element_mask(mask, weight.shape).to(weight.device), 0)

    def _few_groups(self, target: PatternLayer, dense: LayerSample, running: LayerSample) -> None:
        """Choose and fit group by group; what each unit costs is compared over all of them."""
        layer, device = target.layer, self._tensors[target.weight].device
        rows, columns = target.rows.to(device), target.columns.to(device)
        outputs = self._plan.channel_map.shapes[layer.weight][layer.axes[0]] // layer.geometry.groups
        parts = [rows[rows // outputs == group] for group in torch.unique(rows // outputs)]
        problems = []
        for place, part in enumerate(parts):
            fit, usable = self._problem(layer, dense, running, part, columns, place)
            present = self._weight(layer, part, columns)
            problems.append(GroupProblem.of(fit, present, usable, self._settings, fitted=self._zeros.fitted))
        mask = self._mask_of(target, problems)
        errors, start = [], 0
        for part, problem in zip(parts, problems, strict=True):
            own = mask[start : start + len(part)].flatten(1).to(device)
            start += len(part)
            zeroed, before = problem.zeroed(own)
            weight, after = problem.solved(own) if self._zeros.compensated else (zeroed, before)
            change = weight - problem.present
            bias = change[:, -1] if problem.fit.biased else change.new_zeros(len(change))
            self._write(layer, part, columns, WeightChange(change[:, : problem.columns], bias))
            errors.append((before, after, problem.spread))
        self._set_zeros(target, mask)
        self._report(target, errors)
        if running.before is not None and self._zeros.fitted:
            self.reports[-1] = self._fit_with_source(layer, dense, running, self.reports[-1])

    def _mask_of(self, target: PatternLayer, problems: list[GroupProblem]) -> Tensor:
        """Return the mask (o, i, taps) of a layer whose groups have these problems."""
        zeros, shape, share = self._zeros, target.shape, self._zeros.shares[target.weight]
        pattern = zeros.pattern
        sizes: list[Shape] = [(len(problem.present), *shape[1:]) for problem in problems]
        if zeros.method in ("magnitude", "wanda"):
            scores = [problem.sizes(by_input=zeros.method == "wanda") for problem in problems]
            return zeros.by_scores(torch.cat(scores).view(shape), share)
        aligned = all(size[0] % pattern.outputs == 0 for size in sizes)
        entries = max(len(problem.present) // pattern.outputs * len(problem.gram) ** 2 for problem in problems)
        if aligned and (zeros.method == "sparsegpt" or entries > EXACT):
            masks = [p.column_by_column(pattern, size, share) for p, size in zip(problems, sizes, strict=True)]
            return torch.cat(masks).view(shape)
        costs = torch.cat([p.removal_costs(pattern, size) for p, size in zip(problems, sizes, strict=True)])
        return zeros.by_costs(costs, shape, share) if aligned else pattern.mask(costs.view(shape), share)

    def _many_groups(self, target: PatternLayer, dense: LayerSample, running: LayerSample) -> None:
        """Choose and fit many small groups, such as those of a depthwise convolution, in batches."""
        zeros, shape, share = self._zeros, target.shape, self._zeros.shares[target.weight]
        batches = partial(self._small_groups, target, dense, running)
        if zeros.method in ("magnitude", "wanda"):
            scores = [groups.sizes(by_input=zeros.method == "wanda") for _, groups in batches()]
            mask = zeros.by_scores(torch.cat(scores).view(shape), share)
        elif zeros.pattern.outputs == 1:
            costs = torch.cat([groups.removal_costs(zeros.pattern, shape) for _, groups in batches()])
            mask = zeros.by_costs(costs, shape, share)
        else:
            mask = zeros.pattern.mask(torch.cat([groups.losses() for _, groups in batches()]).view(shape), share)
        errors, start = [], 0
        for rows, groups in batches():
            own = mask[start : start + rows.numel()].view(*rows.shape, -1).to(rows.device)
            start += rows.numel()
            weight, bias, error = groups.solved(own, compensated=zeros.compensated)
            columns = target.columns.to(rows.device)
            self._write(target.layer, rows.flatten(), columns, WeightChange(weight, bias))
            errors.append(error)
        self._set_zeros(target, mask)
        self._report(target, errors)

    def _small_groups(
        self, target: PatternLayer, dense: LayerSample, running: LayerSample
    ) -> Iterator[tuple[Tensor, SmallGroups]]:
        """Yield some groups at a time: their outputs (g, o), and their problem."""
        assert dense.outputs is not None
        device = self._tensors[target.weight].device
        count, width = len(kept_groups(target.layer, self._plan)), target.shape[1] * target.taps
        rows, columns = target.rows.to(device).view(count, -1), target.columns.to(device)
        for part in chunks(count, len(dense.outputs), width, chunk_values(self._settings)):
            fit = self._grouped_problem(target.layer, dense, running, rows[part], columns, part)
            present = self._weight(target.layer, rows[part].flatten(), columns).view(*rows[part].shape, width)
            yield rows[part], SmallGroups.of(fit, present, self._settings, fitted=self._zeros.fitted)

    def _report(self, target: PatternLayer, errors: list[tuple[float, float, float]]) -> None:
        """Add the report of a layer: errors with the zeros alone and with the fit, and spreads, for each part."""
        before, after, spread = (sum(part) for part in zip(*errors, strict=True))
        spread = max(spread, torch.finfo(torch.float64).tiny)
        fit = f"zeros by {self._zeros.method}" + (", patch" if self._zeros.fitted else "")
        self.reports.append(LayerRepair(target.weight, fit, before / spread, after / spread))


@dataclass(frozen=True, eq=False)
class PrunedWeights:
    """The result of `prune_weights`."""

    model: nn.Module  # the masked model, in its dense size
    plan: Plan  # the one that was given, with masks of single weights
    report: RepairReport  # errors of each layer with the zeros alone and with the fit, and of the model's output
    layers: PatternLayers  # which have zeros, and which stay dense


def prune_weights(
    dense: nn.Module,
    plan: Plan,
    images: Tensor | list[Tensor] | Inputs,
    pattern: PatternSettings,
    settings: RepairSettings | None = None,
    *,
    fitted: bool = True,
    log: Callable[[str], None] | None = None,
    progress: bool | None = None,
) -> PrunedWeights:
    """Return a masked copy of a model with zeros among the weights that its channels leave.

    In the order in which layers run, each chooses its zeros on what the masked model feeds it, and if `fitted`, its
    kept weights are fitted to the dense model's outputs, as a repair does. If not, the methods `obs` and `sparsegpt`
    fit them to what the layer itself computes, and others leave them.
    """
    settings = replace(settings or RepairSettings(), fit="patch")
    with sharing_work(share=False), RepairSetup.entered(dense, plan, images, "pattern", progress) as setup:
        found = pattern_layers(setup.found, plan, pattern)
        by_weight = {layer.weight: layer for layer in found.layers}
        if pattern.scope == "uniform" or pattern.kept_of is not None:
            shares = uniform_shares(found, pattern)
        else:
            shares = shares_by_error(setup.original, found, plan, setup.inputs, pattern, settings)
        zeros = Zeros(Pattern.of(pattern), pattern.method, shares, fitted)
        fitter = PatternFitter(setup.original, setup.masked, plan, settings, by_weight, zeros)
        walk = LayerWalk(setup, settings, fitter)
        if log is not None:
            for line in (*found.notes(), f"pattern: {walk.memory}"):
                log(line)
        walk.run()
        for layer in found.layers:
            if layer.weight not in fitter.masks:
                fitter.choose_by_size(layer, "not reached on these images")
        masks = found.element_masks(plan, [fitter.masks[layer.weight] for layer in found.layers])
        masked_plan = replace(plan, element_masks={**plan.element_masks, **masks})
        zeroed = with_tensors(dense, {name: tensor.detach().clone() for name, tensor in named_tensors(setup.original)})
        masked_plan.zero(zeroed)
        before = setup.difference(walk, zeroed)
        report = setup.keep_what_helps(walk, fitter, masked_plan, before)
    return PrunedWeights(setup.repaired(dense), masked_plan, report, found)
