"""Least squares with zeros: each output is fitted by those of its weights that are kept, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

AT_ONCE = 2**24
"""Entries of the matrices that are factored at a time: 128 MiB."""
FACTORED = 2e11
"""Multiply-accumulates up to which each output's own matrix is factored; beyond, conjugate gradients take less time."""
STEPS = 60
"""Conjugate gradient steps at most."""
TOLERANCE = 1e-8
"""Share of the first residual's size at which they end."""


def with_ridge(gram: Tensor, ridge: float, *, biased: bool) -> Tensor:
    """Return Gram matrices (..., d, d) with a share of the mean diagonal added, more where they cannot be factored.

    Args:
        gram: of one group or several.
        ridge: the share; the constant column, the last where there is a bias, has none.
        biased: whether there is one.
    """
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    mean = diagonal[..., : diagonal.shape[-1] - biased].mean(-1, keepdim=True)
    pull = (ridge * torch.where(mean > 0, mean, 1.0)).expand_as(diagonal).clone()
    if biased:
        pull[..., -1] = 0
    found = gram + torch.diag_embed(pull)
    failed = torch.linalg.cholesky_ex(found).info > 0
    if not bool(failed.any()):
        return found
    return torch.where(failed[..., None, None], with_ridge(gram, 10 * ridge, biased=biased), found)


def masked_least_squares(gram: Tensor, right: Tensor, keep: Tensor, start: Tensor) -> Tensor:
    """Return the weights W that minimize tr(W gram W^T) / 2 - tr(W right^T), 0 where they are not kept: (o, d).

    Args:
        gram: (d, d) positive definite, float64.
        right: (o, d).
        keep: bool (o, d).
        start: (o, d) from where conjugate gradients begin.
    """
    most = int(keep.sum(1).max()) if len(keep) else 0
    if len(keep) * most**3 / 3 <= FACTORED:
        return _factored(gram, right, keep)
    return _conjugate_gradients(gram, right, keep, start)


def grouped_masked_least_squares(gram: Tensor, right: Tensor, keep: Tensor) -> Tensor:
    """Return the same for many small groups, each with its own Gram matrix: (g, d, d), (g, o, d), (g, o, d)."""
    both = keep[..., :, None] & keep[..., None, :]  # (g, o, d, d)
    matrix = torch.where(both, gram[:, None], 0.0)
    matrix.diagonal(dim1=-2, dim2=-1).add_((~keep).to(gram.dtype))
    found = torch.cholesky_solve(torch.where(keep, right, 0.0)[..., None], torch.linalg.cholesky(matrix))
    return torch.where(keep, found[..., 0], 0.0)


def _factored(gram: Tensor, right: Tensor, keep: Tensor) -> Tensor:
    """Return the exact solution: rows with about as many kept weights share a batch, padded by an identity."""
    found, counts = torch.zeros_like(right), keep.sum(1)
    order = counts.argsort(descending=True)
    start = 0
    while start < len(order):
        most = max(1, int(counts[order[start]]))
        rows = order[start : start + max(1, AT_ONCE // most**2)]
        start += len(rows)
        places = keep[rows].to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
        there = keep[rows].gather(1, places)
        matrix = torch.where(there[:, :, None] & there[:, None, :], gram[places[:, :, None], places[:, None, :]], 0.0)
        matrix.diagonal(dim1=1, dim2=2).add_((~there).to(gram.dtype))
        wanted = torch.where(there, right[rows].gather(1, places), 0.0)
        solved = torch.cholesky_solve(wanted[:, :, None], torch.linalg.cholesky(matrix))[:, :, 0]
        found[rows] = torch.zeros_like(found[rows]).scatter_(1, places, torch.where(there, solved, 0.0))
    return found


def _conjugate_gradients(gram: Tensor, right: Tensor, keep: Tensor, start: Tensor) -> Tensor:
    """Return an approximate solution for all rows at once, preconditioned by the diagonal (Meng et al. 2024, ALPS)."""
    inverse = 1 / gram.diagonal()
    found = torch.where(keep, start, 0.0)
    left = torch.where(keep, right - found @ gram, 0.0)
    better = left * inverse
    direction, size = better, (left * better).sum(1, keepdim=True)
    first = size.clamp(min=torch.finfo(gram.dtype).tiny)
    for _ in range(STEPS):
        product = torch.where(keep, direction @ gram, 0.0)
        curvature = (direction * product).sum(1, keepdim=True)
        step = torch.where(curvature > 0, size / curvature, 0.0)
        found, left = found + step * direction, left - step * product
        better = left * inverse
        before, size = size, (left * better).sum(1, keepdim=True)
        if bool((size <= TOLERANCE**2 * first).all()):
            break
        direction = better + torch.where(before > 0, size / before, 0.0) * direction
    return found
