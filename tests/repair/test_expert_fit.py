"""Stacks of matrices are refitted: each to what it computed of its own rows, by least squares that are solved here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import prunekit as pk
from prunekit.repair.repair_model import repair
from prunekit.statistics.layer_errors import RIDGE

EXPERTS, WIDTH, INNER = 3, 4, 8


class Experts(nn.Module):
    """One of three experts for each row, by the largest of three numbers; inner channels are sums of few others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, 3)."""
        read, chosen = self.first(x), x[:, :EXPERTS].argmax(1)
        rows = torch.zeros_like(read)
        for number in range(EXPERTS):
            inner = F.linear(read[chosen == number], self.up[number])
            rows[chosen == number] = F.linear(inner, self.down[number])
        return self.last(read + rows)  # type: ignore[no-any-return]


def inner_of(model: Any, x: Tensor) -> list[Tensor]:
    """Return what each matrix of the second stack reads."""
    chosen = x[:, :EXPERTS].argmax(1)
    return [F.linear(model.first(x)[chosen == at], model.up[at]).detach() for at in range(EXPERTS)]


@pytest.fixture
def model() -> Experts:
    torch.manual_seed(0)
    return Experts().double().eval()


def test_each_matrix_solves_the_least_squares_of_its_rows(model: Experts) -> None:
    x = torch.randn(256, 6, dtype=torch.float64)
    chart = pk.trace(model, x[:3])
    (group,) = (group for group in chart.groups if ("down", 2) in group.slots)
    keep = torch.ones(chart.n_labels, dtype=torch.bool).numpy()
    keep[group.labels[[1, 2, 6]]] = False
    plan = pk.Plan(chart, keep)
    settings = pk.RepairSettings(held_out=0.25)
    repaired, report = repair(model, plan, x, settings)
    (layer,) = (layer for layer in report.layers if layer.weight == "down")
    assert layer.applied == "patch"
    assert layer.after < 0.1 * layer.before
    assert report.after < 0.1 * report.before
    kept = [0, 3, 4, 5, 7]
    for at, rows in enumerate(inner_of(model, x[:192])):
        gram = rows.T @ rows / len(rows)
        damped = gram + RIDGE * gram.diagonal().mean() * torch.eye(INNER, dtype=torch.float64)
        gone = [1, 2, 6]
        change = torch.linalg.solve(damped[kept][:, kept], gram[kept][:, gone] @ model.down[at][:, gone].T).T
        torch.testing.assert_close(repaired.down[at][:, kept], model.down[at][:, kept] + change)  # type: ignore[index]
        assert not repaired.down[at][:, gone].any()  # type: ignore[index]


def test_matrices_that_lose_nothing_stay_as_they_are(model: Experts) -> None:
    x = torch.randn(64, 6, dtype=torch.float64)
    chart = pk.trace(model, x[:3])
    repaired, report = repair(model, pk.Plan(chart, torch.ones(chart.n_labels, dtype=torch.bool).numpy()), x)
    assert not any(layer.applied for layer in report.layers)
    assert torch.equal(repaired.down, model.down)  # type: ignore[arg-type]


def test_a_pruned_mixture_is_nearer_to_the_dense_one_with_its_experts_refitted(model: Experts) -> None:
    x, held = torch.randn(2, 256, 6, dtype=torch.float64)
    results = [pk.prune(model, calibration=x, params=0.7, round_to=1, **extra) for extra in ({}, {"repair": False})]  # type: ignore[arg-type]
    with torch.no_grad():
        errors = [float((result.model(held) - model(held)).square().mean()) for result in results]
    assert all(result.max_relative_difference < 1e-9 for result in results)
    assert all(result.model.down.shape[2] < INNER for result in results)  # type: ignore[union-attr, operator]
    assert errors[0] < 0.1 * errors[1]
