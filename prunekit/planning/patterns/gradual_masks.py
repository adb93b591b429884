"""Masks of a pattern at a pruning step of a schedule: how many weights of each layer are zero by then, and which."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prunekit.errors import NonFiniteError
from prunekit.planning.patterns.pattern import Pattern, PatternLayer, PatternLayers, lowest
from prunekit.planning.schedules import ScheduleStep, share_kept
from prunekit.settings.pruning import ScheduleKind
from prunekit.settings.weight_pattern import PatternScope, PatternSettings
from prunekit.utils.tensors import is_finite

MOVED = 0.3
"""Share of the kept weights that change places at the first pruning step (Evci et al. 2020, RigL)."""


@dataclass(frozen=True, eq=False)
class StepWeights:
    """A layer's weights before a pruning step."""

    layer: PatternLayer  # in what its channels leave of it
    size: Tensor  # (o, i, t) squared weights, which zeros are spread over layers by; finite
    score: Tensor  # (o, i, t) what weights are kept for, the higher the sooner; finite
    alive: Tensor  # (o, i, t) bool, True where weights are not masked
    returning: bool = False  # whether masked weights may come back by their scores
    gradient: Tensor | None = None  # (o, i, t) squared gradients, the largest of which come back; None: none does

    def require_finite(self) -> None:
        """Raise if a score is not finite."""
        for what, values in (("weights", self.size), ("scores", self.score), ("gradients", self.gradient)):
            if values is not None and not is_finite(values):
                raise NonFiniteError(f"{self.layer.weight}: {what} are NaN or Inf, so none can be chosen; train slower")


def share_moved(step: ScheduleStep) -> float:
    """Return the share of kept weights that move at a pruning step: alpha / 2 (1 + cos(pi t / T)), alpha = 0.3.

    (Evci et al. 2020, "Rigging the lottery", equation 1.) It is 0 at the last one.
    """
    return MOVED / 2 * (1 + math.cos(math.pi * min(1.0, step.elapsed)))


def share_at(kind: ScheduleKind, step: ScheduleStep, zeros: float) -> float:
    """Return the share of zeros at a pruning step, of a final share (Zhu & Gupta 2017 for `cubic`)."""
    return 1 - share_kept(kind, step.progress, 1 - zeros)


def masks_at_step(
    layers: PatternLayers,
    weights: Sequence[StepWeights],
    settings: PatternSettings,
    kind: ScheduleKind,
    step: ScheduleStep,
) -> list[Tensor]:
    """Return the mask (o, i, t) of each layer at a pruning step, False where weights are zero.

    The share of zeros follows the schedule. N:M cannot come gradually within a group, so the share of groups that have
    it grows, the same in each layer, and those lose least that come first; the last step has the pattern everywhere.
    Masked weights stay masked, unless they may return: by their scores, or by the gradients of the loss, which take the
    places of `share_moved` of the kept weights, the smallest ones. Where channels have gone since the last step,
    shares and groups are those of what is left, and a few masked weights may be among the kept ones.
    """
    pattern = Pattern.of(settings)
    for one in weights:
        one.require_finite()
    moved = share_moved(step)
    if pattern.kept_of is not None:
        share = share_at(kind, step, settings.zeros) / settings.zeros
        return [_some_groups(pattern, one, share, moved) for one in weights]
    counts = _zero_units(pattern, layers, weights, settings, kind, step)
    masks = []
    for one, count in zip(weights, counts, strict=True):
        units = _ranks(pattern, one, count, moved)
        spread = pattern.spread(units, one.layer.shape)
        masks.append(pattern.mask(spread, count / units.numel()))
    return masks


