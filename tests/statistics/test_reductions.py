"""Measuring on a CUDA device, and an argument that older callers give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prunekit.statistics.channel_stats_collector import calibrate
from prunekit.statistics.reductions import summarize


def test_compiled_kernels_are_asked_for_in_vain() -> None:
    model, images = torch.nn.Conv2d(3, 4, 3), [torch.randn(2, 3, 8, 8)]
    expected = calibrate(model, images)
    for fused in (True, False):
        with pytest.warns(FutureWarning, match="fused: activations are measured eagerly in any case"):
            found = calibrate(model, images, fused=fused)
        assert all((found[key].rows == expected[key].rows).all() for key in expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda(dtype: torch.dtype) -> None:
    for shape in [(16, 64, 28, 28), (1, 6, 5, 10), (4, 1, 6, 5), (16, 512), (3, 7, 1, 1)]:
        activation = torch.randn(shape).to(dtype)
        expected = summarize(activation, 1)
        np.testing.assert_allclose(summarize(activation.cuda(), 1), expected, rtol=1e-11, atol=1e-12)
