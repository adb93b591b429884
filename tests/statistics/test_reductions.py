"""Measuring on a CUDA device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prunekit.statistics.reductions import summarize


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda(dtype: torch.dtype) -> None:
    for shape in [(16, 64, 28, 28), (1, 6, 5, 10), (4, 1, 6, 5), (16, 512), (3, 7, 1, 1)]:
        activation = torch.randn(shape).to(dtype)
        expected = summarize(activation, 1)
        np.testing.assert_allclose(summarize(activation.cuda(), 1), expected, rtol=1e-11, atol=1e-12)
