"""The fit of stacks of matrices, as experts have them: each to what it computes of its own rows in the dense model.

Which rows a matrix has is decided by computed values, and under masks by other ones: as layers behind a selection are,
stacks are fitted to what they read in the dense model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from prunekit.hooks.model_copy import named_tensors
from prunekit.planning.plan import Plan
from prunekit.repair.held_out_images import Batch
from prunekit.repair.repair_report import SAME, LayerRepair
from prunekit.settings.calibration import RepairSettings
from prunekit.statistics.gram_matrices import LayerMoments, collect_patches, with_raised_ridge
from prunekit.statistics.layer_errors import RIDGE, without_columns
from prunekit.utils.inputs import sample_count


class StackFitter:
    """A fitter of stacks in a masked model, whose weights it writes."""

    def __init__(self, original: nn.Module, masked: nn.Module, plan: Plan, settings: RepairSettings) -> None:
        self._original, self._plan, self._settings = original, plan, settings
        self._dense, self._masked = dict(named_tensors(original)), dict(named_tensors(masked))

    def fit(self, names: Collection[str], fitting: Sequence[Batch], judging: Sequence[Batch]) -> list[LayerRepair]:
        """Fit the stacks among some parameters, and return a report of each."""
        stacks = {name for name in names if len(self._plan.channel_map.shapes[name]) == 3}
        stacks -= {*self._plan.element_masks, *self._plan.lost}
        if not stacks or self._settings.fit != "patch":
            return []
        held = self._moments(stacks, judging, ridge=0.0)
        fitted = self._moments(stacks, fitting, ridge=RIDGE)
        return [self._fit(each, held[name]) for name, each in fitted.items() if name in held]

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

    def _fit(self, fitted: LayerMoments, held: LayerMoments) -> LayerRepair:
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
            tensor = self._masked[layer.weight]
            tensor += layer.stored(changes.flatten(0, 1)).to(tensor)
        note = "each matrix at its own rows in the dense model" if applied else "it is no better on held-out images"
        return LayerRepair(layer.weight, applied, before, after, int(columns.sum()), ridge=RIDGE, note=note)

    def _kept(self, name: str, axis: int) -> Tensor:
        """Return which entries along an axis of a parameter are kept, bool."""
        kept = torch.zeros(self._plan.channel_map.shapes[name][axis], dtype=torch.bool)
        kept[torch.from_numpy(self._plan.kept(name, axis))] = True
        return kept.to(self._dense[name].device)
