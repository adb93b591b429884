"""The memory of a forward pass, recorded without computing, against a real one that allocates and frees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from equivalence import Net, assert_unchanged, image, snapshot
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from prunekit.channels.memory_table import record_memory
from prunekit.channels.tracing.execution import without_fast_path
from prunekit.errors import ModelError


class RealMemory(TorchDispatchMode):
    """Adds up real storages while a model computes: asks before each operator which of them are still there."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in given}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = sum(self.given.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.alive = {key: (ref, size) for key, (ref, size) in self.alive.items() if not ref.expired()}
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.given:
                self.alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(self.given.values()) + sum(size for _, size in self.alive.values()))
        return out


def real_peak(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    given = [*model.parameters(), *model.buffers(), *inputs]
    with torch.no_grad(), without_fast_path(), RealMemory(given) as memory:
        model.eval()(*inputs)
    return memory.peak


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch", "dtype"),
    [
        ("resnet18", 3, "fp32"),
        ("mobilenet_v2", 1, "fp32"),
        ("densenet121", 2, "bf16"),
        ("shufflenet_v2_x0_5", 1, "fp32"),
    ],
)
def test_equal_to_the_byte_on_real_models(name: str, batch: int, dtype: str) -> None:
    model = torchvision.models.get_model(name, weights=None)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    found = record_memory(model, (torch.zeros(1, 3, 64, 64),), batch, dtype)
    assert found.peak_bytes == real_peak(model.to(kind), (torch.zeros(batch, 3, 64, 64, dtype=kind),))


def test_attention_is_counted_with_its_fused_kernel() -> None:
    model = torchvision.models.VisionTransformer(32, 4, 2, 4, 32, 64, num_classes=5)
    inputs = (torch.zeros(2, 3, 32, 32),)
    found = record_memory(model, inputs, 2)
    assert found.peak_bytes == real_peak(model, inputs)
    assert any("flash_attention" in operator.name for operator in found.operators)
    assert all(allocation.shape != (2, 4, 65, 65) for allocation in found.allocations), "scores of all pairs of tokens"


def with_a_view_that_outlives(net: Any, x: Tensor) -> Tensor:
    wide = net.wide(x)
    first = wide[:, :1]
    del wide
    return net.last(x) + first


def in_place(net: Any, x: Tensor) -> Tensor:
    x = net.wide(x).relu_().mul_(2.0)
    return net.narrow(x).add_(1.0)


def looks_at_values(net: Any, x: Tensor) -> Tensor:
    x = net.wide(x)
    return net.narrow(x[:, x.mean((0, 2, 3)) > -1e9])  # type: ignore[no-any-return]


def several_results(net: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    pooled, _ = F.max_pool2d(net.wide(x), 2, return_indices=True)
    return pooled.mean((2, 3)), {"parts": torch.cat(pooled.chunk(2, 1)[::-1], 1)}


@pytest.mark.parametrize(
    "function",
    [with_a_view_that_outlives, in_place, looks_at_values, several_results],
    ids=lambda function: function.__name__,
)
def test_pieces_live_as_long_as_anything_reads_them(function: Callable[..., Any]) -> None:
    net = Net(
        function, wide=nn.Conv2d(3, 16, 3, padding=1), narrow=nn.Conv2d(16, 3, 1), last=nn.Conv2d(3, 3, 3, padding=1)
    )
    before, training = snapshot(net), [module.training for module in net.modules()]
    inputs = image(size=16, batch=2)
    assert record_memory(net, inputs, 2).peak_bytes == real_peak(net, inputs)
    assert_unchanged(net, before)
    assert training == [True] * 4


def test_the_peak_by_hand() -> None:
    """Two linear layers and a ReLU: input, weights, and the two widest of what lies beside each other."""
    net = nn.Sequential(nn.Linear(4, 10, bias=False), nn.ReLU(), nn.Linear(10, 2, bias=False))
    found = record_memory(net, (torch.zeros(1, 4),), 8)
    assert found.given_bytes == 4 * (40 + 20 + 8 * 4)
    assert found.inputs_bytes == 4 * 8 * 4
    assert [(allocation.shape, allocation.bytes) for allocation in found.allocations] == [
        ((8, 10), 320),
        ((8, 10), 320),
        ((8, 2), 64),
    ]
    assert found.peak_bytes == found.given_bytes + 640
    assert record_memory(net, (torch.zeros(1, 4),), 8, "fp16").peak_bytes == found.peak_bytes / 2


def test_what_is_no_batch_keeps_its_size() -> None:
    class Table(nn.Module):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return x @ table

    found = record_memory(Table(), (torch.zeros(2, 3), torch.zeros(3, 5)), 7)
    assert found.inputs_bytes == 4 * (7 * 3 + 3 * 5)
    assert [allocation.shape for allocation in found.allocations] == [(7, 5)]


def test_a_tied_weight_counts_once() -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    net[1].weight = net[0].weight
    assert record_memory(net, (torch.zeros(1, 6),)).given_bytes == 4 * (36 + 6 + 6 + 6)


def test_a_model_that_does_not_run_is_named() -> None:
    with pytest.raises(ModelError, match=r"Linear: the memory .* does not run on a batch of 3 in fp32 on the CPU: R"):
        record_memory(nn.Linear(4, 2), (torch.zeros(1, 5),), 3)
