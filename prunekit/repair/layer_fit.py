"""The fit of one layer after another, from samples of the dense and the running model."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from prunekit.distributed.shared_work import agreed, shared_count, shared_mean, shared_rows, shared_sum
from prunekit.planning.plan import Plan
from prunekit.repair.held_out_images import Batch
from prunekit.repair.joint_fit import LayerWeights, PairFitter
from prunekit.repair.layer_samples import LayerSample
from prunekit.repair.least_squares import (
    MOST_GROUPS,
    NEGLIGIBLE,
    FitProblem,
    GroupedProblem,
    WeightChange,
    best_of,
    bias_compensation,
    chunks,
    determined,
    grouped_least_squares,
    grouped_report,
    least_squares,
    matched,
    moment_matching,
    substitution,
)
from prunekit.repair.memory_budget import chunk_values, kept_groups
from prunekit.repair.repair_report import SAME, LayerRepair, joined
from prunekit.settings.calibration import RepairSettings
from prunekit.statistics.gram_matrices import LayerMoments, collect_patches, with_raised_ridge
from prunekit.statistics.layer_errors import RIDGE, without_columns
from prunekit.statistics.linear_layers import LayerCall
from prunekit.statistics.patches import product
from prunekit.utils.inputs import sample_count
from prunekit.utils.tensors import is_finite


class LayerFitter(LayerWeights):
    """A fitter that refits one layer after another, and writes changes that lower the error."""

    def __init__(self, original: nn.Module, masked: nn.Module, plan: Plan, settings: RepairSettings) -> None:
        super().__init__(original, masked, plan)
        self.reports: list[LayerRepair] = []  # of the layers so far
        self._original = original
        self._settings = settings
        # of single weights that are not zero, by weight, bool (o, i, taps) of kept outputs and inputs
        self.masks: dict[str, Tensor] = {}
        self._pairs = PairFitter(original, masked, plan, self.masks)

    def refit(self, layer: LayerCall, dense: LayerSample | None, running: LayerSample | None) -> None:
        """Fit a layer, group by group if it is a grouped convolution, and write what lowers the error."""
        note = why_not_read(dense, running)
        if note or dense is None or running is None:
            self.reports.append(LayerRepair(layer.weight, note=note))
            return
        if layer.weight in self._plan.lost:
            self.reports.append(self._fit_constant(layer, dense, running))
            return
        groups = kept_groups(layer, self._plan)
        if len(groups) > MOST_GROUPS and self._settings.fit == "patch":
            self.reports.append(self._fit_many_groups(layer, dense, running, len(groups)))
            return
        found = [self._fit_group(layer, dense, running, group, place) for place, group in enumerate(groups)]
        report = joined(layer.weight, [part for part in found if part is not None])
        if running.before is not None:
            report = self._fit_with_source(layer, dense, running, report)
        if layer.selected and report.applied and not report.note:
            report = replace(report, note="at what values select in the dense model")
        self.reports.append(report)

    def _fit_constant(self, layer: LayerCall, sample: LayerSample, running: LayerSample) -> LayerRepair:
        """Fit the constant that is left of a block that is gone: the mean of what is missing."""
        assert sample.outputs is not None
        rows = self._index(layer, 0)
        bias = self._tensors[self._plan.constants[layer.weight]]
        gain = (
            torch.ones(len(rows), dtype=torch.float64, device=rows.device) if layer.gain is None else layer.gain[rows]
        )
        scale, offset = self._affine(self._dense_modules, layer, rows)
        wanted = scale * sample.outputs[:, rows].double() + offset
        now = (gain * bias.detach()[rows].double()).expand_as(wanted)
        if running.others is not None and sample.others is not None:
            now, wanted = now + running.others[:, rows].double(), wanted + sample.others[:, rows].double()
        problem = FitProblem(now[:, :0], now, wanted, gain, sample.fitted, layer.rectified, True)
        change = least_squares(problem, self._settings.ridge, self._settings.rectified_steps)
        chosen, before, after = best_of(problem, change)
        spread = _variance(wanted)
        if chosen is not None:
            with torch.no_grad():
                bias[rows] += chosen.bias.to(bias.dtype)
        note = "its block is gone, and this is the constant in its place"
        applied = "" if chosen is None else "bias"
        return LayerRepair(layer.weight, applied, before / spread, after / spread, note=note)

    def _fit_with_source(
        self, layer: LayerCall, dense: LayerSample, running: LayerSample, report: LayerRepair
    ) -> LayerRepair:
        """Fit a layer once more, together with the one before it."""
        errors = self._pairs.refit(layer, dense, running, self._settings.joint_steps)
        if errors is None or not errors[1] < errors[0]:
            return report
        after = report.after * errors[1] / errors[0]
        applied = report.applied or self._settings.fit
        return replace(report, applied=applied, after=after, note="together with the layer before it")

    def _fit_many_groups(self, layer: LayerCall, sample: LayerSample, running: LayerSample, groups: int) -> LayerRepair:
        """Fit many small groups at once."""
        assert sample.outputs is not None
        rows, columns = self._index(layer, 0), self._index(layer, 1)
        found = []
        values = chunk_values(self._settings)
        for part in chunks(groups, shared_count(len(sample.outputs)), len(columns) * layer.geometry.taps, values):
            some = rows.reshape(groups, -1)[part]
            problem = self._grouped_problem(layer, sample, running, some, columns, part)
            change = grouped_least_squares(problem, self._settings.ridge, self._settings.rectified_steps)
            weight, bias = change.weight.flatten(0, 1), change.bias.flatten()
            self._write(layer, some.flatten(), columns, WeightChange(weight, bias))
            found.append(change)
        return grouped_report(layer.weight, found)

    def _grouped_problem(
        self, layer: LayerCall, sample: LayerSample, running: LayerSample, rows: Tensor, columns: Tensor, part: slice
    ) -> GroupedProblem:
        """Return the fit of some groups; `rows` are their outputs, (g, o)."""
        assert running.inputs is not None
        assert sample.outputs is not None

        def by_group(values: Tensor) -> Tensor:  # (N, channels) -> (g, N, o)
            return values[:, rows].double().transpose(0, 1)

        width = len(columns) * layer.geometry.taps
        inputs = running.inputs.view(len(running.inputs), -1, width)[:, part].double().transpose(0, 1)  # (g, N, d)
        weight = self._weight(layer, rows.flatten(), columns)
        outputs = inputs @ weight.view(*rows.shape, width).transpose(1, 2)
        if layer.bias is not None:
            outputs = outputs + self._tensors[layer.bias].detach()[rows].double()[:, None]
        (scale, offset), (dense_scale, dense_offset) = (
            [value.reshape(rows.shape) for value in self._affine(modules, layer, rows.flatten())]
            for modules in (self._modules, self._dense_modules)
        )
        now = scale[:, None] * outputs + offset[:, None]
        wanted = dense_scale[:, None] * by_group(sample.outputs) + dense_offset[:, None]
        if running.others is not None and sample.others is not None:
            now, wanted = now + by_group(running.others), wanted + by_group(sample.others)
        scale = torch.where(determined(scale), scale, 0.0)
        biased = layer.bias is not None or layer.norm is not None
        return GroupedProblem(inputs, now, wanted, scale, sample.fitted, layer.rectified, biased)

    def _fit_group(
        self, layer: LayerCall, sample: LayerSample, running: LayerSample, group: int, place: int
    ) -> LayerRepair | None:
        size = self._plan.channel_map.shapes[layer.weight][layer.axes[0]] // layer.geometry.groups
        rows, columns = self._index(layer, 0), self._index(layer, 1)
        rows = rows[rows // size == group]  # counted over all groups
        if not len(columns):
            return None
        if layer.norm is None and self._settings.fit == "batchnorm":
            return LayerRepair(layer.weight, note="no BatchNorm alone reads its output")
        problem, usable = self._problem(layer, sample, running, rows, columns, place)
        rows = rows[usable]
        if not len(rows):
            return LayerRepair(layer.weight, note="the norm behind it has no factor but 0")
        if layer.row_norm is not None and self._settings.fit == "patch" and sample.centers is None:
            problem = problem.weighted(layer.row_norm.squared_sizes(problem.wanted).rsqrt())
        spread = _variance(problem.wanted)
        before = problem.error()
        if before <= NEGLIGIBLE * spread:
            return LayerRepair(layer.weight, note=SAME)
        if not agreed(is_finite(problem.now)):
            return LayerRepair(layer.weight, note="NaN or Inf under masks")
        change, how = self._fitted(layer, problem, sample, rows, columns)
        chosen, before, after = best_of(problem, change)
        note = "" if change.rank == change.columns + problem.biased or not change.columns else (
            f"its inputs span {change.rank} of {change.columns + problem.biased} dimensions"
        )  # fmt: skip
        if chosen is None:
            note = f"{how} is no better on held-out images"
        else:
            self._write(layer, rows, columns, chosen)
        return LayerRepair(
            layer.weight,
            how if chosen is not None else "",
            before / spread,
            after / spread,
            change.columns,
            change.rank,
            change.ridge,
            note,
        )

    def _problem(
        self, layer: LayerCall, sample: LayerSample, running: LayerSample, rows: Tensor, columns: Tensor, place: int
    ) -> tuple[FitProblem, Tensor]:
        """Return the layer's fit, and bool for each row: whether its factor in the norm is large enough."""
        assert running.inputs is not None
        assert sample.outputs is not None
        scale, offset = self._affine(self._modules, layer, rows)
        usable = determined(scale)
        rows, scale, offset = rows[usable], scale[usable], offset[usable]
        width = len(columns) * layer.geometry.taps
        inputs = running.inputs[:, place * width : (place + 1) * width]
        bias = 0.0 if layer.bias is None else self._tensors[layer.bias].detach()[rows].double()
        now = _at_end(product(inputs, self._weight(layer, rows, columns).T), scale, offset + scale * bias)
        wanted = sample.outputs.index_select(1, rows).to(now.dtype)  # indexing takes six times as long
        wanted = _at_end(wanted, *self._affine(self._dense_modules, layer, rows))
        if running.others is not None and sample.others is not None:
            now.add_(running.others.index_select(1, rows))
            wanted.add_(sample.others.index_select(1, rows))
        biased = layer.bias is not None or layer.norm is not None
        return FitProblem(inputs, now, wanted, scale, sample.fitted, layer.rectified, biased), usable

    def _fitted(
        self, layer: LayerCall, problem: FitProblem, sample: LayerSample, rows: Tensor, columns: Tensor
    ) -> tuple[WeightChange, str]:
        """Return the change by the fit that the settings name, and that name."""
        fit, settings = self._settings.fit, self._settings
        if fit == "bias":
            return bias_compensation(problem), fit
        if fit == "moments":
            return moment_matching(problem, self._weight(layer, rows, columns)), fit
        if fit == "batchnorm":
            return matched(problem, self._weight(layer, rows, columns), *self._norm_statistics(layer, rows)), fit
        if sample.centers is not None:
            return self._by_channels(layer, problem, sample, rows, columns), "channel"
        return least_squares(problem, settings.ridge, settings.rectified_steps), "patch"

    def _norm_statistics(self, layer: LayerCall, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of the outputs as the norm has them, at the chain's end without its constants."""
        assert layer.norm is not None
        norm = self._modules[layer.norm]
        scale, _ = self._affine(self._modules, layer, rows)
        mean, variance = (getattr(norm, name).double()[rows] for name in ("running_mean", "running_var"))
        bias = 0.0 if layer.bias is None else self._tensors[layer.bias].detach()[rows].double()
        return scale * (mean - bias), scale.abs() * variance.sqrt()

    def _by_channels(
        self, layer: LayerCall, problem: FitProblem, sample: LayerSample, rows: Tensor, columns: Tensor
    ) -> WeightChange:
        assert sample.centers is not None
        shape = layer.matrix(self._dense[layer.weight]).shape
        group = int(rows[0]) // (shape[0] // layer.geometry.groups) if len(rows) else 0
        dense = sample.centers[: sample.fitted, group * shape[1] : (group + 1) * shape[1]]
        taps = layer.geometry.taps
        kept = problem.inputs[: sample.fitted, layer.geometry.middle :: taps]
        whole = layer.matrix(self._dense[layer.weight].detach())[rows].double().reshape(len(rows), shape[1], taps)
        weight, bias = substitution(kept, dense, whole, columns, self._settings.ridge)
        change = weight.flatten(1) - self._weight(layer, rows, columns)
        return WeightChange(change, bias if problem.biased else torch.zeros_like(bias), len(columns), len(columns) + 1)

    def fit_stacks(
        self, names: Collection[str], fitting: Sequence[Batch], judging: Sequence[Batch]
    ) -> list[LayerRepair]:
        """Fit the stacks of matrices among some parameters, as experts have them, and return a report of each.

        Each matrix is fitted to what it computes of its own rows in the dense model: computed values decide which rows
        it has, and under masks they decide otherwise. So it is for layers behind a selection too.
        """
        stacks = {name for name in names if len(self._plan.channel_map.shapes[name]) == 3}
        stacks -= {*self._plan.element_masks, *self._plan.lost}
        if not stacks or self._settings.fit != "patch":
            return []
        held = self._moments(stacks, judging, ridge=0.0)
        fitted = self._moments(stacks, fitting, ridge=RIDGE)
        return [self._fit_stack(each, held[name]) for name, each in fitted.items() if name in held]

    def _moments(self, names: Collection[str], batches: Sequence[Batch], ridge: float) -> dict[str, LayerMoments]:
        found = collect_patches(
            self._original,
            [(batch.inputs,) for batch in batches],
            norms=self._plan.channel_map.norms,
            inputs={(name, axis) for name in names for axis in (1, 2)},
            rows=self._settings.rows,
            images=sum(sample_count(batch.inputs) for batch in batches),
            memory_bytes=self._settings.memory_bytes,
        )
        layers = with_raised_ridge(found, ridge).layers
        uses = Counter(moments.layer.weight for moments in layers)
        return {m.layer.weight: m for m in layers if m.layer.stack and uses[m.layer.weight] == 1}

    def _fit_stack(self, fitted: LayerMoments, held: LayerMoments) -> LayerRepair:
        """Fit the matrices of a stack, and write those that are better on held-out rows."""
        layer = fitted.layer
        numbers, rows, columns = (self._kept(layer.weight, axis) for axis in (0, *layer.axes))
        weight = layer.matrix(self._dense[layer.weight]).double().view(layer.stack, len(rows), -1)
        spread = held.variance.view(layer.stack, -1)
        spread = spread.clamp(min=1e-12 * float(spread.max()) or 1.0)
        changes, before, after = torch.zeros_like(weight), 0.0, 0.0
        for number in numbers.nonzero().flatten().tolist() if not bool(columns.all()) else []:
            matrix, judge = weight[number, rows], held.grams[number][:-1, :-1]
            change = without_columns(matrix, fitted.grams[number], columns, biased=False)[:, :-1]
            tried = matrix * ~columns, change  # without a fit, and with it
            squares = [((each @ judge) * each).sum(1).clamp(min=0) for each in tried]  # mean squared errors, (o,)
            errors = [each / spread[number, rows] for each in squares]
            lower = float(errors[1].sum()) < float(errors[0].sum())
            before += float(errors[0].sum()) / int(rows.sum())
            after += float(errors[lower].sum()) / int(rows.sum())
            if lower:
                changes[number, rows] = change * columns
        if not before > 0:
            return LayerRepair(layer.weight, note=SAME)
        applied = self._settings.fit if after < before else ""
        if applied:
            tensor = self._tensors[layer.weight]
            tensor += layer.stored(changes.flatten(0, 1)).to(tensor)
        note = "each matrix at its own rows in the dense model" if applied else "it is no better on held-out images"
        return LayerRepair(layer.weight, applied, before, after, int(columns.sum()), ridge=RIDGE, note=note)

    def _kept(self, name: str, axis: int) -> Tensor:
        """Return which entries along an axis of a parameter are kept, bool."""
        kept = torch.zeros(self._plan.channel_map.shapes[name][axis], dtype=torch.bool)
        kept[torch.from_numpy(self._plan.kept(name, axis))] = True
        return kept.to(self._dense[name].device)


def why_not_read(dense: LayerSample | None, running: LayerSample | None) -> str:
    """Return why a layer cannot be fitted to its samples; empty if it can."""
    if dense is None or running is None:
        return "the model takes another path under masks"
    rows = shared_count(sum(map(sum, dense.totals)))
    return "" if 0 < shared_count(dense.fitted) < rows else "not read on these images"


def _at_end(outputs: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Return outputs (N, o) at the end of a chain, in place, as they are large, and only where it changes them."""
    if bool((scale != 1).any()):
        outputs.mul_(scale.to(outputs))
    return outputs.add_(offset.to(outputs)) if bool(offset.any()) else outputs


def _variance(wanted: Tensor) -> float:
    """Return the variance of (N, o) outputs, or their mean square if they are constant."""
    first = shared_rows(wanted[:1])[0]
    around = wanted - first  # exactly 0 if they are constant; `var` takes six times as long as these lines
    around.sub_(shared_mean(around.mean(0), len(around)))
    squares = shared_sum(torch.linalg.vector_norm(around, dim=1).double().square().sum())
    spread = float(squares) / max(1, (shared_count(len(wanted)) - 1) * wanted.shape[1])
    spread = spread or float(shared_mean(wanted.square().mean(), len(wanted)))
    return max(spread, torch.finfo(torch.float64).tiny)
