"""Gradients of convolutions whose stride is longer than their input, under bfloat16."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from training_models import CPU, splits

from prunekit.hooks.hook import count_hooks
from prunekit.settings.train import TrainSettings
from prunekit.training.execution import LongStrides
from prunekit.training.loop import fit


@pytest.mark.parametrize(("size", "stride", "kernel", "dtype"), [
    (1, 2, 3, torch.float32), (2, 4, 7, torch.float32), (2, 2, 3, torch.bfloat16), (8, 2, 3, torch.bfloat16),
])  # fmt: skip
def test_the_gradient_is_that_of_float32(size: int, stride: int, kernel: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(64, 64, kernel, stride, kernel // 2, bias=False)
    with LongStrides(layer), torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(5):  # the memory that it got may have been clean
            images = torch.randn(16, 64, size, size).bfloat16()
            result = layer(images)
            assert result.dtype == dtype
            assert torch.is_autocast_enabled("cpu")
            values = torch.randn(result.shape).bfloat16().to(dtype)
            (found,) = torch.autograd.grad(result, layer.weight, values)
            wanted = nn.grad.conv2d_weight(images.double(), layer.weight.shape, values.double(), stride, kernel // 2)
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=0.02 * float(wanted.abs().max()))
    assert count_hooks(layer) == 0


def test_autocast_is_as_before_when_the_convolution_raises() -> None:
    layer = nn.Conv2d(4, 4, 3, 2, 1)
    with LongStrides(layer), torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError, match="channels"):
            layer(torch.randn(1, 5, 1, 1))
        assert torch.is_autocast_enabled("cpu")


def test_training_in_bf16_down_to_one_pixel() -> None:
    torch.manual_seed(0)
    channels = [3, 16, 32, 64, 64, 64]
    layers = [nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(channels)]  # 8, 4, 2, 1, 1 pixels
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 4))
    fit(model, splits(), TrainSettings(epochs=2, lr=0.01, precision="bf16"), device=CPU, seed=1, batch=16)
    assert all(parameter.abs().max() < 10 for parameter in model.parameters())
    assert count_hooks(model) == 0
