"""Zeros among single weights: orders of removal, fits with zeros, and whole models in one shot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pattern_masks import holds
from torch import Tensor, nn

from prunekit.channels.trace import trace
from prunekit.compaction.compact_model import compact
from prunekit.planning.patterns.pattern import Pattern
from prunekit.planning.plan import Plan
from prunekit.repair.least_squares import ridged
from prunekit.repair.patterns import removal
from prunekit.repair.patterns.group_problem import column_by_column
from prunekit.repair.patterns.prune_weights import PrunedWeights, prune_weights
from prunekit.repair.patterns.removal import MaskedLeastSquares, grouped_masked_least_squares, removal_order
from prunekit.settings.calibration import RepairSettings
from prunekit.settings.weight_pattern import PatternSettings


def gram_of(columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    inputs = (torch.randn(400, columns, generator=generator, dtype=torch.float64) @ mixing).relu()
    return ridged(inputs.T @ inputs / len(inputs), 1e-3, biased=False)[0]


def cost(gram: Tensor, weight: Tensor, keep: Tensor) -> float:
    """The least error of an output with these weights kept, by the definition."""
    kept = keep.nonzero().flatten()
    fitted = torch.zeros_like(weight)
    fitted[kept] = torch.linalg.solve(gram[kept][:, kept], (gram @ weight)[kept])
    return float((fitted - weight) @ gram @ (fitted - weight))


def test_weights_go_in_the_order_of_the_error_that_is_left_one_by_one() -> None:
    gram, weight = gram_of(7), torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    order = removal_order(torch.linalg.inv(gram), weight, torch.ones(3).double(), Pattern("unstructured"), (3, 7, 1))
    for row in range(3):
        keep = torch.ones(7, dtype=torch.bool)
        for unit in order.units[row].tolist():
            trials = {
                i: cost(gram, weight[row], keep & (torch.arange(7) != i)) for i in keep.nonzero().flatten().tolist()
            }
            assert trials[unit] == pytest.approx(min(trials.values()), rel=1e-3)
            keep[unit] = False


def test_blocks_count_the_error_of_all_their_outputs() -> None:
    gram, weight = gram_of(6), torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    scale = torch.tensor([1.0, 2.0, 1.0, 0.5]).double()
    order = removal_order(torch.linalg.inv(gram), weight, scale, Pattern("block", outputs=4), (4, 6, 1))
    first = int(order.units[0, 0])
    keeps = [torch.arange(6) != i for i in range(6)]
    costs = [sum(float(scale[row] ** 2) * cost(gram, weight[row], keep) for row in range(4)) for keep in keeps]
    assert first == int(np.argmin(costs))
    assert float(order.costs[0, 0]) == pytest.approx(costs[first], rel=1e-3)


@pytest.mark.parametrize("by_column", [False, True])
def test_n_of_m_holds_with_dead_columns_too(by_column: bool) -> None:
    gram, weight = gram_of(24), torch.randn(5, 24, dtype=torch.float64)
    weight[:, :7] = 0
    pattern, shape = Pattern("2:4", kept_of=(2, 4)), (5, 8, 3)
    if by_column:
        mask, fitted = column_by_column(gram, weight, torch.ones(5).double(), pattern, shape, 0.5)
        assert torch.equal(fitted == 0, ~mask | (fitted == 0))
    else:
        order = removal_order(torch.linalg.inv(gram), weight, torch.ones(5).double(), pattern, shape)
        mask = order.scores(24).isinf()
    assert torch.equal(mask.view(5, 2, 4, 3).sum(2), torch.full((5, 2, 3), 2))


@pytest.mark.parametrize("way", ["exact", "held too large", "conjugate gradients"])
def test_a_fit_with_zeros_is_that_of_the_kept_columns(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "held too large":
        monkeypatch.setattr(removal, "HELD", 0)
    if way == "conjugate gradients":
        monkeypatch.setattr(removal, "FACTORED", 0)
    gram, right = gram_of(12), torch.randn(6, 12, dtype=torch.float64)
    keep = torch.rand(6, 12, generator=torch.Generator().manual_seed(3)) < 0.5
    keep[0], keep[1] = True, False
    found = MaskedLeastSquares(gram, keep).solve(right, torch.zeros_like(right))
    grouped = grouped_masked_least_squares(gram[None], right[None], keep[None])[0]
    for row in range(6):
        kept = keep[row].nonzero().flatten()
        wanted = torch.zeros(12, dtype=torch.float64)
        wanted[kept] = torch.linalg.solve(gram[kept][:, kept], right[row][kept])
        torch.testing.assert_close(found[row], wanted, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(grouped[row], wanted, rtol=1e-9, atol=1e-12)


def small_net(groups: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=groups), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 40, 1), nn.ReLU(),
        nn.Conv2d(40, 40, 3, padding=1, groups=40), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 32), nn.ReLU(), nn.Linear(32, 5),
    ).eval()  # fmt: skip


def pruned(
    model: nn.Module, keep_channels: bool = True, fitted: bool = True, **given: Any
) -> tuple[PrunedWeights, Tensor]:
    images = torch.randn(48, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    chart = trace(model, images[:2])
    keep = np.ones(chart.n_labels, dtype=bool)
    if not keep_channels:
        keep[[group.labels[i] for group in chart.groups for i in range(len(group.labels) // 4)]] = False
    plan = Plan(chart, chart.completed(keep))
    found = prune_weights(
        model, plan, images, PatternSettings(**given), RepairSettings(rows=512), fitted=fitted, progress=False
    )
    return found, images


CASES: list[dict[str, Any]] = [
    {"kind": "unstructured", "sparsity": 0.6},
    {"kind": "unstructured", "sparsity": 0.6, "scope": "global"},
    {"kind": "2:4"},
    {"kind": "kernel", "sparsity": 0.5},
    {"kind": "block", "sparsity": 0.5, "block": (4, 1)},
    {"kind": "2:4", "method": "sparsegpt"},
    {"kind": "unstructured", "sparsity": 0.6, "method": "wanda", "scope": "uniform"},
]


@pytest.mark.slow
@pytest.mark.parametrize("given", CASES, ids=lambda given: "-".join(map(str, given.values())))
def test_zeros_are_exact_have_the_pattern_and_the_fit_comes_nearer(given: dict[str, Any]) -> None:
    found, images = pruned(small_net(), **given)
    pattern, parameters = Pattern.of(PatternSettings(**given)), dict(found.model.named_parameters())
    for layer in found.layers.layers:
        mask = found.plan.element_masks[layer.weight]
        assert holds(pattern, layer.matrix(mask))
        assert not parameters[layer.weight][~mask].any()
    if "sparsity" in given:
        assert found.plan.zeros / found.layers.size == pytest.approx(given["sparsity"], abs=0.02)
    assert found.report.after < found.report.before
    with torch.no_grad():
        small = compact(found.model, found.plan)
        torch.testing.assert_close(small(images), found.model(images))


@pytest.mark.slow
def test_a_pattern_is_in_what_the_channels_leave() -> None:
    found, images = pruned(small_net(1), keep_channels=False, kind="2:4", ignore=("11",))
    small = compact(found.model, found.plan)
    assert [module.out_channels for module in small if isinstance(module, nn.Conv2d)] == [12, 12, 30, 30]
    weight = small[5].weight.detach()[:, :, 0, 0]
    assert int((weight.view(30, 3, 4) != 0).sum(2).max()) == 2
    with torch.no_grad():
        torch.testing.assert_close(small(images), found.model(images))


@pytest.mark.slow
def test_each_way_to_choose_without_a_fit_and_what_it_leaves_of_the_others() -> None:
    model, errors = small_net(1), {}
    for method in ("obs", "sparsegpt", "wanda", "magnitude"):
        given: dict[str, Any] = {"kind": "unstructured", "sparsity": 0.5, "method": method, "scope": "uniform"}
        found, _ = pruned(model, fitted=False, **given)
        errors[method] = found.report.after
        if method in ("wanda", "magnitude"):
            for name, mask in found.plan.element_masks.items():
                parameter = found.model.get_parameter(name)
                assert torch.equal(parameter[mask], model.get_parameter(name)[mask])
    assert errors["obs"] < errors["magnitude"]
