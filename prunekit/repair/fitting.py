"""Sets up each layer's fit from what the dense and the running model give, and writes what it found."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.calibration.layers import Layer
from prunekit.calibration.patches import applied
from prunekit.channels.copying import named_tensors
from prunekit.planning import Plan
from prunekit.repair.fits import (
    Change,
    Problem,
    best_of,
    bias_compensation,
    least_squares,
    moment_matching,
    substitution,
)
from prunekit.repair.record import Sample
from prunekit.repair.report import LayerRepair
from prunekit.repair.sequential import add_bias, norm_affine
from prunekit.repair.settings import RepairSettings

NEGLIGIBLE = 1e-10
"""Error, as a share of the variance, below which a layer computes what the dense one does."""
FLAT = 1e-6
"""Outputs whose factor in the norm is below this share of the largest one's say nothing about their weights."""


class LayerFitter:
    """Refits one layer after another.

    Args:
        original: the dense model.
        masked: the model whose weights are written.
        plan: which rows and columns are kept.
        samples: what the dense layers gave, by the number of their call.
        settings: what is fitted.
    """

    def __init__(
        self,
        original: nn.Module,
        masked: nn.Module,
        plan: Plan,
        samples: Mapping[int, Sample],
        settings: RepairSettings,
    ) -> None:
        self.done: list[LayerRepair] = []
        self._dense = dict(named_tensors(original))
        self._tensors = dict(named_tensors(masked))
        self._modules, self._dense_modules = dict(masked.named_modules()), dict(original.named_modules())
        self._plan, self._samples, self._settings = plan, samples, settings

    def refit(self, layer: Layer, inputs: Tensor, other: Tensor | None, spatial: tuple[int, ...]) -> bool:
        """Fits a layer, group by group where it is a grouped convolution, and writes what is better.

        Args:
            inputs: of the running model.
            other: what will be added to its output.
            spatial: sizes of its output.
        """
        sample = self._samples.get(layer.call)
        if sample is None:
            self.done.append(LayerRepair(layer.weight, note="the model takes another path under masks"))
            return False
        groups = range(layer.reading.groups)
        found = [self._part(layer, sample, group, inputs, other, spatial) for group in groups]
        parts = [part for part in found if part is not None]
        self.done.append(_joined(layer.weight, parts))
        return any(part.applied for part in parts)

    def _part(
        self, layer: Layer, sample: Sample, group: int, inputs: Tensor, other: Tensor | None, spatial: tuple[int, ...]
    ) -> LayerRepair | None:
        weight = self._tensors[layer.weight]
        rows, columns = self._kept(layer, group)
        if not len(rows) or not len(columns):
            return None
        first = group * weight.shape[1]
        kept = layer.reading.channels(inputs, columns + first)
        problem, usable = self._problem(layer, sample, rows, columns, kept, other, spatial)
        rows = rows[usable]
        spread = float(problem.wanted.var(0).mean())
        before = problem.error()
        if before <= NEGLIGIBLE * max(spread, torch.finfo(torch.float64).tiny):
            return LayerRepair(layer.weight, note="computes what the dense layer does")
        if not bool(problem.now.isfinite().all()):
            return LayerRepair(layer.weight, note="NaN or Inf under masks")
        change, how = self._change(layer, problem, sample, rows, columns)
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

    def _kept(self, layer: Layer, group: int) -> tuple[Tensor, Tensor]:
        """Kept rows of a group, counted over all groups, and kept columns of the weight."""
        rows, columns = (self._plan.kept(layer.weight, axis) for axis in (0, 1))
        size = self._plan.channel_map.shapes[layer.weight][0] // layer.reading.groups
        rows = rows[rows // size == group]
        device = self._tensors[layer.weight].device
        return torch.from_numpy(np.asarray(rows)).to(device), torch.from_numpy(np.asarray(columns)).to(device)

    def _problem(
        self,
        layer: Layer,
        sample: Sample,
        rows: Tensor,
        columns: Tensor,
        kept: Tensor,
        other: Tensor | None,
        spatial: tuple[int, ...],
    ) -> tuple[Problem, Tensor]:
        """The layer's fit, and which of its rows have a factor in the norm to speak of."""
        scale, offset = self._affine(self._modules, layer, rows)
        usable = scale.abs() > FLAT * scale.abs().max()
        rows, scale, offset = rows[usable], scale[usable], offset[usable]
        inputs = layer.reading.patches(kept, sample.rows, spatial)
        now = scale * self._outputs(layer, inputs, rows, columns) + offset
        dense_scale, dense_offset = self._affine(self._dense_modules, layer, rows)
        wanted = dense_scale * sample.outputs[:, rows].double() + dense_offset
        if other is not None and sample.others is not None:
            now = now + layer.reading.outputs(other, sample.rows)[:, rows].double()
            wanted = wanted + sample.others[:, rows].double()
        biased = layer.bias is not None or layer.norm is not None
        return Problem(inputs, now, wanted, scale, sample.fitted, layer.rectified, biased), usable

    def _affine(self, modules: Mapping[str, nn.Module], layer: Layer, rows: Tensor) -> tuple[Tensor, Tensor]:
        if layer.norm is None:
            ones = torch.ones(len(rows), dtype=torch.float64, device=rows.device)
            return ones, torch.zeros_like(ones)
        factor, offset = norm_affine(modules[layer.norm])
        return factor[rows], offset[rows]

    def _weight(self, layer: Layer, rows: Tensor, columns: Tensor) -> Tensor:
        """(o, d) kept weights."""
        return self._tensors[layer.weight].detach()[rows][:, columns].flatten(1).double()

    def _outputs(self, layer: Layer, inputs: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        outputs = applied(inputs, self._weight(layer, rows, columns).T)
        return outputs if layer.bias is None else outputs + self._tensors[layer.bias].detach()[rows].double()

    def _change(
        self, layer: Layer, problem: Problem, sample: Sample, rows: Tensor, columns: Tensor
    ) -> tuple[Change, str]:
        """The change that the settings ask for, and what it is called."""
        fit, settings = self._settings.fit, self._settings
        if fit == "bias":
            return bias_compensation(problem), fit
        if fit == "moments":
            return moment_matching(problem, self._weight(layer, rows, columns)), fit
        if sample.inputs is not None:
            return self._by_channels(layer, problem, sample, rows, columns), "channel"
        return least_squares(problem, settings.ridge, settings.rectified_steps), "patch"

    def _by_channels(self, layer: Layer, problem: Problem, sample: Sample, rows: Tensor, columns: Tensor) -> Change:
        assert sample.inputs is not None
        shape = self._plan.channel_map.shapes[layer.weight]
        group = int(rows[0]) // (shape[0] // layer.reading.groups) if len(rows) else 0
        dense = sample.inputs[: sample.fitted, group * shape[1] : (group + 1) * shape[1]]
        taps = layer.reading.taps
        kept = problem.inputs[: sample.fitted, layer.reading.middle :: taps]
        whole = self._dense[layer.weight].detach()[rows].double().reshape(len(rows), shape[1], taps)
        weight, bias = substitution(kept, dense, whole, columns, self._settings.ridge)
        change = weight.flatten(1) - self._weight(layer, rows, columns)
        return Change(change, bias if problem.biased else torch.zeros_like(bias), len(columns), len(columns) + 1)

    def _write(self, layer: Layer, rows: Tensor, columns: Tensor, change: Change) -> None:
        weight = self._tensors[layer.weight]
        addition = change.weight.reshape(len(rows), len(columns), *weight.shape[2:]).to(weight.dtype)
        with torch.no_grad():
            weight[rows[:, None], columns[None]] += addition
        norm = self._modules[layer.norm] if layer.norm is not None else None
        add_bias(layer, self._tensors, norm, rows, change.bias)


def _joined(name: str, parts: list[LayerRepair]) -> LayerRepair:
    """One line for all groups of a convolution."""
    if not parts:
        return LayerRepair(name, note="nothing of it is left")
    if len(parts) == 1:
        return parts[0]
    applied = next((part.applied for part in parts if part.applied), "")
    count = sum(bool(part.applied) for part in parts)
    return LayerRepair(
        name,
        applied,
        float(np.mean([part.before for part in parts])),
        float(np.mean([part.after for part in parts])),
        max(part.columns for part in parts),
        min(part.rank for part in parts),
        max(part.ridge for part in parts),
        f"{count} of {len(parts)} groups" if applied else parts[0].note,
    )
