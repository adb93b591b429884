"""Scores of which less is better, wherever scores are compared: best epochs, fronts, tables, int8, chance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.backends.int8.quantizer import Quantized
from prunekit.data.user_data import sample_splits
from prunekit.measure.accuracy import evaluate
from prunekit.report.figures.pareto import Point, front
from prunekit.report.headline import compared, sentence, tiles
from prunekit.settings.train import TrainSettings
from prunekit.tasks.task import Score, Task, described_task
from prunekit.training.checkpoints import BestWeights
from prunekit.training.loop import fit
from prunekit.utils.display import in_unit

CPU = torch.device("cpu")


def squares(output: Tensor, targets: Tensor) -> Tensor:
    return torch.stack([(output - targets).square().sum(), torch.tensor(float(targets.numel()))])


ERROR = Score("error", "squared error", lambda sums: float(sums[0] / sums[1]), unit="", lower_is_better=True)
REGRESSION = Task("regression", F.mse_loss, squares, (ERROR,))


@pytest.mark.parametrize(("lower", "best"), [(False, 3), (True, 4)])
def test_the_best_epoch_goes_by_the_direction(lower: bool, best: int) -> None:
    kept = BestWeights(nn.Linear(1, 1), None, print, lower_is_better=lower)
    for epoch, score in enumerate([None, 5.0, 7.0, 3.0, None], 1):
        kept.offer(epoch, score)
    assert kept.epoch == best
    again = BestWeights(nn.Linear(1, 1), None, print, lower_is_better=lower)
    again.load_state_dict(kept.state_dict())
    again.offer(9, 6.0)
    assert again.epoch == best


def test_training_keeps_the_epoch_with_the_least_error() -> None:
    torch.manual_seed(0)
    samples = [(torch.randn(3), torch.randn(1)) for _ in range(40)]
    splits = sample_splits({"train": samples, "test": samples[:4]}, REGRESSION)
    net = nn.Linear(3, 1)
    found = fit(net, splits, TrainSettings(epochs=4, lr=0.9, momentum=0.0), device=CPU, seed=0, batch=8)
    errors = [row.validation_score for row in found.rows]
    assert errors.index(min(errors)) + 1 == found.best_epoch
    assert min(errors) < max(errors)
    held_out = splits.validation.fetch(torch.arange(len(splits.validation)))
    assert evaluate(net, [held_out], REGRESSION, CPU).values["error"] == pytest.approx(min(errors), rel=1e-6)


@pytest.mark.parametrize(("guess", "at_chance"), [(0.5, True), (2.0, False)])
def test_no_better_than_chance_is_above_it(guess: float, at_chance: bool) -> None:
    task = replace(REGRESSION, scores=(replace(ERROR, chance=lambda sums: guess),))
    found = evaluate(nn.Identity(), [(torch.ones(4, 1), torch.zeros(4, 1))], task, CPU)
    assert (found.at_chance, found.unit, found.lower_is_better) == (at_chance, "", True)


def test_the_front_has_less_at_more_cost() -> None:
    points = [("a", 1, 90), ("b", 2, 91), ("c", 3, 80)]
    drawn = [Point(name, "pruned", (), (1, 1), cost, score, lower_is_better=True) for name, cost, score in points]
    assert [point.label for point in front(drawn)] == ["a", "c"]


def test_reports_say_the_direction_and_no_unit() -> None:
    metrics: dict[str, Any] = {"task": described_task(REGRESSION), "dense": {"error": 12.0}, "pruned": {"error": 15.5}}
    assert metrics["task"]["scores"][0]["lower_is_better"] is True
    row = next(iter(compared(metrics)))
    assert row.label == "Squared error on the test samples (lower is better)"
    assert row.change == "+3.50"
    assert [cell[0] for cell in row.cells] == ["12.00", "15.50"]
    tile = next(iter(tiles(metrics)))
    assert (tile.value, tile.detail) == ("+3.50", "against the dense model (lower is better)")
    assert sentence(metrics) == "Squared error 15.50 against 12.00."
    assert in_unit(123456789.0, "") == "1.2e+08"


def test_int8_loses_what_the_score_rises_by() -> None:
    merits = Quantized(Path("x"), ("a",), float_score=-10.0, score=-11.5)
    assert merits.drop == 1.5  # what the limit went by
    found = replace(merits, float_score=10.0, score=11.5, lower_is_better=True)  # as files keep them
    assert found.drop == 1.5
