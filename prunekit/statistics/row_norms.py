"""Norms over the channels of each position, such as LayerNorm and RMSNorm, known by what they compute.

What a layer adds to a residual stream is read through such a norm, which divides each position by its own size. A few
channels of transformers are a thousand times as large as all others at a few positions ("massive activations", Sun et
al. 2024): an error there changes every channel that the norm returns, and errors of other channels next to nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_ROWS = 8
"""Positions that tell a norm from another function."""
MOST_ROWS = 64
"""Positions that are compared at most."""
ALIKE = 1e-3
"""Share of the variance that a norm's result may differ from what is expected: float16 and bfloat16 round."""
NO_SIZE = 1e-6
"""Share of the median size below which a position counts as one of that size: zeros stay zeros behind a norm."""


@dataclass(frozen=True, eq=False)
class RowNorm:
    """A norm that divides each position by its root mean square over channels, or by its standard deviation."""

    centered: bool  # whether the mean is subtracted first, as LayerNorm does
    gain: Tensor  # (channels,) factors of the channels behind it, float64

    def squared_sizes(self, rows: Tensor) -> Tensor:
        """Return the squares of what positions (N, channels) are divided by, (N,), float64."""
        sizes = _centered(rows.double(), self.centered).square().mean(1)
        return sizes.clamp(min=NO_SIZE**2 * float(sizes.median()) or 1.0)

    def scales(self) -> Tensor:
        """Return by how much an error of each channel counts, (channels,): 1 is usual."""
        gain = self.gain.abs()
        return gain / gain.square().mean().sqrt().clamp(min=torch.finfo(gain.dtype).tiny)


def row_norm_of(given: Tensor, result: Tensor) -> RowNorm | None:
    """Return the norm that a function is, by what it was given and returned, (N, channels) each; None if it is none.

    Each channel of the result must be a multiple of the channel that was given over its position's size, and a
    constant. Where all positions have about the same size, none is found.
    """
    if given.shape != result.shape or len(given) < LEAST_ROWS or given.shape[1] < 2:
        return None
    step = max(1, len(given) // MOST_ROWS)
    values, returned = given[::step].double(), result[::step].double()
    spread = (returned - returned.mean(0)).square().sum()
    if not 0 < float(spread) < torch.inf or _fit(values, returned)[1] <= ALIKE * spread:
        return None
    for centered in (True, False):
        rows = _centered(values, centered)
        size = rows.square().mean(1, keepdim=True).sqrt()
        gain, error = _fit(rows / size.clamp(min=torch.finfo(rows.dtype).tiny), returned)
        if error <= ALIKE * spread:
            return RowNorm(centered, gain)
    return None


def _centered(rows: Tensor, centered: bool) -> Tensor:
    """Return positions without their mean if a norm subtracts it."""
    return rows - rows.mean(1, keepdim=True) if centered else rows


def _fit(rows: Tensor, returned: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor of each channel that comes nearest to the result, with a constant, and the squared error."""
    rows, returned = rows - rows.mean(0), returned - returned.mean(0)
    square = rows.square().sum(0)
    gain = torch.where(square > 0, (rows * returned).sum(0) / square.clamp(min=torch.finfo(rows.dtype).tiny), 0.0)
    return gain, (returned - gain * rows).square().sum()
