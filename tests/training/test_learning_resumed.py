"""Distillation, regularizers and averages go on from a checkpoint as if nothing had stopped them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from training_models import CPU, net, splits

import prunekit
from prunekit.masks.masked_model import masked
from prunekit.planning.plan import Plan
from prunekit.settings.train import (
    AverageSettings,
    CheckpointSettings,
    DistillSettings,
    FeatureSettings,
    RegularizerSettings,
    TrainSettings,
)
from prunekit.training.callbacks.callback import Callback, ContextCallback, History
from prunekit.training.callbacks.selection import CallbackInputs, build_callbacks
from prunekit.training.checkpoints import Checkpoints
from prunekit.training.loop import fit


class Stopping(Callback):
    """Ends a run before a step, as a crash would; never at 0."""

    def __init__(self, at: int) -> None:
        self.at = at

    def before_step(self, step: int) -> None:
        if step == self.at:
            raise KeyboardInterrupt


def trained(folder: Path | None, settings: TrainSettings, stop: int = 0) -> tuple[nn.Module, History, list[Callback]]:
    model, checkpoints = net(), None
    chart = prunekit.trace(net(), (torch.zeros(2, 3, 8, 8),))
    keep = np.ones(chart.n_labels, bool)
    keep[chart.groups[0].labels[:3]] = False
    plan = Plan(chart, keep)
    if folder is not None:
        checkpoints = Checkpoints(folder, CheckpointSettings(every_steps=1))
    asked = build_callbacks(settings, CallbackInputs(splits(), 16, net(2), chart, masks=lambda: plan))
    parts = [ContextCallback(lambda run: masked(model, plan, run.optimizer)), *asked, Stopping(stop)]
    history = fit(model, splits(), settings, device=CPU, seed=1, batch=16, callbacks=parts, checkpoints=checkpoints)
    return model, history, asked


@pytest.mark.parametrize("stop", [3, 9, 12])  # before there is an average, with it, and before the last step
@pytest.mark.parametrize("method", ["ema", "swa"])
def test_a_run_that_was_stopped_ends_bit_by_bit_as_one_that_was_not(method: Any, stop: int, tmp_path: Path) -> None:
    settings = TrainSettings(
        epochs=3,
        lr=0.05,
        distill=DistillSettings(features=FeatureSettings(("1",))),
        regularize=RegularizerSettings("group_lasso", 1e-3),
        average=AverageSettings(method, start=0.4),
    )
    model, history, _ = trained(None, settings)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, settings, stop)
    again, resumed, _ = trained(tmp_path, settings)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    shown = [[(row.train_loss, row.validation_loss, row.lr) for row in rows] for rows in (history.rows, resumed.rows)]
    assert shown[0] == shown[1]
    assert history.best_epoch == resumed.best_epoch
