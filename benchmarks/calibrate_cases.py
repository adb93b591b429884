"""Calibration beside the plain forward pass: statistics; six reductions in a hook.

A batch of 16 images of 224 px, float32, eval mode without gradients. The forms alternate with the plain forward in one
run; a ratio is the median over the rounds of time with hooks / time without, and `low` and `high` are its 10th and 90th
percentiles. The collector measures every leaf module's inputs and outputs, `activations` different tensors; the six
reductions every leaf's output alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
import torchvision
from common import ratio
from torch import Tensor, nn

from prunekit.statistics import channel_stats_collector as collector
from prunekit.statistics.channel_stats_collector import StatsCollector, first_tensor

MODELS = ("resnet34", "resnet50", "densenet121", "mobilenet_v2", "efficientnet_b0")
BATCH, SIZE = 16, 224


class SixReductions(ExitStack):
    """What one writes without thinking: mean, variance, mean of |x|, min, max and zeros, each for itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: dict[str, list[Tensor]] = {}
        for path, module in model.named_modules():
            if not any(module.children()):
                self.callback(module.register_forward_hook(self._measure(path)).remove)

    def _measure(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, result: Any) -> None:
            x = first_tensor(result)
            if x is None or x.ndim < 2:
                return
            dims = [axis for axis in range(x.ndim) if axis != 1]
            reductions = (x.mean(dims), x.var(dims), x.abs().mean(dims), x.amin(dims), x.amax(dims), (x == 0).sum(dims))
            self.found[path] = list(reductions)

        return hook


Form = Callable[[], AbstractContextManager[Any]]


def rows(rounds: int, only: str = "") -> Iterator[dict[str, Any]]:
    """For each model the collector and the six reductions.

    Args:
        rounds: repetitions of a forward pass.
        only: what the names of the wanted rows begin with.
    """
    for name in MODELS:
        wanted = [form for form in _names(name) if form.startswith(only)]
        if wanted:
            with torch.no_grad():
                yield from _model_rows(name, wanted, rounds)


def _names(model: str) -> tuple[str, ...]:
    return f"calibrate/{model}/eager", f"torch/naive-six/{model}"


def _model_rows(name: str, wanted: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    model, images = getattr(torchvision.models, name)(weights=None).eval(), torch.randn(BATCH, 3, SIZE, SIZE)
    every: list[Form] = [partial(_itself, StatsCollector(model)), partial(SixReductions, model)]
    forms = {form: hooks for form, hooks in zip(_names(name), every, strict=True) if form in wanted}
    baseline, seconds = _alternated(model, images, forms, rounds)
    setting = {"threads": torch.get_num_threads(), "batch": BATCH, "size": SIZE, "dtype": "float32"}
    for form, times in seconds.items():
        row = {"name": form, **ratio([1000 * one for one in times], [1000 * one for one in baseline]), **setting}
        if form.startswith("calibrate"):
            row["activations"] = _measured(model, images)
        yield row


def _itself(hooks: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    return hooks


def _alternated(
    model: nn.Module, images: Tensor, forms: dict[str, Form], rounds: int
) -> tuple[list[float], dict[str, list[float]]]:
    """Seconds of the plain forward, and of each form in the same round; the first round warms up."""
    baseline: list[float] = []
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    for _ in range(rounds + 1):
        baseline.append(_seconds(model, images))
        for form, hooks in forms.items():
            with hooks():
                seconds[form].append(_seconds(model, images))
    return baseline[1:], {form: times[1:] for form, times in seconds.items()}


def _seconds(model: nn.Module, images: Tensor) -> float:
    start = time.perf_counter()
    model(images)
    return time.perf_counter() - start


def _measured(model: nn.Module, images: Tensor) -> int:
    """How many different tensors the collector measures in one forward pass."""
    counted = mock.patch.object(collector, "summarize", wraps=collector.summarize)
    with counted as summarize, StatsCollector(model):
        model(images[:1])
    return int(summarize.call_count)
