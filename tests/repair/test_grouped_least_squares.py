"""Many small groups at once find what the fit of one group after another finds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prunekit.repair.least_squares import (
    FitProblem,
    GroupedProblem,
    best_of,
    chunks,
    grouped_least_squares,
    least_squares,
)


def problem(*, rectified: bool, biased: bool) -> GroupedProblem:
    """Six groups of two outputs and five columns; the last reads nothing but zeros, the second has nothing missing."""
    torch.manual_seed(3)
    inputs, now = torch.randn(6, 400, 5).double(), torch.randn(6, 400, 2).double()
    wanted = now + inputs @ torch.randn(6, 5, 2).double() * 0.3 + 0.2 * torch.randn(6, 400, 2).double() + 0.1
    wanted[1], inputs[5] = now[1], 0
    scale = torch.rand(6, 2).double() + 0.5
    return GroupedProblem(inputs, now, wanted, scale, 300, rectified, biased)


@pytest.mark.parametrize("rectified", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_each_group_gets_what_it_would_get_alone(rectified: bool, biased: bool) -> None:
    together = problem(rectified=rectified, biased=biased)
    change = grouped_least_squares(together, 1e-3, 3)
    for group in range(6):
        parts: list[Tensor] = [getattr(together, name)[group] for name in ("inputs", "now", "wanted", "scale")]
        alone = FitProblem(*parts, 300, rectified, biased)
        best, before, after = best_of(alone, least_squares(alone, 1e-3, 3))
        assert before == pytest.approx(float(change.before[group]))
        assert after == pytest.approx(float(change.after[group]))
        if group == 1:
            assert not change.wins[group]
            assert not change.weight[group].any()
        elif best is not None:
            torch.testing.assert_close(change.weight[group], best.weight)
            torch.testing.assert_close(change.bias[group], best.bias)


@pytest.mark.parametrize("biased", [False, True])
def test_rows_count_by_the_squares_of_their_factors(biased: bool) -> None:
    torch.manual_seed(4)
    inputs, now, wanted = (torch.randn(50, width).double() for width in (4, 3, 3))
    scale, factors = torch.rand(3).double() + 0.5, torch.rand(50).double() * 5 + 1
    plain = FitProblem(inputs, now, wanted, scale, 40, biased=biased)
    some = plain.weighted(factors)
    change = least_squares(some, 1e-12)
    by_row = factors[:40, None]
    columns = torch.cat([inputs, torch.ones(50, 1)], 1)[:40, : 4 + biased]
    right = by_row * ((wanted - now) / scale)[:40]
    found = torch.linalg.lstsq(by_row * columns, right).solution
    torch.testing.assert_close(change.weight, found[:4].T)
    torch.testing.assert_close(change.bias, found[4] if biased else torch.zeros(3).double())
    judged = inputs[40:] @ change.weight.T + change.bias
    missed = (now[40:] + scale * judged - wanted[40:]).square() * factors[40:, None].square()
    assert change.error(some) == pytest.approx(float(missed.mean() / factors.square().mean()))


def test_a_position_that_is_almost_zero_does_not_decide_by_itself() -> None:
    values = torch.ones(9, 1).double()
    problem = FitProblem(values, values, values, torch.ones(1).double(), 8)
    factors = torch.ones(9).double()
    factors[3] = 1e6
    found = problem.weighted(factors).factors
    assert found is not None
    assert float(found[3] / found[0]) == pytest.approx(10)


def test_stronger_ridges_are_tried_while_more_helps() -> None:
    torch.manual_seed(5)
    inputs, noise = torch.randn(60, 30).double(), torch.randn(60, 2).double()
    none = torch.zeros(60, 2).double()
    problem = FitProblem(inputs, none, noise, torch.ones(2).double(), 40, biased=False)
    assert least_squares(problem, 1e-3).ridge > 1  # nothing can be learned from noise
    exact = FitProblem(inputs, none, inputs[:, :2], torch.ones(2).double(), 40, biased=False)
    assert least_squares(exact, 1e-3).ridge == pytest.approx(1e-3)


def test_outputs_that_the_norm_ignores_stay_as_they_are() -> None:
    some = problem(rectified=False, biased=True)
    some.scale[0, 1] = 0
    change = grouped_least_squares(some, 1e-3)
    assert not change.weight[0, 1].any()
    assert change.weight[0, 0].any()
    assert bool(change.weight.isfinite().all())


def test_chunks_cover_all_groups() -> None:
    parts = list(chunks(10, 2**20, 1))
    assert [i for part in parts for i in range(10)[part]] == list(range(10))
    assert len(parts) == 5


def test_a_ridge_is_chosen_by_some_of_many_outputs() -> None:
    """Products in float32 and a ridge that some outputs choose give the fit of float64 and of all outputs."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 6, generator=generator)
    wanted = inputs @ torch.randn(6, 600, generator=generator) + 0.1 * torch.randn(400, 600, generator=generator)
    scale, none = torch.full((600,), 2.0).double(), torch.zeros_like(wanted)
    found = least_squares(FitProblem(inputs, none, wanted, scale, 350, biased=False), 1e-3)
    doubles = inputs.double(), none.double(), wanted.double()
    exact = least_squares(FitProblem(*doubles, scale, 350, biased=False), 1e-3)
    assert found.ridge == exact.ridge
    torch.testing.assert_close(found.weight, exact.weight, atol=1e-6, rtol=1e-5)
    moments = inputs[:350].double().T @ inputs[:350].double() / 350
    moments.diagonal().add_(found.ridge * moments.diagonal().mean())
    right = inputs[:350].double().T @ (wanted[:350].double() / 2) / 350
    torch.testing.assert_close(exact.weight.T, torch.linalg.solve(moments, right))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_fewer_rows_than_columns_give_the_solution_of_the_equations_of_columns(biased: bool, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 90, generator=generator, dtype=torch.float64) + 0.3
    wanted = inputs @ torch.randn(90, 7, generator=generator, dtype=torch.float64) + 1
    scale = torch.rand(7, generator=generator, dtype=torch.float64) + 0.5
    problem = FitProblem(inputs, torch.zeros_like(wanted), wanted, scale, 45, biased=biased)
    if weighted:
        problem = problem.weighted(torch.rand(60, generator=generator, dtype=torch.float64) + 0.5)
    found = least_squares(problem, 1e-3)
    read = problem.columns()[:45]
    gram = read.T @ read / 45
    pull = found.ridge * gram.diagonal()[:90].mean() * torch.ones(len(gram), dtype=torch.float64)
    pull[90:] = 0
    exact = torch.linalg.solve(gram + pull.diag(), read.T @ (problem.wanted[:45] / scale) / 45)
    torch.testing.assert_close(found.weight, exact[:90].T, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found.bias, exact[90:].sum(0), rtol=1e-9, atol=1e-11)
    assert found.rank == 45
    assert found.ridge >= 1e-2
