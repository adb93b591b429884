"""Operators of a forward pass: which, where, what they multiply and move; and layers run again on their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from prunekit.backends.session import OperatorTimer
from prunekit.hooks.hook import count_hooks
from prunekit.measure.causes.breakdown import IsolatedLayer, record_calls
from prunekit.measure.model_size import count_macs, subnormals

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2)
        self.depth = nn.Conv2d(6, 6, 3, groups=6, bias=False)
        self.up = nn.ConvTranspose2d(6, 4, 2)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.depth(self.stem(x).relu_()))
        return self.head(x.mean((2, 3))).t().contiguous()  # type: ignore[no-any-return]


MODELS = {
    "convolutions": (Net(), (2, 3, 9, 9)),
    "encoder": (nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), (2, 5, 16)),
    "attention": (nn.MultiheadAttention(16, 4, batch_first=True), None),
}


@pytest.mark.parametrize("name", MODELS)
def test_macs_of_operators_add_up_to_those_of_the_model(name: str) -> None:
    model, shape = MODELS[name]
    x = torch.randn(*(shape or (2, 5, 16)))
    inputs = (x,) if shape else (x, x, x)
    model.eval()
    calls = record_calls(model, inputs)
    assert sum(call.macs or 0 for call in calls.values()) == len(x) * count_macs(model, inputs) > 0
    assert all(call.macs is not None for call in calls.values())
    assert count_hooks(model) == 0


def test_operators_have_their_modules_calls_and_bytes() -> None:
    calls = record_calls(Net().eval(), (torch.randn(2, 3, 9, 9),))
    stem = calls["stem", "convolution"]
    assert stem.calls == 1
    assert stem.bytes == 4 * (2 * 3 * 81 + 6 * 3 * 9 + 6 + 2 * 6 * 16)
    assert calls["", "relu_"].bytes == 2 * 4 * 2 * 6 * 16
    assert calls["head", "addmm"].macs == 2 * 4 * 5
    assert (calls["", "t"].calls, calls["", "t"].bytes) == (0, 0)
    assert calls["", "clone"].calls == 1


def test_an_expanded_axis_is_moved_once() -> None:
    class Add(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.ones(1, 8).expand(4, 8)

    assert record_calls(Add(), (torch.ones(4, 8),))["", "add"].bytes == 4 * (32 + 8 + 32)


def test_a_timer_times_the_same_operators() -> None:
    model, x = Net().eval(), torch.randn(1, 3, 9, 9)
    timer = OperatorTimer(model, (x,), CPU)
    with torch.no_grad():
        total = timer()
        timer()
    assert [set(times) for times in timer.passes] == [set(record_calls(model, (x,)))] * 2
    assert total == pytest.approx(sum(timer.passes[0].values()))
    assert all(ms > 0 for ms in timer.passes[0].values())
    assert count_hooks(model) == 0


def test_subnormal_numbers_are_counted_where_they_are_made() -> None:
    assert subnormals([torch.tensor([0.0, 1e-40, -1e-39, 1e-30]), torch.tensor([1, 2])]) == 2
    assert subnormals(torch.tensor([1e-40], dtype=torch.float64)) == 0
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU())
    nn.init.constant_(model[0].weight, 1e-40)
    calls = record_calls(model, (torch.ones(2, 4),))
    assert {key: call.subnormal for key, call in calls.items() if call.subnormal} == {("0", "mm"): 6, ("1", "relu"): 6}


def layer_of(model: nn.Module, *shape: int) -> IsolatedLayer | None:
    calls = record_calls(nn.Sequential(model), (torch.randn(*shape),))
    return next(call.layer for call in calls.values() if call.macs)


@pytest.mark.parametrize(
    ("model", "shape", "other", "expected"),
    [
        (nn.Conv2d(6, 10, 3, padding=1), (2, 6, 5, 5), (8, 16), (2, 16, 5, 5)),
        (nn.Conv2d(6, 6, 3, groups=6), (2, 6, 5, 5), (8, 8), (2, 8, 3, 3)),
        (nn.Conv1d(6, 10, 3, stride=2), (2, 6, 9), (4, 8), (2, 8, 4)),
        (nn.Linear(6, 10), (7, 6), (8, 16), (7, 16)),
        (nn.Linear(6, 10, bias=False), (7, 6), (8, 16), (7, 16)),
    ],
)
def test_a_layer_runs_again_at_other_widths(
    model: nn.Module, shape: tuple[int, ...], other: tuple[int, int], expected: tuple[int, ...]
) -> None:
    layer = layer_of(model, *shape)
    assert layer is not None
    assert layer.widths == (6, model(torch.randn(shape)).shape[1])
    with torch.no_grad():
        now, then = layer.build(layer.widths)(), layer.build(other)()
        assert isinstance(now, Tensor)
        assert isinstance(then, Tensor)
        assert now.shape == model(torch.randn(shape)).shape
        assert then.shape == expected


def test_layers_whose_widths_hang_together_otherwise_are_left_alone() -> None:
    assert layer_of(nn.Conv2d(6, 12, 3, groups=2), 1, 6, 5, 5) is None
    assert layer_of(nn.ConvTranspose2d(6, 12, 3), 1, 6, 5, 5) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_operators_are_timed_by_events() -> None:
    model, device = Net().eval().cuda(), torch.device("cuda", 0)
    timer = OperatorTimer(model, (torch.randn(2, 3, 9, 9, device=device),), device)
    with torch.no_grad():
        timer()
        assert timer() > 0
    assert all(0 <= ms < 25 for ms in timer.passes[1].values())
