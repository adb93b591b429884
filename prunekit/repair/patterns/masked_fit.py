"""Least squares with zeros: each output is fitted by those of its weights that are kept, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

AT_ONCE = 2**20
"""Entries of the matrices that are factored at a time: 8 MiB."""
HELD = 2**25
"""Entries of factors up to which they are held for the next solution: 256 MiB."""
FACTORED = 2e11
"""Multiply-accumulates up to which each output's own matrix is factored; beyond, conjugate gradients take less time."""
STEPS = 60
"""Conjugate gradient steps at most."""
TOLERANCE = 1e-8
"""Share of the first residual's size at which they end."""


def with_ridge(gram: Tensor, ridge: float, *, biased: bool) -> Tensor:
    """Return Gram matrices (..., d, d) with a share of the mean diagonal added, more where they cannot be factored."""
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


class MaskedLeastSquares:
    """Solutions W of least squares that are 0 where weights are not kept: they minimize tr(W gram W^T) / 2 - tr(W R^T).

    Args:
        gram: (d, d) positive definite, float64.
        keep: bool (o, d).
    """

    def __init__(self, gram: Tensor, keep: Tensor) -> None:
        self._gram, self._keep = gram, keep
        counts = keep.sum(1)
        self._exact = len(keep) * int(counts.max()) ** 3 / 3 <= FACTORED
        self._batches = _batches(counts) if self._exact else []
        self._factors: list[Tensor] | None = None
        if sum(len(rows) * most**2 for rows, most in self._batches) <= HELD:
            self._factors = [self._factor(rows, most) for rows, most in self._batches]

    def solve(self, right: Tensor, start: Tensor) -> Tensor:
        """Return the weights (o, d) for a right-hand side R (o, d); conjugate gradients begin at `start`."""
        if not self._exact:
            return _conjugate_gradients(self._gram, right, self._keep, start)
        found = torch.zeros_like(right)
        for i, (rows, most) in enumerate(self._batches):
            places, there = self._places(rows, most)
            factor = self._factor(rows, most) if self._factors is None else self._factors[i]
            wanted = torch.where(there, right[rows].gather(1, places), 0.0)
            solved = torch.cholesky_solve(wanted[:, :, None], factor)[:, :, 0]
            found[rows] = torch.zeros_like(found[rows]).scatter_(1, places, torch.where(there, solved, 0.0))
        return found

    def _places(self, rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Return the kept columns of some rows, (r, most), and which of these are kept: others pad."""
        places = self._keep[rows].to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
        return places, self._keep[rows].gather(1, places)

    def _factor(self, rows: Tensor, most: int) -> Tensor:
        """Return the Cholesky factors of the kept part of each row's matrix, padded by an identity, (r, most, most)."""
        places, there = self._places(rows, most)
        parts = [self._gram.index_select(0, one).index_select(1, one) for one in places]
        matrix = torch.where(there[:, :, None] & there[:, None, :], torch.stack(parts), 0.0)
        matrix.diagonal(dim1=1, dim2=2).add_((~there).to(matrix.dtype))
        factor: Tensor = torch.linalg.cholesky(matrix)
        return factor


def _batches(counts: Tensor) -> list[tuple[Tensor, int]]:
    """Return rows that are factored together, those with about as many kept weights, and the most that one keeps."""
    order, start, found = counts.argsort(descending=True), 0, []
    while start < len(order):
        most = max(1, int(counts[order[start]]))
        rows = order[start : start + max(1, AT_ONCE // most**2)]
        found.append((rows, most))
        start += len(rows)
    return found


def grouped_masked_least_squares(gram: Tensor, right: Tensor, keep: Tensor) -> Tensor:
    """Return the same for many small groups, each with its own Gram matrix: (g, d, d), (g, o, d), (g, o, d)."""
    both = keep[..., :, None] & keep[..., None, :]  # (g, o, d, d)
    matrix = torch.where(both, gram[:, None], 0.0)
    matrix.diagonal(dim1=-2, dim2=-1).add_((~keep).to(gram.dtype))
    found = torch.cholesky_solve(torch.where(keep, right, 0.0)[..., None], torch.linalg.cholesky(matrix))
    return torch.where(keep, found[..., 0], 0.0)


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
