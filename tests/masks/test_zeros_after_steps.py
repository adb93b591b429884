"""Pruned weights are exactly 0.0 after every step, whatever trains them, and are not with masks off.

The masks come into force on the way, when momentum and averages are full of what the weights were, and single weights
are masked beside whole channels: these have gradients, where a channel that is zero on all sides has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from small_nets import SmallNet
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

import prunekit
from prunekit.data.datasets import ImageTransform, TensorImages
from prunekit.data.splits import Splits
from prunekit.hooks.hook import count_hooks
from prunekit.masks.masked_model import masked
from prunekit.planning.plan import Plan
from prunekit.settings.train import AverageSettings, ClampSettings, TrainSettings
from prunekit.training.callbacks.averaging import Average
from prunekit.training.callbacks.callback import Callback, TrainingRun
from prunekit.training.callbacks.selection import CallbackInputs, build_callbacks
from prunekit.training.loop import fit
from prunekit.training.optimizers import MakeOptimizer

CPU = torch.device("cpu")
BEFORE = 2
"""Steps before the masks come into force."""


class Lion(Optimizer):
    """Sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023)."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.rand_like(parameter))
                    update = torch.lerp(momentum, parameter.grad, 0.1).sign_()
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
                    momentum.lerp_(parameter.grad, 0.01)


OPTIMIZERS: dict[str, tuple[dict[str, Any], MakeOptimizer | None]] = {
    "sgd": ({"momentum": 0.0}, None),
    "momentum": ({"momentum": 0.9}, None),
    "nesterov": ({"momentum": 0.9, "nesterov": True}, None),
    "adam": ({"optimizer": "adam"}, None),
    "adamw": ({"optimizer": "adamw"}, None),
    "lion": ({"optimizer": "own"}, Lion),
    "foreach": ({"optimizer": "own"}, partial(SGD, momentum=0.9, foreach=True)),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ema": {"average": AverageSettings(decay=0.9)},
    "swa": {"average": AverageSettings("swa", start=0.0)},
    "accumulate": {"accumulate": 2},
    "clamp-value": {"clamp_weight_grad": ClampSettings(1e-3), "clamp_activation_grad": ClampSettings(1e-3)},
    "clamp-norm": {
        "clamp_weight_grad": ClampSettings(0.1, "norm"),
        "clamp_activation_grad": ClampSettings(0.1, "norm"),
    },
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "checkpointing": {},
    "all": {
        "precision": "fp16",
        "accumulate": 2,
        "average": AverageSettings(decay=0.5),
        "clamp_weight_grad": ClampSettings(0.1, "norm"),
    },
}


class Checkpointed(nn.Module):
    """A net whose activations are computed anew in backward."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=False)  # type: ignore[no-any-return]


class Pruning(Callback):
    """Puts masks in force after some steps, or only writes the zeros once; then looks for what is not +0.0."""

    def __init__(self, plan: Plan, *, masks: bool) -> None:
        self.plan, self.masks = plan, masks
        self.pruned = False
        self.steps = self.entries = self.wrong = 0

    def in_force(self) -> Plan | None:
        return self.plan if self.pruned and self.masks else None

    @contextmanager
    def active(self, training: TrainingRun) -> Iterator[None]:
        self.training = training
        with ExitStack() as self.entered:
            yield

    def after_step(self, step: int, made: bool) -> None:
        if self.pruned:
            self.steps += 1
            self.look(self.training.model)
        elif step == BEFORE:
            hold = masked(self.training.model, self.plan, self.training.optimizer)
            self.pruned = True
            self.entered.enter_context(hold)
            if not self.masks:
                self.entered.close()  # the zeros stay, and nothing else

    def look(self, model: nn.Module) -> None:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            mask = self.plan.mask(name)
            if mask is not None and not name.endswith("running_var"):
                pruned = tensor.detach()[~mask.expand(tensor.shape)]
                self.entries += pruned.numel()
                self.wrong += int(torch.count_nonzero(pruned.view(torch.int32)))  # -0.0 counts


class LooksAtAverage(Callback):
    """Comes after the average, and has the same looked for in it."""

    def __init__(self, pruning: Pruning, average: Average | None) -> None:
        self.pruning, self.average = pruning, average

    def after_step(self, step: int, made: bool) -> None:
        if self.pruning.pruned and self.average is not None and self.average.eligible_for_best(1):
            self.pruning.look(self.average.average.module)


def images(count: int, seed: int) -> TensorImages:
    pixels = torch.randint(0, 255, (count, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return TensorImages(pixels, torch.arange(count) % 5, ImageTransform(8, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))


def plan_for(model: nn.Module) -> Plan:
    """Every other channel, and a third of the single weights."""
    chart = prunekit.trace(model, (torch.zeros(2, 3, 8, 8),))
    keep = np.ones(chart.n_labels, bool)
    keep[chart.groups[0].labels[::2]] = False
    generator = torch.Generator().manual_seed(0)
    weights = {name: p.shape for name, p in model.named_parameters() if p.ndim > 1}
    return Plan(chart, keep, element_masks={n: torch.rand(s, generator=generator) > 0.3 for n, s in weights.items()})


def trained(optimizer: str, way: str, *, masks: bool) -> tuple[Pruning, nn.Module]:
    torch.manual_seed(0)
    model: nn.Module = Checkpointed(SmallNet()) if way == "checkpointing" else SmallNet()
    pruning = Pruning(plan_for(model), masks=masks)
    changes, own = OPTIMIZERS[optimizer]
    settings = TrainSettings(**{"epochs": 3, "lr": 0.01, "weight_decay": 0.01, "warmup": 0.0} | changes | WAYS[way])
    splits = Splits(images(24, 0), images(6, 1), images(6, 2), tuple("abcde"), (3, 8, 8), "f")
    asked = build_callbacks(settings, CallbackInputs(splits, 6, masks=pruning.in_force))
    average = next((part for part in asked if isinstance(part, Average)), None)
    parts = [pruning, *asked, LooksAtAverage(pruning, average)]
    fit(model, splits, settings, device=CPU, seed=0, batch=6, callbacks=parts, own_optimizer=own)
    return pruning, model


@pytest.mark.parametrize(
    ("optimizer", "way"),
    dict.fromkeys([*product(OPTIMIZERS, ("plain", "all")), *product(("momentum", "adamw"), WAYS)]),
)
def test_pruned_weights_are_exactly_zero_after_every_step(optimizer: str, way: str) -> None:
    pruning, model = trained(optimizer, way, masks=True)
    assert pruning.steps == (6 if "accumulate" in WAYS[way] else 12) - BEFORE
    assert pruning.entries > 0
    assert pruning.wrong == 0
    assert count_hooks(model) == 0


@pytest.mark.parametrize(
    ("optimizer", "way"), [*((name, "plain") for name in OPTIMIZERS), *(("momentum", name) for name in WAYS)]
)
def test_the_same_without_masks_is_noticed(optimizer: str, way: str) -> None:
    pruning, _ = trained(optimizer, way, masks=False)
    assert pruning.wrong > 0
