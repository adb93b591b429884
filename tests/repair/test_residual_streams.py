"""The repair of networks with a residual stream: layers that read one tensor, and positions of very unequal size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import prunekit as pk
from prunekit.planning.plan import Plan
from prunekit.repair import repair_model
from prunekit.repair.held_out_images import Batch
from prunekit.repair.layer_samples import LayerPass, SampleRequest
from prunekit.repair.least_squares import FitProblem
from prunekit.repair.repair_model import repair


class Block(nn.Module):
    """Attention without heads and a gated layer, each behind a norm and added to the stream."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.one, self.two = nn.RMSNorm(width), nn.RMSNorm(width)
        self.queries, self.keys, self.values = (nn.Linear(width, 8, bias=False) for _ in range(3))
        self.out = nn.Linear(8, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 12, bias=False) for _ in range(2))
        self.down = nn.Linear(12, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        read = self.one(x)
        scores = (self.queries(read) @ self.keys(read).transpose(1, 2)).softmax(-1)
        x = x + self.out(scores @ self.values(read))
        read = self.two(x)
        return x + self.down(nn.functional.silu(self.gate(read)) * self.up(read))  # type: ignore[no-any-return]


class Stream(nn.Module):
    """Two blocks, and a layer behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.RMSNorm(6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def case() -> tuple[Stream, Tensor, Plan]:
    torch.manual_seed(0)
    model = Stream().double().eval()
    x = torch.randn(64, 7, 6).double() @ torch.diag(torch.tensor([3.0, 2, 1, 1, 0.5, 0.1]).double())
    return model, x, pk.plan(model, x[:2], macs=0.7, ignore=["head"])


def test_layers_that_read_one_tensor_are_sampled_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, plan = case()
    passes: list[int] = []
    found = repair_model.fitted_together

    def counted(*args: object) -> list[slice]:
        parts = found(*args)  # type: ignore[arg-type]
        passes.append(len(parts))
        return parts

    monkeypatch.setattr(repair_model, "fitted_together", counted)
    together, report = repair(model, plan, x)
    monkeypatch.setattr(
        repair_model, "fitted_together", lambda layers, *_: [slice(i, i + 1) for i in range(len(layers))]
    )
    apart, alone = repair(model, plan, x)
    assert passes == [9]  # of 15 layers: the three that read the stream for attention count once, and the two gated
    assert [layer.applied for layer in report.layers] == [layer.applied for layer in alone.layers]
    for one, other in zip(together.parameters(), apart.parameters(), strict=True):
        assert torch.equal(one, other)


def test_layers_that_read_one_tensor_are_sampled_before_any_of_them_is_computed() -> None:
    model, x, _ = case()
    run, batch = LayerPass(model), Batch(0, (x,), 1.0)
    layers = {layer.weight: layer for layer in run.survey(batch).layers}
    gate, up = (layers[f"blocks.0.{name}.weight"] for name in ("gate", "up"))
    requests = [SampleRequest(layer, len(x) * 7, torch.arange(6), first=gate) for layer in (gate, up)]
    run.take(requests, batch, None, 0, gate.call)
    one, other = (taken.tensors["inputs"] for taken in run.taken)
    assert one.shape == (len(x) * 7, 6)
    assert torch.equal(one, other)


def test_positions_count_by_what_the_norm_behind_divides_them_by(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, plan = case()
    first = model.blocks[0]
    assert isinstance(first, Block)
    x[:, 0, 5] += 20  # the first position of each sample is one at which a neuron writes massive activations
    kept = int(plan.kept("blocks.0.gate.weight", 0)[0])
    with torch.no_grad():
        first.gate.weight[kept] = first.up.weight[kept] = torch.tensor([0.0, 0, 0, 0, 0, 20.0]).double()
        first.down.weight[:, kept] *= 20
    weighted = repair(model, plan, x)[1]
    monkeypatch.setattr(FitProblem, "weighted", lambda self, factors: self)
    plain = repair(model, plan, x)[1]
    assert weighted.after < 0.9 * plain.after
