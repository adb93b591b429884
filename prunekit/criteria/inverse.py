"""Inverses of Gram matrices, by Cholesky factors: half of each matrix is all that is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from prunekit.criteria.slices import FloatArray

LEAF = 128
"""Rows of a triangle from which on it is inverted by its quarters, which are products of matrices."""


def inverse_factors(blocks: FloatArray, damping: float) -> list[FloatArray]:
    """For each symmetric matrix (n, n), with a ridge, V with V^T V = its inverse: so (V^T V)_cc takes columns c alone.

    Where a ridge of `damping` times the mean diagonal is not enough for rounding errors, ten times as much is added,
    and so on; to a matrix of zeros, 1.
    """
    return [_triangle_inverse(_factor(torch.tensor(block), damping)).numpy() for block in blocks]


def _factor(matrix: Tensor, damping: float) -> Tensor:
    mean = float(matrix.diagonal().mean()) or 1.0 / damping
    while True:
        damped = matrix.clone()
        damped.diagonal().add_(damping * mean)
        factored = torch.linalg.cholesky_ex(damped)
        if not int(factored.info):
            lower: Tensor = factored.L
            return lower
        damping *= 10


def _triangle_inverse(lower: Tensor) -> Tensor:
    size = len(lower)
    if size <= LEAF:
        small: Tensor = torch.linalg.solve_triangular(lower, torch.eye(size, dtype=lower.dtype), upper=False)
        return small
    half = size // 2
    result = torch.zeros_like(lower)
    result[:half, :half] = _triangle_inverse(lower[:half, :half])
    result[half:, half:] = _triangle_inverse(lower[half:, half:])
    result[half:, :half] = -(result[half:, half:] @ (lower[half:, :half] @ result[:half, :half]))
    return result
