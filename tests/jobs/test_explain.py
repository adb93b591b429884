"""`prunekit.explain` on models with a planted cause; what it measures is not compared."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import prunekit
from prunekit.errors import ModelError, UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.jobs.analyses.explain import CauseSearch, find_causes
from prunekit.measure.causes.breakdown import break_down
from prunekit.measure.latency.timing import Contention
from prunekit.measure.model_size import count_macs

X = (torch.randn(2, 3, 12, 12),)
HALF = prunekit.PruneSettings(prunekit.BudgetSettings(channels=0.5))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 4))


@pytest.mark.slow
def test_an_explanation_of_a_compact_model() -> None:
    dense = net()
    small = prunekit.compact(dense, prunekit.plan(dense, X, settings=HALF))
    small.train()
    said: list[str] = []
    found = prunekit.explain(dense, small, X, threads=1, rounds=5, log=said.append)
    assert small.training
    assert count_hooks(small) == count_hooks(dense) == 0
    assert (found.device, found.batch, found.threads) == ("cpu", 2, 1)
    assert found.macs_ratio == count_macs(dense, X) / count_macs(small, X) > 1
    assert found.shortfall_ms == pytest.approx(found.pruned_ms - found.dense_ms / found.macs_ratio)
    assert {row.module for row in found.operators if row.operator == "convolution"} == {"0", "3"}
    for row in found.operators:
        assert row.dense is not None
        assert row.pruned is not None
    convolution = next(row for row in found.operators if row.module == "3" and row.operator == "convolution")
    assert (convolution.dense.macs, convolution.pruned.macs) == (64 * 16 * 8 * 9, 64 * 8 * 4 * 9)  # type: ignore[union-attr]
    inside = sum(row.pruned.ms for row in found.operators if row.pruned is not None)
    assert found.pruned_operators_ms == pytest.approx(inside)
    assert sum(row.share for row in found.operators) <= 1 + 1e-9
    assert [cause.ms for cause in found.causes] == sorted((cause.ms for cause in found.causes), reverse=True)
    assert not any("masks" in cause.name for cause in found.causes)
    assert any("rounded widths" in line for line in said)
    assert found.figures()["rows"][0]["operator"]


@pytest.mark.slow
def test_a_masked_model_is_told_to_be_compacted() -> None:
    dense, model = net(), net()
    plan = prunekit.plan(model, X, settings=HALF)
    with prunekit.masked(model, plan):
        hooks = count_hooks(model)
        found = prunekit.explain(dense, model, X, threads=1, rounds=5)
        assert count_hooks(model) == hooks
    assert found.macs_ratio == 1
    masks = next(cause for cause in found.causes if cause.name == "masks still attached")
    assert "prunekit.compact" in masks.fix
    assert set(masks.modules) == {"0", "3"}
    assert "12 of 24 output channels hold nothing but zeros" in masks.evidence


@pytest.mark.slow
def test_planted_subnormal_numbers_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    from prunekit.measure.causes import experiments, overhead_causes

    counted: list[tuple[dict[str, int], dict[str, int]]] = []
    monkeypatch.setattr(experiments, "with_flushing", lambda model, inputs: None)
    monkeypatch.setattr(
        overhead_causes, "subnormal_numbers", lambda weights, made, effect: counted.append((weights, made))
    )
    model = net().eval()
    with torch.no_grad():
        model[3].weight[0] = 1e-41
        model[3].bias.zero_()  # type: ignore[union-attr]
        found = break_down(model, model, X, batch=2, rounds=5, device=torch.device("cpu"))
        find_causes(CauseSearch(model, model, X, 2, torch.device("cpu"), found), lambda message: None)
    [(weights, made)] = counted
    assert weights == {"3": 72}
    assert set(made) == {"3", "4"}  # the first channel of the convolution, and its mean


def test_threads_that_wait_for_cores_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    from prunekit.measure.causes import overhead_causes, width_causes

    cause = width_causes.Cause("threads oversubscribed", 1.0, "", "")
    monkeypatch.setattr(overhead_causes, "too_many_threads", lambda *figures: cause)
    monkeypatch.setattr(Contention, "oversubscribed", property(lambda self: True))
    tiny = nn.Linear(3, 3)  # no work that threads would share: they need not wait for cores here
    found = prunekit.explain(tiny, tiny, (torch.ones(1, 3),), threads=2, rounds=5)
    assert found.causes == (cause,)
    assert found.doubts[0].startswith("threads oversubscribed, which voids a measurement")
    assert torch.get_num_threads() == 1
    unstable = "unstable, so that nothing is said about what is faster, or why: threads oversubscribed"
    assert " ".join(str(found).split()).startswith(f"on cpu, batch 1, 2 threads: {unstable}")
    assert not re.search(r"×|ideal|Causes", str(found))


class OneBatch(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(2, -1)


@pytest.mark.slow
def test_a_model_that_takes_one_batch_only_is_explained_without_a_larger_one() -> None:
    found = prunekit.explain(OneBatch(8, 4), OneBatch(8, 2), (torch.ones(2, 8),), threads=1, rounds=5)
    assert "batch too small" not in {cause.name for cause in found.causes}


class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, 8), nn.Linear(8, 2)

    def forward(self, words: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"scores": self.head((self.words(words) * mask[..., None]).mean(1))}


@pytest.mark.slow
def test_other_inputs_than_images() -> None:
    inputs = (torch.randint(0, 10, (3, 6)), torch.ones(3, 6))
    found = prunekit.explain(Dictionary(), Dictionary(), inputs, threads=1, rounds=5)
    assert (found.batch, found.macs_ratio) == (3, 1)
    assert {row.module for row in found.operators} == {"", "words", "head"}


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((net(), net(), X), {"rounds": 4}, UsageError, "rounds: expected at least 5, got 4"),
        ((net(), net(), (None,)), {}, UsageError, "example: expected at least one tensor of samples, got none"),
        ((net(), nn.Linear(5, 5), X), {}, ModelError, r"the pruned model does not run on float32 \(2, 3, 12, 12\)"),
        ((nn.Linear(5, 5), net(), X), {}, ModelError, "the dense model does not run"),
        ((net(), net(), X), {"device": "tpu"}, UsageError, "device: expected auto"),
    ],
)
def test_bad_input(
    arguments: tuple[object, ...], options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        prunekit.explain(*arguments, **options)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_an_explanation_on_cuda() -> None:
    model = net()
    found = prunekit.explain(model, model, X, device="cuda", rounds=5)
    assert found.device == "cuda"
    assert next(model.parameters()).device.type == "cpu"
    assert {cause.name for cause in found.causes}.isdisjoint({"subnormal numbers", "threads oversubscribed"})
