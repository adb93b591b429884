"""No part of a training run keeps more with every step."""

from __future__ import annotations

import gc

import numpy as np
import torch
from torch import nn
from training_models import CPU, net, splits

import prunekit
from prunekit.masks.masked_model import masked
from prunekit.planning.plan import Plan
from prunekit.settings.train import (
    AverageSettings,
    ClampSettings,
    DistillSettings,
    FeatureSettings,
    RegularizerSettings,
    TrainSettings,
)
from prunekit.training.callbacks.callback import Callback, ContextCallback
from prunekit.training.callbacks.selection import CallbackInputs, build_callbacks
from prunekit.training.loop import fit


class Live(Callback):
    """Counts tensors, their bytes and all objects after each epoch's last step."""

    def __init__(self, steps: int) -> None:
        self.steps, self.found = steps, []  # type: tuple[int, list[tuple[int, int, int]]]

    def after_step(self, step: int, made: bool) -> None:
        if step % self.steps == 0:
            gc.collect()
            objects = gc.get_objects()
            # Of tests before this one fake tensors may be left, whose sizes are symbols; a model has none.
            tensors = [one for one in objects if type(one) in (torch.Tensor, nn.Parameter) and type(one.numel()) is int]
            self.found.append((len(tensors), sum(t.untyped_storage().nbytes() for t in tensors), len(objects)))


def test_nothing_grows_with_steps() -> None:
    model: nn.Module = net()
    chart = prunekit.trace(model, (torch.zeros(2, 3, 8, 8),))
    keep = np.ones(chart.n_labels, bool)
    keep[chart.groups[0].labels[:3]] = False
    plan = Plan(chart, keep)
    settings = TrainSettings(
        epochs=8,
        lr=0.01,
        distill=DistillSettings(features=FeatureSettings(("0", "1"))),
        regularize=RegularizerSettings("group_lasso"),
        average=AverageSettings(),
        clamp_activation_grad=ClampSettings(1e-3),
        clamp_weight_grad=ClampSettings(1e-3, "norm"),
    )
    sources = CallbackInputs(splits(), 16, net(2), chart, masks=lambda: plan)
    live = Live(steps=4)
    parts = [ContextCallback(lambda run: masked(model, plan, run.optimizer)), *build_callbacks(settings, sources), live]
    fit(model, splits(), settings, device=CPU, seed=1, batch=16, callbacks=parts)
    tensors, sizes, objects = zip(*live.found[2:], strict=True)  # what is kept once is there by the third epoch
    assert len(set(tensors)) == 1
    assert len(set(sizes)) == 1
    assert max(objects) - min(objects) < live.steps * (len(objects) - 1)  # less than one object a step
