"""Quantized models: refused before they are pruned, with what to do, and made of what was pruned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_language import llama
from torch import nn

import prunekit as pk
from prunekit.errors import ModelError

IDS = torch.randint(5, 45, (16, 12), generator=torch.Generator().manual_seed(0))


class Packed(nn.Module):
    """A linear layer as GPTQ and compressed-tensors have it."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(columns // 8, rows, dtype=torch.int32))
        self.register_buffer("scales", torch.ones(1, rows))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(*x.shape[:-1], self.qweight.shape[1])


class Bytes(nn.Module):
    """A linear layer as bitsandbytes has it."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows * columns // 2, 1, dtype=torch.uint8), requires_grad=False)
        self.rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(*x.shape[:-1], self.rows)


def by_torchao(model: nn.Module) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())


def by_packing(kind: type[nn.Module]) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        model.model.layers[0].mlp.down_proj = kind(32, 64)  # type: ignore[union-attr, index]

    return change


@pytest.mark.parametrize("quantize", [by_torchao, by_packing(Packed), by_packing(Bytes)])
def test_a_quantized_model_is_refused_with_what_to_do(quantize: Callable[[nn.Module], None]) -> None:
    model = llama()
    quantize(model)
    calls: list[Callable[[], Any]] = [
        lambda: pk.prune(model, IDS, params=0.8),
        lambda: pk.prune(model, calibration=IDS, params=0.8),
        lambda: pk.plan(model, IDS, params=0.8),
        lambda: pk.collect(model, IDS),
    ]
    for call in calls:
        with pytest.raises(
            ModelError, match=r"holds quantized or packed weights .* quantize the compact one afterwards"
        ):
            call()


class Indexed(nn.Module):
    """Has numbers of places beside a scale, as windows of Swin v2 do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.logit_scale = nn.Linear(8, 16), nn.Linear(16, 4), nn.Parameter(torch.ones(1))
        self.register_buffer("index", torch.arange(16, dtype=torch.int32).view(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x) * self.logit_scale)[:, self.index % 4]  # type: ignore[no-any-return]


def test_numbers_of_places_are_no_quantized_weights() -> None:
    assert pk.prune(Indexed(), torch.randn(1, 8), params=0.6).model.inner.out_features < 16


@pytest.mark.parametrize("layout", ["free", "huggingface"])
def test_what_was_pruned_is_quantized_afterwards(layout: Any, tmp_path: Path) -> None:
    result = pk.prune(llama(), IDS, params=0.8, layout=layout, outputs="logits")
    pk.save(result, tmp_path / "small")
    small = pk.load(tmp_path / "small", model=llama())
    with torch.no_grad():
        before = small(IDS).logits
        by_torchao(small)
        after = small(IDS).logits
    kinds = {type(layer.weight.data).__name__ for layer in small.modules() if isinstance(layer, nn.Linear)}
    assert "Int8Tensor" in kinds
    assert 0 < (after - before).abs().max() < 0.05 * before.abs().max()
