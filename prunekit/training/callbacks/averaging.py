"""The average of weights over the steps of a run: it is validated and kept in place of the weights themselves."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from prunekit.data.loader import Batches
from prunekit.hooks.model_copy import copied, has_gradients
from prunekit.masks.pruned_entries import MaskedTensor, masked_tensors
from prunekit.planning.plan import Plan
from prunekit.repair.batchnorm_statistics import recalibrate_batchnorm
from prunekit.settings.train import AverageSettings
from prunekit.training.callbacks.callback import Callback, CurrentPlan, TrainingRun


class Average(Callback):
    """An average of all parameters and buffers, which is validated, and kept for the best epoch.

    `ema`: e = d e + (1 - d) w after every step, d = min(decay, (1 + n) / (10 + n)) at the n-th update after the first,
    which takes the weights as they are (Polyak & Juditsky 1992; the warm-up is TensorFlow's). `swa`: the mean of the
    weights at the ends of epochs (Izmailov et al. 2018, "Averaging weights leads to wider optima").

    BatchNorm's running statistics belong to the weights with which they were computed. They are averaged too, which
    suits an `ema` whose weights are close together, or computed again on `images` with the average's own weights
    (`swa`). Counts of batches are copied. Epochs that end before there is an average are not eligible for the best.

    What the current plan prunes is exactly zero in the average too, after every update, even if it was pruned after
    averaging began.
    """

    def __init__(self, settings: AverageSettings, images: Batches, plan: CurrentPlan = lambda: None) -> None:
        self._settings, self._images, self._plan = settings, images, plan
        self._first = self._every = 1
        self._masked_by: Plan | None = None
        self._pruned: list[tuple[nn.Module, list[MaskedTensor]]] = []

    @contextmanager
    def active(self, run: TrainingRun) -> Iterator[None]:
        """Make the average, of no weights yet."""
        settings, swa = self._settings, self._settings.method == "swa"
        start = (0.75 if swa else 0.0) if settings.start is None else settings.start
        self._first = round(start * run.steps * run.epochs) + 1
        self._every = settings.every or (run.steps if swa else 1)
        self._run = run
        self.average = AveragedModel(nn.Module(), multi_avg_fn=self._update, use_buffers=True)
        self.average.module = copied(run.model)  # which AveragedModel leaves to copy.deepcopy
        self._masked_by, self._pruned = None, []
        yield

    def _update(self, averages: Sequence[Tensor], current: Sequence[Tensor], _: Tensor | int) -> None:
        if not has_gradients(averages[0]):
            for average, value in zip(averages, current, strict=True):
                average.copy_(value)
            return
        updates = int(self.average.n_averaged)
        decay = min(self._settings.decay, (1 + updates) / (10 + updates))
        swa = self._settings.method == "swa"
        update = get_swa_multi_avg_fn() if swa else get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        update(list(averages), list(current), updates)

    def before_step(self, step: int) -> None:
        """Set the learning rate of the averaging phase, if the settings have one."""
        if self._settings.lr is not None and step >= self._first:
            for group in self._run.optimizer.param_groups:
                group["lr"] = self._settings.lr

    def after_step(self, step: int, made: bool) -> None:
        """Update the average when it is due."""
        if made and step >= self._first and step % self._every == 0:
            with torch.no_grad():
                self.average.update_parameters(self._run.model)
            self._mask()

    def _mask(self) -> None:
        plan = self._plan()
        if plan is not self._masked_by:
            self._masked_by = plan
            found = {} if plan is None else masked_tensors(self.average.module, plan, {}, buffers=True)
            self._pruned = list(found.values())
        for module, tensors in self._pruned:
            for tensor in tensors:
                tensor.entries.zero_(tensor.of(module))

    def eligible_for_best(self, epoch: int) -> bool:
        """Return whether there is an average; before the first step the weights themselves stand for it."""
        return not epoch or bool(self.average.n_averaged)

    @contextmanager
    def around_validation(self) -> Iterator[None]:
        """Put the average in place of the model's weights."""
        if not self.average.n_averaged:
            yield
            return
        model, wanted = self._run.model, self._settings.statistics
        raw = [tensor.detach().clone() for tensor in _tensors(model)]
        try:
            _copy(_tensors(self.average.module), model)
            if wanted == "recalibrated" or (wanted is None and self._settings.method == "swa"):
                recalibrate_batchnorm(model, self._images, device=self._run.device, progress=False)
            yield
        finally:
            _copy(raw, model)

    def state_dict(self) -> dict[str, Any]:
        """Return the average."""
        return {"average": {name: value.clone() for name, value in self.average.state_dict().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from an average."""
        self.average.load_state_dict(state["average"])
        self._mask()


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(model.parameters(), model.buffers())


@torch.no_grad()
def _copy(values: Iterable[Tensor], model: nn.Module) -> None:
    for tensor, value in zip(_tensors(model), values, strict=True):
        tensor.copy_(value)
