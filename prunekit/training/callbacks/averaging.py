"""Averages of weights over the steps of a run, evaluated and kept in their place."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from prunekit.channels.cut.model_copy import copied, has_gradients
from prunekit.data.loader import Batches
from prunekit.masks.pruned_entries import MaskedTensor, masked_tensors
from prunekit.planning.plan import Plan
from prunekit.settings.train import AverageSettings
from prunekit.training.batchnorm_statistics import recalibrate_batchnorm
from prunekit.training.callbacks.callback import Part, Training
from prunekit.training.callbacks.distillation import PlanInForce


class Average(Part):
    """Keeps an average of all parameters and buffers; validation sees it, and the best epoch's is what is kept.

    `ema`: e = d e + (1 - d) w after every step, d = min(decay, (1 + n) / (10 + n)) at the n-th update after the first,
    which takes the weights as they are (Polyak & Juditsky 1992; the warm-up is TensorFlow's). `swa`: the mean of the
    weights at the ends of epochs (Izmailov et al. 2018, "Averaging weights leads to wider optima").

    BatchNorm's running statistics belong to the weights that they were taken with. They are averaged along, which suits
    an `ema` whose weights lie close together, or taken anew with the average's own weights (`swa`). Counts of batches
    are taken over. Epochs that ended before there was an average do not compete for the best.

    What the plan in force prunes is exactly zero in the average too, after every update, also where it was pruned
    later than averaging began.

    Args:
        settings: how to average.
        images: training images on which statistics are taken anew.
        plan: what masks the model.
    """

    def __init__(self, settings: AverageSettings, images: Batches, plan: PlanInForce = lambda: None) -> None:
        self._settings, self._images, self._plan = settings, images, plan
        self._first = self._every = 1
        self._known: Plan | None = None
        self._pruned: list[tuple[nn.Module, list[MaskedTensor]]] = []

    @contextmanager
    def active(self, training: Training) -> Iterator[None]:
        settings, swa = self._settings, self._settings.method == "swa"
        start = (0.75 if swa else 0.0) if settings.start is None else settings.start
        self._first = round(start * training.steps * training.epochs) + 1
        self._every = settings.every or (training.steps if swa else 1)
        self._training = training
        self.average = AveragedModel(nn.Module(), multi_avg_fn=self._update, use_buffers=True)
        self.average.module = copied(training.model)  # which AveragedModel leaves to copy.deepcopy
        self._known, self._pruned = None, []
        yield

    def _update(self, averages: Sequence[Tensor], current: Sequence[Tensor], _: Tensor | int) -> None:
        if not has_gradients(averages[0]):
            for average, value in zip(averages, current, strict=True):
                average.copy_(value)
            return
        torch._foreach_lerp_(list(averages), list(current), self._share(int(self.average.n_averaged)))

    def _share(self, updates: int) -> float:
        """Return what the newest weights get, after so many updates."""
        if self._settings.method == "swa":
            return 1 / (updates + 1)
        return 1 - min(self._settings.decay, (1 + updates) / (10 + updates))

    def before_step(self, step: int) -> None:
        if self._settings.lr is not None and step >= self._first:
            for group in self._training.optimizer.param_groups:
                group["lr"] = self._settings.lr

    def after_step(self, step: int, made: bool) -> None:
        if made and step >= self._first and step % self._every == 0:
            with torch.no_grad():
                self.average.update_parameters(self._training.model)
            self._mask()

    def _mask(self) -> None:
        plan = self._plan()
        if plan is not self._known:
            self._known = plan
            found = {} if plan is None else masked_tensors(self.average.module, plan, {}, buffers=True)
            self._pruned = list(found.values())
        for module, tensors in self._pruned:
            for tensor in tensors:
                tensor.entries.zero_(tensor.of(module))

    def settled(self) -> bool:
        return bool(self.average.n_averaged)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        if not self.settled():
            yield
            return
        model = self._training.model
        raw = [tensor.detach().clone() for tensor in _tensors(model)]
        try:
            _copy(_tensors(self.average.module), model)
            if self._recalibrates:
                recalibrate_batchnorm(model, self._images, device=self._training.device, progress=False)
            yield
        finally:
            _copy(raw, model)

    @property
    def _recalibrates(self) -> bool:
        wanted = self._settings.statistics
        return self._settings.method == "swa" if wanted is None else wanted == "recalibrated"

    def state_dict(self) -> dict[str, Any]:
        return {"average": {name: value.clone() for name, value in self.average.state_dict().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.average.load_state_dict(state["average"])
        self._mask()


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(model.parameters(), model.buffers())


@torch.no_grad()
def _copy(values: Iterable[Tensor], model: nn.Module) -> None:
    for tensor, value in zip(_tensors(model), values, strict=True):
        tensor.copy_(value)
