"""Zeros of single weights: who uses them, and when they are a cause of lost time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import prunekit
from prunekit.compaction.zero_patterns import (
    ModelZeros,
    ZeroPattern,
    exported_zeros_notes,
    unused_zeros_notes,
    users,
    zero_patterns,
)
from prunekit.jobs.analyses.explain import CauseSearch, find_causes
from prunekit.measure.causes import experiments
from prunekit.measure.causes.breakdown import break_down
from prunekit.measure.causes.overhead_causes import unused_zeros
from prunekit.measure.latency.timing import Estimate, PairedTiming


def net(kept: float = 0.2) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    for layer in (model[0], model[2]):
        layer.weight.data *= torch.rand_like(layer.weight) < kept
    return model.eval()


def halves() -> ModelZeros:
    model = nn.Linear(16, 16)
    order = torch.rand(16, 4, 4, generator=torch.Generator().manual_seed(0)).argsort(2)
    model.weight.data = torch.where((order >= 2).flatten(1), torch.ones(16, 16), 0)
    return zero_patterns(model)


def paired(filled: float, now: float) -> PairedTiming:
    gain = filled / now
    return PairedTiming(filled, now, Estimate(gain, gain * 0.99, gain * 1.01))


def test_zeros_that_save_nothing_are_a_cause_of_the_time_that_they_take() -> None:
    zeros = zero_patterns(net())
    shares = {name.removesuffix(".weight"): one.single_share for name, one in zeros.layers.items()}
    found = unused_zeros(zeros, {"0": 4.0, "2": 1.0, "1": 3.0}, paired(10, 10))
    assert found is not None
    assert found.ms == pytest.approx(4 * shares["0"] + shares["2"])
    assert found.modules == ("0", "2")
    assert "with random numbers in their place the model runs in 10 ms, with the zeros in 10 ms" in found.evidence
    assert "unstructured in 2 of 2 layers" in found.evidence
    assert found.fix == users(zeros)


def test_zeros_that_are_few_or_used_are_no_cause() -> None:
    assert unused_zeros(zero_patterns(net()), {"0": 4.0}, paired(10, 5)) is None
    assert unused_zeros(zero_patterns(net(0.9)), {"0": 4.0}, paired(10, 10)) is None


def test_who_uses_zeros_depends_on_their_pattern() -> None:
    assert "prunekit.semi_structured(model, example)" in users(halves())
    assert users(zero_patterns(net())).startswith("nothing computes less for unstructured zeros")
    assert "to_sparse_csr" not in users(zero_patterns(net()))
    assert "to_sparse_csr" in users(ModelZeros({"weight": ZeroPattern(99, 100, 0, {4: 4}, {})}))


def test_a_benchmark_has_a_note_where_a_runtime_uses_none() -> None:
    sparse = zero_patterns(net())
    [note] = unused_zeros_notes({"dense": zero_patterns(net(1.0)), "sparse": sparse}, ("eager", "onnxruntime"))
    assert note.startswith(f"sparse: {sparse}, and eager, onnxruntime multiply by them as by any other number; ")
    assert unused_zeros_notes({"half": halves()}, ("tensorrt",)) == []
    [note] = unused_zeros_notes({"half": halves()}, ("tensorrt", "eager"))
    assert "and eager multiplies by them" in note


def test_an_export_has_a_note_too() -> None:
    [note] = exported_zeros_notes(zero_patterns(net()), "onnx")
    assert note.startswith(f"{zero_patterns(net())}, and the file computes them; nothing computes less for")
    assert exported_zeros_notes(zero_patterns(net(1.0)), "onnx") == []
    assert exported_zeros_notes(halves(), "tensorrt") == []


def test_a_copy_has_numbers_in_place_of_zeros() -> None:
    model = net()
    filled = experiments.filled_zeros(model)
    for one, other in zip(model.parameters(), filled.parameters(), strict=True):
        kept = one != 0
        assert torch.equal(one[kept], other[kept])
        assert (other != 0).all()
    assert zero_patterns(filled).share == 0


@pytest.mark.slow
def test_planted_zeros_are_explained_but_not_those_of_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    same = paired(1, 1)
    monkeypatch.setattr(experiments, "with_filled_zeros", lambda model, inputs, device: same)
    model, x, cpu = net(), (torch.randn(4, 32),), torch.device("cpu")
    with torch.no_grad():
        found = break_down(model, model, x, batch=4, rounds=5, device=cpu)
        causes = find_causes(CauseSearch(model, model, x, 4, cpu, found), lambda message: None)
    assert [cause.modules for cause in causes if cause.name == "zeros that are computed"] in (
        [("0", "2")],
        [("2", "0")],
    )
    plan = prunekit.plan(model, x, channels=0.5)
    with prunekit.masked(model, plan), torch.no_grad():
        found = break_down(model, model, x, batch=4, rounds=5, device=cpu)
        causes = find_causes(CauseSearch(model, model, x, 4, cpu, found), lambda message: None)
    assert "zeros that are computed" not in [cause.name for cause in causes]
