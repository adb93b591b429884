"""From a criterion's name to one score for each label.

From values along the axes of tensors to values of labels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from prunekit.channels.channel_map import ChannelMap
from prunekit.channels.cut.model_match import require_model
from prunekit.criteria.criterion import Criterion, Evidence, Need, Scores, get_criterion
from prunekit.errors import NonFiniteError, UsageError
from prunekit.statistics.channel_stats import ChannelStats
from prunekit.statistics.layers.patch_moments import CalibrationWarning, PatchStats
from prunekit.statistics.taylor_terms import TaylorTerms
from prunekit.utils.inputs import described


def score(
    criterion: str,
    model: nn.Module,
    channel_map: ChannelMap,
    *,
    stats: ChannelStats | None = None,
    gradients: TaylorTerms | None = None,
    patches: PatchStats | None = None,
    seed: int = 0,
) -> Scores:
    """Importance of every label: the lowest go first.

    Args:
        criterion: a registered name, or `file.py:function`; `prunekit list criteria` says what each measures and needs.
        model: the model that `channel_map` was traced from; only read.
        channel_map: its labels.
        stats: channel statistics of that model, from `calibration.collect`; for "moments" with its `moments="full"`,
            for "ranks" with `ranks=True`.
        gradients: of a loss on labeled images, from `calibration.collect_gradients`; for "curvature" with its
            `second_order=True`.
        patches: of that model, from `calibration.collect_patches`.
        seed: for "random".

    Returns:
        (n_labels,) float64; label 0, the locked channels, scores +inf.

    Raises:
        UsageError: an unknown criterion, missing statistics or gradients, or a criterion that returns anything but one
            number for each label.
        PlanError: the map is that of another model.
        NonFiniteError: weights or statistics hold NaN or Inf; the message says where.

    Warns:
        CalibrationWarning: Gram matrices come from fewer positions than channels; says their rank.
    """
    chosen = get_criterion(criterion)
    _require_evidence(chosen, stats, gradients, patches)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    require_model(channel_map, model, "the channel map")
    for problem in stats.too_few_samples() if stats is not None and "moments" in chosen.needs else ():
        warnings.warn(f"criterion {criterion!r}: {problem}", CalibrationWarning, stacklevel=2)
    with torch.no_grad():
        modules = dict(model.named_modules())
        scores = chosen.function(Evidence(channel_map, modules, parameters, stats, gradients, seed, patches))
    scores = _checked(scores, channel_map, criterion)
    scores[0] = np.inf
    _require_numbers(scores, channel_map, criterion)
    return scores


def _checked(scores: Any, channel_map: ChannelMap, criterion: str) -> Scores:
    """Return a copy of what a criterion returned, float64."""
    count = channel_map.n_labels
    expected = f"criterion {criterion!r}: expected a NumPy array with one number for each label, ({count},)"
    if not isinstance(scores, np.ndarray):
        hint = "; return it as .double().cpu().numpy()" if isinstance(scores, torch.Tensor) else ""
        raise UsageError(f"{expected}, got {described(scores)}{hint}")
    if scores.shape != (count,) or scores.dtype.kind not in "fiub":
        raise UsageError(f"{expected}, got {scores.dtype} of shape {scores.shape}")
    return scores.astype(np.float64)


def normalize(scores: Scores, channel_map: ChannelMap) -> Scores:
    """Return scores that can be ranked across layers: each divided by the mean score of its channel group.

    Layers differ in scale, so raw scores would empty whole layers (Molchanov et al. 2017 divide by the layer's l2
    norm). The mean is used because it does not depend on how many channels a group has.

    Args:
        scores: (n_labels,), not negative.

    Returns:
        (n_labels,) float64; +inf stays +inf, and a group whose scores are all 0 stays 0.
    """
    result = np.array(scores, dtype=np.float64)
    for group in channel_map.groups:
        members = result[group.labels]
        finite = members[np.isfinite(members)]
        if finite.size and finite.mean() > 0:
            result[group.labels] = members / finite.mean()
    return result


def _require_evidence(
    criterion: Criterion, stats: ChannelStats | None, gradients: TaylorTerms | None, patches: PatchStats | None
) -> None:
    """Checks that there is what a criterion needs; the message says how to get it."""
    gradient = "gradients of the loss on labeled calibration images"
    missing: dict[Need, tuple[bool, str, str]] = {
        "stats": (stats is None, "channel statistics", "stats=calibrate(model, batches)"),
        "moments": (
            stats is None or not stats.moments,
            "Gram matrices of layers' inputs",
            "stats=calibrate(model, batches, moments='full')",
        ),
        "patches": (
            patches is None,
            "Gram matrices of the patches that layers read",
            "patches=collect_patches(model, batches)",
        ),
        "ranks": (
            stats is None or not stats.ranks,
            "ranks of feature maps",
            "stats=calibrate(model, batches, ranks=True)",
        ),
        "gradients": (gradients is None, gradient, "gradients=collect_gradients(model, batches, loss)"),
        "curvature": (
            gradients is None or gradients.curvature is None,
            f"second derivatives beside {gradient}",
            "gradients=collect_gradients(model, batches, loss, second_order=True)",
        ),
    }
    needed = [missing[need] for need in reversed(criterion.needs) if need in missing]
    for lacking, what, how in needed:
        if lacking:
            samples = "" if how.startswith("gradients") else "; prunekit.plan and prune take it from calibration=loader"
            raise UsageError(f"criterion {criterion.name!r} needs {what}: pass {how}{samples}")


def _require_numbers(scores: Scores, channel_map: ChannelMap, criterion: str) -> None:
    for group in channel_map.groups:
        count = int(np.isnan(scores[group.labels]).sum())
        if count:
            raise NonFiniteError(
                f"criterion {criterion!r}: {count} of {len(group.labels)} scores of group {group.name!r} are NaN; "
                "its weights or statistics hold NaN or Inf"
            )


IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class LabelMean:
    """Mean over several axes of what each says about a label; an axis that does not carry a label says nothing.

    Where two labels decide on an entry together, the axis says something about both; the joint label scores 0.
    """

    def __init__(self, channel_map: ChannelMap) -> None:
        self._map = channel_map
        self._total, self._axes = np.zeros(channel_map.n_labels), np.zeros(channel_map.n_labels, np.int64)
        self._axes[channel_map.joint[:, 0]] = 1

    def add(self, labels: IntArray, values: FloatArray, *, exponent: float = 1.0) -> None:
        """Add one axis: the mean of `values` over the indices that share a label, to the power of `exponent`.

        Args:
            labels: (size,), the label of every index along the axis.
            values: (size,), not negative where `exponent` is not whole.
        """
        for deciding in self._map.deciding(labels):
            found, position, count = np.unique(deciding, return_inverse=True, return_counts=True)
            self._total[found] += (np.bincount(position, values) / count) ** exponent
            self._axes[found] += 1

    @property
    def seen(self) -> npt.NDArray[np.bool_]:
        """Labels that some axis carried, (n_labels,)."""
        found: npt.NDArray[np.bool_] = self._axes > 0
        return found

    def result(self, *, otherwise: Scores | float = np.inf) -> Scores:
        """Return the mean for each label, (n_labels,); `otherwise` for those that no axis carried."""
        return np.where(self.seen, self._total / np.maximum(self._axes, 1), otherwise)


Measure = Callable[[LabelMean, str, Tensor, dict[int, IntArray]], None]
"""Adds to the mean what a named weight says about the labels on its axes: axis -> (size,)."""


def mean_over_slices(evidence: Evidence, measure: Measure) -> Scores:
    """Return the mean over a label's axes of what `measure` says about its slice.

    A slice is everything that carries the label along one axis of a weight: a filter, the columns that read it, and
    behind a flatten all the columns of one channel together. Weights of two or more axes speak; biases and affine
    scales do only for labels that lie on nothing else. A label on no parameter scores +inf: nothing to remove.
    """
    weights = _measured(evidence, measure, vectors=False)
    if weights.seen[1:].all():
        return weights.result()
    return weights.result(otherwise=_measured(evidence, measure, vectors=True).result())


def _measured(evidence: Evidence, measure: Measure, *, vectors: bool) -> LabelMean:
    found = LabelMean(evidence.channel_map)
    for name, weight in evidence.parameters.items():
        if (weight.ndim < 2) == vectors:
            axes = enumerate(evidence.channel_map.labels[name])
            labeled = {axis: labels for axis, labels in axes if labels is not None and labels.any()}
            measure(found, name, weight, labeled)
    return found


def require_finite(name: str, values: FloatArray) -> None:
    """Check what was computed from a parameter.

    Raises:
        NonFiniteError: NaN or Inf is among the values; names the parameter.
    """
    if not np.isfinite(values).all():
        raise NonFiniteError(f"parameter {name!r} holds NaN or Inf; importance needs finite weights")


def require_all(
    found: LabelMean, evidence: Evidence, name: str, advice: str, *, otherwise: Scores | float = np.nan
) -> Scores:
    """Return the scores of a criterion that has to know something of every label.

    Args:
        otherwise: for those of which `found` knows nothing.

    Raises:
        UsageError: some label is left without; names its group.
    """
    scores = found.result(otherwise=otherwise)
    for group in evidence.channel_map.groups:
        missing = int((np.isnan(scores[group.labels]) & ~found.seen[group.labels]).sum())
        if missing:
            raise UsageError(
                f"criterion {name!r}: {missing} of {len(group.labels)} channels of group {group.name!r} cannot be "
                f"scored: {advice}"
            )
    return scores
