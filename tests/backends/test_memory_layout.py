"""Moving weights: addresses change, nothing else does."""

from __future__ import annotations

import copy

import pytest
import torch
from efforts import HERE
from torch import nn

from prunekit.backends.backend import RUNTIMES
from prunekit.backends.eager import WeightMover, weight_movers
from prunekit.backends.session import Setting, Source
from prunekit.measure.latency.comparison import measure_latency
from prunekit.measure.latency.timing import alternate
from prunekit.measure.measurement_effort import effort_of
from prunekit.settings.deployment import LatencySettings


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(8)
        self.head, self.tied = nn.Linear(8, 4), nn.Linear(8, 4)
        self.tied.weight = self.head.weight
        self.register_buffer("wide", torch.ones(1, 4).expand(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.norm(self.conv(x)).mean((2, 3))
        return self.head(pooled) + self.tied(pooled)  # type: ignore[no-any-return]


X = torch.randn(2, 3, 8, 8)


def addresses(module: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in module.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize("inference", [False, True])
def test_all_lies_elsewhere_and_computes_the_same(inference: bool) -> None:
    with torch.inference_mode(inference):
        net = copy.deepcopy(Net()).eval()
        expected, before, strides = net(X), addresses(net), net.conv.weight.stride()
        move = WeightMover(net)
        seen, gaps = [before], set()
        for _ in range(5):
            move()
            seen.append(addresses(net))
            gaps.add(move.gap.numel())
            assert torch.equal(net(X), expected)
    moved = {name for name in before if before[name] != seen[1][name]}
    assert moved == set(before) - {"wide"}  # an expanded tensor has no memory for itself
    assert net.conv.weight.stride() == strides
    assert net.tied.weight is net.head.weight
    assert len(gaps) == 5  # not to and fro between two places; where it lies then is up to the allocator


def test_models_of_the_caller_are_back_in_their_place_in_the_end() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before, held = addresses(net), net.state_dict()
    with weight_movers(net, net) as moves:
        for move in moves:
            move()
        assert addresses(net) != before
    assert addresses(net) == before
    net(X).sum().backward()
    optimizer.step()
    assert torch.equal(held["conv.weight"], net.conv.weight)  # still the same memory
    assert net.conv.weight.requires_grad


def test_models_are_moved_before_every_other_round() -> None:
    said: list[str] = []

    def run() -> float:
        said.append("run")
        return 1.0

    alternate([run], 5, [lambda: said.append("move"), lambda: said.append("warm")])
    assert " ".join(said) == "move warm run run move warm run run move warm run"


@pytest.mark.slow
@pytest.mark.parametrize(("runtime", "moves"), [("eager", True), ("onnxruntime", False)])
def test_runtimes_that_lay_weights_out_themselves_are_left_alone(runtime: str, moves: bool) -> None:
    calls: list[None] = []
    before = WeightMover.__call__
    with effort_of(HERE), pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightMover, "__call__", lambda self: (calls.append(None), before(self)))
        settings = LatencySettings(runtimes=(runtime,), batches=(2,), repeats=6)  # type: ignore[arg-type]
        report = measure_latency({"dense": Net(), "pruned": Net()}, (3, 8, 8), settings, [torch.device("cpu")])
    assert not report.failures
    assert len(calls) == (2 * 3 if moves else 0)
    if moves:
        setting = Setting(runtime, "cpu", 2, 1)
        assert RUNTIMES.get(runtime).session(Source(Net()), (X,), setting).move is not None
