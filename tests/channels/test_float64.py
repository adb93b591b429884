"""Modules that are converted to float64 while they run, also those that use tensors of each other."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from equivalence import doubled as in_float64
from torch import nn
from torch.nn import functional as F

import prunekit
from prunekit.channels.float64 import Float64WhileRunning, float64_inputs, to_double
from prunekit.channels.trial.comparison import Comparison


class Borrows(nn.Module):
    """Uses its layer's weight around the call of the layer itself, as window attention does without it."""

    def __init__(self, *, calls: bool) -> None:
        super().__init__()
        self.qkv, self.bias, self.calls = nn.Linear(6, 6), nn.Parameter(torch.randn(6)), calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.qkv.weight, self.bias)
        x = self.qkv(x).relu() if self.calls else x
        return x @ self.qkv.weight


def net(*, calls: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), Borrows(calls=calls), nn.ReLU(), nn.Linear(6, 3)).eval()


EXAMPLE = (torch.randn(2, 4, generator=torch.Generator().manual_seed(0)),)


def run(model: nn.Module, borrowed: Iterable[tuple[str, str]]) -> torch.Tensor:
    with Float64WhileRunning(model, to_double, borrowed=borrowed) as running, torch.no_grad():
        out: torch.Tensor = running.model(*float64_inputs(EXAMPLE))
        return out


@pytest.mark.parametrize("calls", [False, True])
def test_a_trace_says_whose_tensors_a_module_uses_and_these_are_converted_with_it(calls: bool) -> None:
    model = net(calls=calls)
    (found,) = prunekit.trace(model, EXAMPLE).traced.trace.runs
    assert found.borrowed == {("1", "1.qkv")}
    with torch.no_grad():
        want = net(calls=calls).double()(*in_float64(EXAMPLE))
    assert torch.equal(run(model, found.borrowed), want)
    with pytest.raises(RuntimeError, match="dtype"):
        run(model, ())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("calls", [False, True])
def test_no_copies_are_needed_for_models_that_use_the_weights_of_other_modules(
    calls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Comparison, "with_copies", lambda *_: pytest.fail("a trial with copies of the models"))
    pruned = prunekit.prune(net(calls=calls), EXAMPLE, channels=0.5)
    assert pruned.max_relative_difference <= 1e-12
    assert pruned.model.get_submodule("0").out_features == 3