def _zero_units(
    pattern: Pattern,
    layers: PatternLayers,
    weights: Sequence[StepWeights],
    settings: PatternSettings,
    kind: ScheduleKind,
    step: ScheduleStep,
) -> list[int]:
    """Return how many units of each layer are zero."""
    units = [pattern.units(one.size).numel() for one in weights]
    sizes = [one.layer.size // count for one, count in zip(weights, units, strict=True)]
    asked = [one.layer.zeros for one in weights]
    named = [
        0 if zeros is None else round(share_at(kind, step, zeros) * n) for zeros, n in zip(asked, units, strict=True)
    ]
    wanted = share_at(kind, step, settings.zeros) * layers.size
    wanted -= sum(count * size for count, size in zip(named, sizes, strict=True))
    free = [index for index, zeros in enumerate(asked) if zeros is None]
    found = _spread(pattern, [weights[i] for i in free], [sizes[i] for i in free], max(0.0, wanted), settings.scope)
    return [named[i] if zeros is not None else found[free.index(i)] for i, zeros in enumerate(asked)]


def _spread(
    pattern: Pattern, weights: Sequence[StepWeights], sizes: Sequence[int], wanted: float, scope: PatternScope
) -> list[int]:
    """Return how many units of each layer are zero, for a number of zero weights in all of them."""
    if not weights:
        return []
    if scope == "uniform":
        share = min(1.0, wanted / sum(one.layer.size for one in weights))
        return [round(share * one.layer.size / size) for one, size in zip(weights, sizes, strict=True)]
    scores = [
        _lamp(_alive_only(pattern, one, one.size)) if scope == "error" else _shown(pattern, one) / size
        for one, size in zip(weights, sizes, strict=True)
    ]
    for values in scores:
        values[values.argmax()] = math.inf  # no layer becomes zero as a whole
    if len(set(sizes)) == 1:
        chosen = lowest(torch.cat(scores), int((wanted + 0.5) // sizes[0]))
        ends = torch.tensor([values.numel() for values in scores]).cumsum(0).tolist()
        return [int(chosen[end - values.numel() : end].sum()) for values, end in zip(scores, ends, strict=True)]
    home = torch.cat([torch.full_like(values, i, dtype=torch.long) for i, values in enumerate(scores)])
    home = home[torch.cat(scores).argsort(stable=True)]
    zeros = torch.tensor(sizes, device=home.device)[home].cumsum(0)
    taken = int((zeros <= wanted + 0.5).sum())
    return torch.bincount(home[:taken], minlength=len(weights)).tolist()


def _lamp(units: Tensor) -> Tensor:
    """Return layer-adaptive scores (units,): squared size over that of all units that are at least as large."""
    # Lee et al. 2021, "Layer-adaptive sparsity for the magnitude-based pruning", equation 4; units of -inf stay so
    alive = (units > -math.inf).nonzero()[:, 0]
    ordered, order = units[alive].sort(stable=True)
    ordered = ordered.double()
    rest = ordered.clamp(min=0).flip(0).cumsum(0).flip(0)
    scores = torch.full_like(units, -math.inf, dtype=torch.float64)
    scores[alive[order]] = ordered / rest.clamp(min=torch.finfo(torch.float64).tiny)
    return scores


def _alive_only(pattern: Pattern, one: StepWeights, values: Tensor) -> Tensor:
    """Return sums over units (units,), -inf where all of a unit is masked."""
    found = pattern.units(torch.where(one.alive, values, 0))
    return found.masked_fill(pattern.units(one.alive.float()) == 0, -math.inf).flatten()


def _shown(pattern: Pattern, one: StepWeights) -> Tensor:
    """Return what units are kept for (units,), -inf where they stay masked."""
    return pattern.units(one.score).flatten() if one.returning else _alive_only(pattern, one, one.score)


def _ranks(pattern: Pattern, one: StepWeights, count: int, moved: float) -> Tensor:
    """Return what the units of a layer (o', i', t') are kept for, of which a number are zero."""
    shape = pattern.units(one.score).shape
    units = _shown(pattern, one)
    if one.gradient is None:
        return units.view(shape)
    kept = units.numel() - count
    stay = lowest(-units, kept - round(moved * kept)) & (units > -math.inf)
    ranks = pattern.units(one.gradient).flatten()
    ranks[stay] = math.inf
    return ranks.view(shape)


def _some_groups(pattern: Pattern, one: StepWeights, share: float, moved: float) -> Tensor:
    """Return a mask with N:M in a share of the groups, those whose removed weights have the least scores."""
    assert pattern.kept_of is not None
    kept, of = pattern.kept_of
    outputs, inputs, taps = one.layer.shape

    def sums(values: Tensor) -> Tensor:
        return values.view(outputs, inputs // of, of, taps).sum(2, keepdim=True)

    score = one.score if one.returning else one.score.masked_fill(~one.alive, -math.inf)
    mask = pattern.mask(score if one.gradient is None else _moved(one, moved), 0.0)
    before = sums(one.alive.int()) <= kept
    lost = sums(torch.where(~mask & one.alive, one.score, 0)).masked_fill(before, -math.inf).flatten()
    chosen = lowest(lost, round(share * lost.numel()))
    whole = chosen.view(outputs, inputs // of, 1, taps).expand(-1, -1, of, -1).reshape(mask.shape)
    return mask | ~whole


def _moved(one: StepWeights, moved: float) -> Tensor:
    """Return scores in which the smallest kept weights compete with the masked ones by their gradients."""
    assert one.gradient is not None
    score = one.score.masked_fill(~one.alive, -math.inf).flatten()
    alive = int(one.alive.sum())
    stay = lowest(-score, alive - round(moved * alive))
    gradient = one.gradient.flatten()
    found = gradient / gradient.amax().clamp(min=torch.finfo(gradient.dtype).tiny)
    found[stay] = 2 + score[stay] / score[stay].amax().clamp(min=torch.finfo(score.dtype).tiny)
    return found.view(one.score.shape)
