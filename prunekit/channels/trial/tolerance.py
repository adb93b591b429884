"""Tolerance: the relative difference of two tensors, and how much of it rounding explains."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from prunekit.utils.tensors import AT_ONCE, in_parts

TOLERANCE = 1e-9
"""Largest difference over the largest reference value that float64 rounding explains."""

ROUNDING = {torch.float64: TOLERANCE, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The same by the precision of the computation, for models that do not run in float64."""

FILLER = 1e6
"""Larger values count as fillers, such as those that mask attention, and not for the scale of the run."""

CANCELED = 1e-4
"""Below this share of the largest value in the run, a sum may be rounding alone."""

NOT_FINITE = "NaN or Inf where the other model has none"
"""The difference where a masked model divides by zero."""


def largest_value(tensor: torch.Tensor) -> float:
    """Return the largest absolute value, ten times faster than the infinity norm does."""
    low, high = torch.aminmax(tensor)
    return abs(max(-float(low), float(high))) if low == low else float("nan")  # not -0.0


def largest_gap(want: torch.Tensor, got: torch.Tensor) -> float:
    """Return the largest absolute difference, NaN if there is one; of wide outputs some rows at a time."""
    if want.numel() <= AT_ONCE or not want.dim():
        return largest_value(want - got)
    gaps = [largest_value(a - b) for a, b in zip(in_parts(want), in_parts(got), strict=True)]
    return max(gaps) if all(gap == gap for gap in gaps) else float("nan")


def relative_difference(want: torch.Tensor | None, got: torch.Tensor, peak: float) -> tuple[float, str, float]:
    """Return the relative difference, its description, and the largest value so far in the run.

    Values that cancel to less than `CANCELED` of that largest value are rounding, and are measured against it.
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
    largest = largest_value(want)
    peak = max(peak, largest) if largest < FILLER else peak
    scale = max(largest, CANCELED * peak, torch.finfo(want.dtype).tiny)
    difference = largest_gap(want, got) / scale
    if difference != difference or largest == float("inf"):
        finite = want.isfinite()
        if finite.all() or not torch.equal(want[~finite].nan_to_num(), got[~finite].nan_to_num()):
            return float("inf"), NOT_FINITE, peak
        return relative_difference(want[finite], got[finite], peak)
    return difference, f"values differ by {difference:.3g} of the largest", peak


def rounding(tensors: Iterable[torch.Tensor]) -> float:
    """Return the relative difference that rounding explains in the tensor of lowest precision."""
    dtypes = {tensor.dtype.to_real() for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}
    return max((ROUNDING.get(dtype, ROUNDING[torch.bfloat16]) for dtype in dtypes), default=0.0)
