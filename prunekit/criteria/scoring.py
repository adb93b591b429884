"""From a criterion's name to one score for each label."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from prunekit.calibration import CalibrationWarning, ChannelStats, TaylorTerms
from prunekit.calibration.patch_stats import PatchStats
from prunekit.channels import ChannelMap
from prunekit.channels.belonging import require_model
from prunekit.criteria.registry import Criterion, Evidence, Need, Scores, get_criterion
from prunekit.errors import NonFiniteError, UsageError
from prunekit.inputs import described


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
    """A copy of what a criterion returned, float64."""
    count = channel_map.n_labels
    expected = f"criterion {criterion!r}: expected a NumPy array with one number for each label, ({count},)"
    if not isinstance(scores, np.ndarray):
        hint = "; return it as .double().cpu().numpy()" if isinstance(scores, torch.Tensor) else ""
        raise UsageError(f"{expected}, got {described(scores)}{hint}")
    if scores.shape != (count,) or scores.dtype.kind not in "fiub":
        raise UsageError(f"{expected}, got {scores.dtype} of shape {scores.shape}")
    return scores.astype(np.float64)


def normalize(scores: Scores, channel_map: ChannelMap) -> Scores:
    """Scores that can be ranked across layers: each divided by the mean score of its channel group.

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
        "stats": (stats is None, "channel statistics", "stats=collect(model, batches)"),
        "moments": (
            stats is None or not stats.moments,
            "Gram matrices of layers' inputs",
            "stats=collect(model, batches, moments='full')",
        ),
        "patches": (
            patches is None,
            "Gram matrices of the patches that layers read",
            "patches=collect_patches(model, batches)",
        ),
        "ranks": (
            stats is None or not stats.ranks,
            "ranks of feature maps",
            "stats=collect(model, batches, ranks=True)",
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
