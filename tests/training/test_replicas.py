"""Training in several processes: what one process does, up to the order of float32 sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from process_group import together
from torch import nn
from training_models import CPU, splits

from prunekit.data import Splits
from prunekit.masking import ClampSettings, masked
from prunekit.planning import BudgetSettings, PruneSettings
from prunekit.training import History, Training, TrainSettings, Within, fit
from prunekit.workflow import plan_model


def plain_net() -> nn.Sequential:
    """Without BatchNorm and dropout, which look at a process's share alone; with a weight that nothing uses."""
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 12, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(192, 4),
    )
    net[0].unused = nn.Parameter(torch.ones(3, 3))
    return net


def trained(settings: TrainSettings, under_masks: bool, data: Splits | None = None) -> dict[str, Any]:
    """The end of a run of 22 images a step: 66 = 3 x 22 over 4 processes makes shares of 6 and 5."""
    model = plain_net()
    parts = []
    if under_masks:
        budget = PruneSettings(budget=BudgetSettings(channels=0.5), criterion="l2")
        plan = plan_model(model, (torch.zeros(1, 3, 8, 8),), budget).plan

        @contextmanager
        def masks(training: Training) -> Iterator[None]:
            with masked(model, plan, training.optimizer):
                yield

        parts = [Within(masks)]
    history = fit(model, data or splits(), settings, device=CPU, seed=1, batch=22, parts=parts)
    return {"weights": {name: tensor.clone() for name, tensor in model.state_dict().items()}, "history": history}


SGD = TrainSettings(epochs=3, lr=0.1)
CASES = {
    "sgd": (SGD, False),
    "under masks, accumulated": (replace(SGD, accumulate=2), True),
    "adamw, clamped": (
        TrainSettings(
            epochs=2,
            lr=0.01,
            optimizer="adamw",
            clamp_weight_grad=ClampSettings(limit=0.01),
            clamp_activation_grad=ClampSettings(limit=0.002),
        ),
        True,
    ),
}


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_several_processes_do_what_one_does(case: str, processes: int, tmp_path: Path) -> None:
    alone = trained(*CASES[case])
    found = together(processes, tmp_path, trained, *CASES[case])
    assert any((weight != plain_net().state_dict()[name]).any() for name, weight in alone["weights"].items())
    for other in found:
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(other["weights"][name], weight, rtol=1e-4, atol=1e-6, msg=name)
            assert torch.equal(other["weights"][name], found[0]["weights"][name])
            assert torch.equal(other["weights"][name] == 0, weight == 0)
        same_history(other["history"], alone["history"])


def same_history(found: History, expected: History) -> None:
    assert found.best_epoch == expected.best_epoch
    for row, alone in zip(found.rows, expected.rows, strict=True):
        assert (row.lr, row.skipped, row.epoch) == (alone.lr, alone.skipped, alone.epoch)
        assert row.train_top1 == alone.train_top1  # counts of whole images: exact
        assert row.validation_top1 == alone.validation_top1
        assert row.train_loss == pytest.approx(alone.train_loss, rel=1e-5)
        assert row.validation_loss == pytest.approx(alone.validation_loss, rel=1e-5)
