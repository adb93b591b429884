"""What a Gram matrix does not tell: where it was summed over fewer positions than it has columns, or over zeros."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from prunekit.calibration.moments import RAISED
from prunekit.calibration.patch_stats import LayerMoments, PatchStats


class CalibrationWarning(UserWarning):
    """Scores come from fewer samples than they need to be trusted."""


def too_few_rows(patches: PatchStats) -> list[str]:
    """What to say of each layer whose patches have more columns than positions were sampled."""
    return [
        f"the Gram matrix of the patches of {moments.layer.weight.rpartition('.')[0] or 'the model'} has rank "
        f"{_most(moments)} at most for {_columns(moments)} columns: {moments.rows} positions are too few, and its "
        f"ridge is raised {RAISED} times; take more images"
        for moments in patches.layers
        if _is_short(moments)
    ]


def dead_inputs(patches: PatchStats) -> list[str]:
    """One sentence on all layers that read channels which were zero at every position; none where there are none."""
    dead = {moments.layer.weight.rpartition(".")[0] or "the model": _dead(moments) for moments in patches.layers}
    found = [f"{int(zero.sum())} of {len(zero)} that {path} reads" for path, zero in dead.items() if zero.any()]
    said = "channels that are zero on all calibration images, and so go first and cost nothing: "
    return [said + ", ".join(found)] if found else []


def with_raised_ridge(patches: PatchStats, ridge: float) -> PatchStats:
    """The same, where positions are too few with so much more on the diagonal that `ridge` becomes `RAISED` times it.

    Args:
        ridge: share of the mean diagonal that will be added; the constant column has none.
    """
    layers = [_raised(moments, (RAISED - 1) * ridge) if _is_short(moments) else moments for moments in patches.layers]
    return replace(patches, layers=tuple(layers))


def _raised(moments: LayerMoments, more: float) -> LayerMoments:
    grams = []
    for matrix in moments.grams:
        diagonal = matrix.diagonal()[:-1]
        pull = torch.cat([diagonal.mean().expand(len(diagonal)), matrix.new_zeros(1)])
        grams.append(matrix + torch.diag(more * pull))
    return replace(moments, grams=tuple(grams))


def _columns(moments: LayerMoments) -> int:
    return max((len(matrix) for matrix in moments.grams), default=0)


def _is_short(moments: LayerMoments) -> bool:
    return moments.rows < _columns(moments)


def _most(moments: LayerMoments) -> int:
    alive = max(int((matrix.diagonal() > 0).sum()) for matrix in moments.grams)
    return min(moments.rows, alive)


def _dead(moments: LayerMoments) -> Tensor:
    """(channels,) Whether a channel's columns have no product with any other one, the constant among them."""
    columns = [(matrix - matrix.diag().diag()).count_nonzero(0)[:-1] == 0 for matrix in moments.grams]
    return torch.cat(columns).view(-1, moments.taps).all(1)
