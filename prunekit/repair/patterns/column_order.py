"""Zeros chosen column by column, for wide layers: all outputs share one factored matrix.

Frantar & Alistarh 2023, "SparseGPT: massive language models can be accurately pruned in one-shot".
"""

from __future__ import annotations

import torch
from torch import Tensor

from prunekit.planning.patterns.pattern import Pattern, highest
from prunekit.repair.patterns.removal import pattern_columns

BLOCK = 128
"""Columns whose zeros are chosen together, about."""


def column_by_column(
    gram: Tensor, weight: Tensor, scale: Tensor, pattern: Pattern, shape: tuple[int, int, int], zeros: float
) -> tuple[Tensor, Tensor]:
    """Return a mask (o, i * taps), and the weights (o, d) after the kept ones have taken over for the removed.

    Within each block of columns those units go whose weights, squared, are least over the diagonal of the inverse of
    the Gram matrix of all later columns.

    Args:
        gram: (d, d) positive definite, float64; a constant column may be last, and stays.
        weight: (o, d), input after input, the taps of each together.
        shape: outputs, inputs and taps.
    """
    outputs, inputs, taps = shape
    order, unit = _order(pattern, inputs, taps)
    columns = torch.cat([order, torch.arange(len(order), len(gram))]).to(gram.device)
    inverse = torch.linalg.inv(gram[columns][:, columns])
    factor = torch.linalg.cholesky((inverse + inverse.T) / 2).T  # upper: row j is what column j leaves to later ones
    weight = weight[:, columns].clone()
    keep = torch.ones(outputs, len(order), dtype=torch.bool, device=gram.device)
    step = max(unit, BLOCK // unit * unit)
    for start in range(0, len(order), step):
        end = min(start + step, len(order))
        errors = torch.zeros(outputs, end - start, dtype=weight.dtype, device=gram.device)
        chosen_at = unit if pattern.kept_of is not None else end - start
        for at in range(start, end):
            if (at - start) % chosen_at == 0:
                some = slice(at, at + chosen_at)
                losses = (weight[:, some] * scale[:, None] / factor.diagonal()[some]).square()
                keep[:, some] = _kept(pattern, losses, zeros, unit)
            errors[:, at - start] = torch.where(keep[:, at], 0.0, weight[:, at]) / factor[at, at]
            weight[:, at:end] -= errors[:, at - start, None] * factor[at, at:end]
        weight[:, end:] -= errors @ factor[start:end, end:]
    mask, found = torch.empty_like(keep), torch.empty_like(weight)
    mask[:, order], found[:, columns] = keep, weight
    found[:, : len(order)].masked_fill_(~mask, 0)
    return mask, found


def _order(pattern: Pattern, inputs: int, taps: int) -> tuple[Tensor, int]:
    """Return the columns in an order in which those of a unit, or of a group of M, are next to each other; and M."""
    if pattern.kept_of is not None:
        of = pattern.kept_of[1]
        return torch.arange(inputs * taps).view(inputs // of, of, taps).transpose(1, 2).flatten(), of
    columns = pattern_columns(pattern, inputs, taps)
    return columns.flatten(), columns.shape[1]


def _kept(pattern: Pattern, losses: Tensor, zeros: float, unit: int) -> Tensor:
    """Return which columns of a block are kept, (o, columns)."""
    if pattern.kept_of is not None:
        return pattern.mask(losses[:, :, None], zeros)[:, :, 0]
    outputs, columns = losses.shape
    units = losses.view(outputs // pattern.outputs, pattern.outputs, columns // unit, unit).sum((1, 3))
    return highest(units, zeros).repeat_interleave(pattern.outputs, 0).repeat_interleave(unit, 1)
