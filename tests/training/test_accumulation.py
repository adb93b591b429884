"""Gradient accumulation: several small batches make the step of a large one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_models import CPU, images, splits

from prunekit.data.loader import batches
from prunekit.settings.train import TrainSettings
from prunekit.training.callbacks.callback import EpochRow
from prunekit.training.loop import fit
from prunekit.training.optimizers import build_optimizer, build_schedule

SETTINGS = TrainSettings(epochs=2, lr=0.05, label_smoothing=0.1)


class Doubled(nn.Module):
    """No BatchNorm, no dropout, float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.fc = nn.Conv2d(3, 4, 3, stride=2), nn.Linear(36, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x.double()).tanh().flatten(1))  # type: ignore[no-any-return]


def train(count: int, batch: int, settings: TrainSettings) -> tuple[dict[str, Tensor], tuple[EpochRow, ...]]:
    model = Doubled()
    data = replace(splits(), train=images(count, 0))
    rows = fit(model, data, settings, device=CPU, seed=3, batch=batch).rows
    return model.state_dict(), rows


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "count"), [("sgd", 2), ("adam", 3), ("adamw", 6)])
def test_micro_batches_equal_one_large_batch(optimizer: Any, count: int) -> None:
    settings = replace(SETTINGS, optimizer=optimizer, lr=0.01)
    whole, rows = train(72, 12, settings)
    parts, again = train(72, 12 // count, replace(settings, accumulate=count))
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=0, atol=1e-12)
    assert [row.lr for row in again] == [row.lr for row in rows]
    assert [row.train_loss for row in again] == pytest.approx([row.train_loss for row in rows], abs=1e-12)


def test_the_last_group_of_an_epoch_may_be_smaller() -> None:
    """Ten batches of four, three to a step, written out by hand: steps of 12, 12, 12 and 4 images."""
    found, rows = train(40, 4, replace(SETTINGS, accumulate=3))
    model = Doubled()
    optimizer = build_optimizer(model, SETTINGS)
    schedule = build_schedule(optimizer, 2 * 4, SETTINGS.warmup)
    for epoch in (1, 2):
        parts = list(batches(images(40, 0), 4, shuffle_seed=3).at_epoch(epoch))
        for start in (0, 3, 6, 9):
            pixels, labels = (torch.cat(each) for each in zip(*parts[start : start + 3], strict=True))
            nn.functional.cross_entropy(model(pixels), labels, label_smoothing=0.1).backward()  # type: ignore[no-untyped-call]
            assert len(labels) == (4 if start == 9 else 12)
            lr = optimizer.param_groups[0]["lr"]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert rows[epoch - 1].lr == lr
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_more_batches_than_an_epoch_has_make_one_step() -> None:
    whole, _ = train(48, 48, SETTINGS)
    parts, _ = train(48, 8, replace(SETTINGS, accumulate=100))
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=0, atol=1e-12)
