"""How far two tensors are apart, measured against what is large in the run that they come from.

Where rounding or chance decides: equal scores come in any order, and both models go on with the order of one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

TOLERANCE = 1e-9
"""Largest difference over the largest reference value that float64 rounding explains."""

ROUNDING = {torch.float64: TOLERANCE, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The same by the precision that something was computed in, for models that do not run in float64."""

FILLER = 1e6
"""Larger values are taken for fillers, such as those that mask attention, and say nothing of the run's scale."""

CANCELED = 1e-4
"""Below this share of the largest value in the run, what is left of a sum may be rounding alone."""


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value; one vectorized pass, ten times faster than the infinity norm."""
    low, high = torch.aminmax(tensor)
    return max(-float(low), float(high)) if low == low else float("nan")


def relative_difference(want: torch.Tensor | None, got: torch.Tensor, peak: float) -> tuple[float, str, float]:
    """Return the relative difference, what to say of it, and the largest value met so far in the run.

    Values that cancel to less than `CANCELED` of that largest are rounding, and are measured against it.
    """
    if want is None:
        return 0.0, "", peak
    if want.shape != got.shape:
        return float("inf"), f"shape {tuple(got.shape)}, expected {tuple(want.shape)}", peak
    if not want.numel() or want.is_meta:
        return 0.0, "", peak
    if want.is_complex() and got.is_complex():
        want, got = torch.view_as_real(want.resolve_conj()), torch.view_as_real(got.resolve_conj())
    if not want.is_floating_point():
        same = torch.equal(want, got)
        return (0.0, "", peak) if same else (float("inf"), "integer or boolean values differ", peak)
    largest = _largest(want)
    peak = max(peak, largest) if largest < FILLER else peak
    scale = max(largest, CANCELED * peak, torch.finfo(want.dtype).tiny)
    difference = _largest(want - got) / scale
    if difference != difference or largest == float("inf"):
        finite = want.isfinite()
        if finite.all() or not torch.equal(want[~finite].nan_to_num(), got[~finite].nan_to_num()):
            return float("inf"), "NaN or Inf where the other model has none", peak
        return relative_difference(want[finite], got[finite], peak)
    return difference, f"values differ by {difference:.3g} of the largest", peak


def rounding(tensors: Iterable[torch.Tensor]) -> float:
    """Return the largest relative difference that rounding explains in any of some tensors: that of the coarsest."""
    dtypes = {tensor.dtype.to_real() for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}
    return max((ROUNDING.get(dtype, ROUNDING[torch.bfloat16]) for dtype in dtypes), default=0.0)
