"""Layers that read channels through a weight, found by what runs and not by their classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models

from prunekit.hooks.hook import count_hooks
from prunekit.statistics.channel_stats_collector import StatsCollector, calibrate
from prunekit.statistics.observers import Consumer, ConsumerHooks, watch


def find_consumers(model: nn.Module, inputs: Any) -> dict[str, Consumer]:
    """Return the layers that read channels through a weight, by their path, in the order in which they first run."""
    finder = ConsumerHooks(model)
    watch(model, [(inputs,)], finder)
    return finder.consumers


class Conv1D(nn.Module):
    """As in transformers: the weight lies transposed."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Standardized(nn.Conv2d):
    """Weight standardization as timm writes it."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Written(nn.Module):
    """A product with a parameter, by `@`, and one with its transpose, which nobody reads where it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.square = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.mix) @ self.square.T @ self.square.transpose(0, 1)


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (nn.Conv2d(4, 6, 3, groups=2), (1, 4, 5, 5), Consumer("weight", 4, 2)),
        (nn.Conv1d(4, 6, 3), (1, 4, 5), Consumer("weight", 4)),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), (1, 4, 5, 5), Consumer("weight", 4, 2, 0)),
        (nn.Linear(4, 6), (2, 3, 4), Consumer("weight", 4)),
        (Conv1D(6, 4), (2, 3, 4), Consumer("weight", 4, 1, 0)),
        (Standardized(4, 6, 3), (1, 4, 5, 5), Consumer("weight", 4)),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), (2, 4),
         Consumer("parametrizations.weight.original1", 4)),
        (Written(), (2, 5), Consumer("mix", 5, 1, 0)),
    ],
)  # fmt: skip
def test_every_way_to_multiply_with_a_weight(module: nn.Module, shape: tuple[int, ...], expected: Consumer) -> None:
    (found,) = find_consumers(module, torch.randn(shape)).values()
    assert found == expected
    weight = module.get_parameter(found.weight)
    columns = found.columns(weight)
    assert (len(columns), columns.numel()) == (found.channels, weight.numel())


def test_a_transposed_weight_is_read_as_a_plain_one() -> None:
    torch.manual_seed(0)
    there, plain = Conv1D(6, 4), nn.Linear(4, 6)
    with torch.no_grad():
        plain.weight.copy_(there.weight.T)
    (one,), (other,) = (find_consumers(module, torch.randn(3, 4)).values() for module in (there, plain))
    torch.testing.assert_close(one.columns(there.weight), other.columns(plain.weight))


@pytest.mark.slow
def test_the_same_layers_as_the_modules_of_models_that_call_them() -> None:
    for name in ("resnet18", "mobilenet_v3_small", "convnext_tiny"):
        model = getattr(models, name)(weights=None).eval()
        found = find_consumers(model, torch.randn(1, 3, 64, 64))
        called = {path: module for path, module in model.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))}
        assert set(found) == set(called)
        for path, module in called.items():
            assert (found[path].channels, found[path].groups) == (
                (module.in_channels, module.groups) if isinstance(module, nn.Conv2d) else (module.in_features, 1)
            )


def attention() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(12, 3, 20, batch_first=True).eval()


def test_attention_is_seen_inside_and_is_afterwards_what_it_was() -> None:
    model, x = attention(), torch.randn(2, 5, 12)
    before = [(type(module), dict(vars(module))) for module in model.modules()]
    with torch.no_grad():
        expected = model(x)
        with StatsCollector(model):
            torch.testing.assert_close(model(x), expected)
    assert list(find_consumers(model, x)) == ["self_attn.in_proj_weight", "self_attn.out_proj", "linear1", "linear2"]
    assert [(type(module), vars(module)) for module in model.modules()] == before
    assert count_hooks(model) == 0


@pytest.mark.slow
def test_statistics_of_layers_whose_modules_are_not_called() -> None:
    model, x = attention(), torch.randn(2, 5, 12)
    stats = calibrate(model, [x])
    with torch.no_grad():
        made = F.linear(x, model.self_attn.in_proj_weight, model.self_attn.in_proj_bias).flatten(0, 1)
    found = stats["self_attn.in_proj_weight", "output", 0]
    np.testing.assert_allclose(found.mean, made.double().mean(0).numpy(), rtol=1e-5, atol=1e-6)
    assert stats["self_attn.out_proj", "input", 0].channels == 12
    assert [key for key in stats if key.module == "linear1"] == [("linear1", "input", 0), ("linear1", "output", 0)]
    only = calibrate(model, [x], modules=["self_attn.out_proj"], outputs=False)
    assert list(only) == [("self_attn.out_proj", "input", 0)]
    swin = models.swin_t(weights=None).eval()
    stats = calibrate(swin, [torch.randn(1, 3, 32, 32)])
    assert stats["features.1.0.attn.qkv", "output", 0].channels == 288


def test_watches_nest_and_leave_nothing_on_an_error() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 2:
                raise RuntimeError("too many")
            return self.layer(x)  # type: ignore[no-any-return]

    class Watch(ConsumerHooks):
        def start_pass(self) -> None: ...

        def finish_pass(self) -> None: ...

    model = Fails()
    outer, inner = Watch(model), Watch(model)
    with outer, inner:
        with pytest.raises(RuntimeError, match="too many"):
            model(torch.randn(3, 3))
        assert torch._C._len_torch_function_stack() == 0
        model(torch.randn(2, 3))
    assert outer.consumers == inner.consumers == {"layer": Consumer("layer.weight", 3)}
    assert torch._C._len_torch_function_stack() == 0
