"""What masks and clamps cost: resnet34 with them beside the same resnet34 without, and torch.nn.utils.prune beside.

Every pair has the same weights with the same zeros, so that only the hooks differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from common import ratio
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim import SGD
from torchvision import models

from prunekit.channels.trace import trace
from prunekit.masks.activation_masks import ActivationMasks
from prunekit.masks.gradient_clamps import clamp_activation_grad, clamp_weight_grad
from prunekit.masks.gradient_masks import GradientMasks
from prunekit.masks.masked_model import ChangingMasks, masked
from prunekit.masks.weight_masks import WeightMasks
from prunekit.measure.latency.timing import alternate, warm_up
from prunekit.planning.plan import Plan
from prunekit.planning.solver import make_plan
from prunekit.settings.pruning import BudgetSettings, PruneSettings

Hooks = Callable[[nn.Module, SGD], AbstractContextManager[Any]]
OFTEN, RARELY = 0.01, 1.0
"""Limits of clamped gradients: at these random weights some values of most layers lie above the first."""


@dataclass(frozen=True)
class Case:
    """Hooks to be timed, in a forward pass or in a training step, and the plan whose zeros both models have."""

    name: str
    training: bool
    hooks: Hooks
    plan: Plan


def random_plan(model: nn.Module) -> Plan:
    """Half of the channels of every group, drawn at random."""
    chart = trace(model, (torch.zeros(1, 3, 64, 64),))
    scores = np.random.default_rng(0).random(chart.n_labels)
    return make_plan(chart, scores, PruneSettings(BudgetSettings(channels=0.5)))


def single_weights(plan: Plan, kind: str) -> Plan:
    """80 % of the weights of every convolution, or two of four, drawn at random, and all channels."""
    generator, found = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for name, shape in plan.channel_map.shapes.items():
        if len(shape) == 4 and shape[1] > 3:
            scores = torch.rand(shape, generator=generator)
            if kind == "2:4":
                groups = scores.view(shape[0], -1, 4, *shape[2:])
                found[name] = (groups.argsort(dim=2).argsort(dim=2) < 2).view(shape)
            else:
                found[name] = scores > 0.8
    return Plan(plan.channel_map, np.ones_like(plan.keep), element_masks=found)


def torch_prune(model: nn.Module, plan: Plan) -> None:
    """The same zeros by torch's own pruning: a mask for each weight, multiplied before every forward."""
    names = dict(model.named_parameters())
    for path, module in list(model.named_modules()):
        for attribute in ("weight", "bias"):
            mask = plan.mask(f"{path}.{attribute}")
            if mask is not None:
                prune.custom_from_mask(module, attribute, mask.expand(names[f"{path}.{attribute}"].shape).float())


def cases(plan: Plan) -> Iterator[Case]:
    """What is timed, ours first."""
    single, pattern = single_weights(plan, "unstructured"), single_weights(plan, "2:4")

    def clamps(model: nn.Module, optimizer: SGD, limit: float = OFTEN) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(clamp_activation_grad(model, limit))
        stack.enter_context(clamp_weight_grad(model, optimizer, limit))
        return stack

    def everything(model: nn.Module, optimizer: SGD, limit: float = OFTEN) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(masked(model, plan, optimizer))
        stack.enter_context(clamps(model, optimizer, limit))
        return stack

    def activations(model: nn.Module, optimizer: SGD) -> AbstractContextManager[Any]:
        return ActivationMasks(model, {"relu": 0.1, "*.relu": 0.1}, count=False)

    def by_torch(model: nn.Module, optimizer: SGD) -> AbstractContextManager[Any]:
        torch_prune(model, plan)
        return nullcontext()

    def masks_of(chosen: Plan, through: float | None = None) -> Hooks:
        if through is None:
            return lambda model, optimizer: masked(model, chosen, optimizer)
        return lambda model, optimizer: ChangingMasks(model, chosen, optimizer, straight_through=through)

    yield Case("mask/inference", False, lambda model, optimizer: WeightMasks(model, plan), plan)
    yield Case("torch/prune/inference", False, by_torch, plan)
    yield Case("mask/activations", False, activations, plan)
    yield Case("mask/training-step", True, lambda model, optimizer: WeightMasks(model, plan, optimizer), plan)
    yield Case("gradient/masks", True, lambda model, optimizer: GradientMasks(model, plan), plan)
    yield Case("gradient/clamps", True, clamps, plan)
    yield Case("mask+gradient/training-step", True, everything, plan)
    rarely = partial(everything, limit=RARELY)
    yield Case("mask+gradient/rarely-clamped-step", True, rarely, plan)
    yield Case("torch/prune/training-step", True, by_torch, plan)
    yield Case("single/channels/training-step", True, masks_of(plan), plan)
    yield Case("single/unstructured/training-step", True, masks_of(single), single)
    yield Case("single/2:4/training-step", True, masks_of(pattern), pattern)
    yield Case("single/straight-through/training-step", True, masks_of(pattern, 2e-4), pattern)


def rows(rounds: int, only: str = "") -> Iterator[dict[str, Any]]:
    """Times every case whose name starts with `only`."""
    torch.manual_seed(0)
    plan = random_plan(models.resnet34())
    for case in cases(plan):
        if case.name.startswith(only):
            yield _row(case, rounds)


def _row(case: Case, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    batch, size = (16, 64) if case.training else (1, 224)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))
    plain, hooked = (_model(case.plan, case.training) for _ in range(2))
    optimizers = [SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True) for model in (plain, hooked)]
    with case.hooks(hooked, optimizers[1]):
        if case.name.startswith("torch/prune"):  # it has put other parameters in their place
            optimizers[1] = SGD(hooked.parameters(), lr=1e-4, momentum=0.9, fused=True)
        runs = [
            _timed(model, optimizer if case.training else None, images, labels)
            for model, optimizer in zip((plain, hooked), optimizers, strict=True)
        ]
        with torch.enable_grad() if case.training else torch.no_grad():
            for run in runs:
                warm_up(run)
            times = alternate(runs, rounds if not case.training else max(10, rounds // 3))  # (2, rounds)
    return {
        "name": f"{case.name}/resnet34",
        **ratio(times[1].tolist(), times[0].tolist()),
        "threads": torch.get_num_threads(),
        "batch": batch,
        "size": size,
        "dtype": "float32",
        "rounds": times.shape[1],
    }


def _model(plan: Plan, training: bool) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = models.resnet34().train(training)
    with WeightMasks(model, plan):
        return model


def _timed(model: nn.Module, optimizer: SGD | None, images: Tensor, labels: Tensor) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter_ns()
        output = model(images)
        if optimizer is not None:
            F.cross_entropy(output, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter_ns() - start) / 1e6

    return run
