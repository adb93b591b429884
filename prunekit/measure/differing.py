"""How far apart two outputs of a model are."""

from __future__ import annotations

from math import inf
from typing import Any

import torch

from prunekit.channels.storages import plain_in
from prunekit.errors import UsageError


def largest_difference(want: Any, got: Any) -> tuple[float, str]:
    """The largest relative difference of any tensor, infinite where two cannot be compared, and what it says."""
    references, values = ([tensor.detach() for tensor in plain_in(output)] for output in (want, got))
    if not references:
        raise UsageError(f"no tensor in the model's output ({type(want).__name__}): there is nothing to compare")
    if len(references) != len(values):
        return inf, f"{len(values)} tensors in the output, expected {len(references)}"
    return max(apart(reference, value) for reference, value in zip(references, values, strict=True))


def apart(want: torch.Tensor, got: torch.Tensor) -> tuple[float, str]:
    """`largest_difference` of two tensors, of the same dtype."""
    if want.shape != got.shape:
        return inf, f"output of shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if want.is_complex() and got.is_complex():
        want, got = torch.view_as_real(want.resolve_conj()), torch.view_as_real(got.resolve_conj())
    if not want.is_floating_point():
        return (0.0, "") if torch.equal(want, got) else (inf, "whole or boolean numbers in the output differ")
    if want.isnan().any() or got.isnan().any():
        return inf, "NaN in the output"
    finite = want.isfinite()
    if not torch.equal(want[~finite], got[~finite]):
        return inf, "Inf in one output only"
    if not finite.any():
        return 0.0, ""
    want, got = want[finite], got[finite]
    found = float((want - got).abs().max()) / max(float(want.abs().max()), torch.finfo(want.dtype).tiny)
    return found, f"outputs differ by {found:.3g} of the largest"
