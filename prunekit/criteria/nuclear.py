"""Nuclear norms with rows left out, from one eigenvalue decomposition of a Gram matrix."""

from __future__ import annotations

import numpy as np

from prunekit.criteria.slices import FloatArray, IntArray

STEP = 0.4
"""Of the trapezoidal rule over log t: its error falls with exp(-pi^2 / step), here to 2e-11."""
LOWEST, HIGHEST = 1e-6, 1e5
"""Range of t, in largest singular values; beyond it the integrand follows a power."""
ENTRIES = 2**22
"""Numbers held at a time."""


class NuclearNorm:
    """The nuclear norm of a matrix A, (n, positions), known by its Gram matrix G = A A^T.

    Without the rows S it is smaller by (2 / pi) times the integral over t > 0 of |S| - t^2 tr(R_SS^-1 (R^2)_SS), with
    R = (G + t^2)^-1: that is sqrt(G) = (2 / pi) integral of G (G + t^2)^-1, and the trace of the inverse of a block
    by its Schur complement. So each S costs O(n), not another decomposition.

    Args:
        gram: (n, n), symmetric, without negative eigenvalues but for rounding.
    """

    def __init__(self, gram: FloatArray) -> None:
        values, self._vectors = np.linalg.eigh(gram)
        self._values = values.clip(min=0)
        self._scale = float(np.sqrt(self._values[-1]))
        low, high = np.log(LOWEST), np.log(HIGHEST)
        self._t = np.exp(np.linspace(low, high, 1 + round((high - low) / STEP))) * self._scale

    def lost_without(self, rows: IntArray) -> FloatArray:
        """By how much the norm is smaller without some rows, at least 0.

        Args:
            rows: (m, size) m choices of as many rows.

        Returns:
            (m,) for each choice alone.
        """
        if self._scale == 0:
            return np.zeros(len(rows))
        values = self._singly(rows[:, 0]) if rows.shape[1] == 1 else np.stack([self._jointly(each) for each in rows], 1)
        weighted = values * self._t[:, None]  # dt = t d(log t)
        step = np.log(self._t[1] / self._t[0])
        ends = weighted[0] + weighted[-1]  # below the range the integrand is constant, above it falls with t^-2
        inside = step * (weighted.sum(0) - ends / 2) + step**2 / 12 * ends  # Euler and Maclaurin's first correction
        lost: FloatArray = np.maximum(0.0, 2 / np.pi * (inside + ends))
        return lost

    def _singly(self, rows: IntArray) -> FloatArray:
        """(points, rows) The integrand for single rows: of R and R^2 only the diagonals are needed."""
        squares = self._vectors[rows] ** 2
        inverse = 1 / (self._values + self._t[:, None] ** 2)  # (points, n)
        found: FloatArray = 1 - self._t[:, None] ** 2 * (inverse**2 @ squares.T) / (inverse @ squares.T)
        return found

    def _jointly(self, rows: IntArray) -> FloatArray:
        """(points,) The integrand for several rows."""
        vectors = self._vectors[rows]
        parts = np.array_split(self._t, 1 + vectors.size * len(self._t) // ENTRIES)
        return np.concatenate([self._integrand(vectors, t) for t in parts])

    def _integrand(self, vectors: FloatArray, t: FloatArray) -> FloatArray:
        """(points,) At each t."""
        inverse = 1 / (self._values + t[:, None] ** 2)  # (points, n)
        once = vectors * inverse[:, None]
        twice = once * inverse[:, None]
        product = np.linalg.solve(once @ vectors.T, twice @ vectors.T)
        value: FloatArray = len(vectors) - t**2 * product.trace(axis1=1, axis2=2)
        return value
