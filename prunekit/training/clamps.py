"""The gradient clamps of a training run, and how often they were needed in all processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from prunekit.distributed.process_group import gather_values
from prunekit.masks.gradient_clamps import GradientClamp, clamp_activation_grad, clamp_weight_grad
from prunekit.settings.train import ClampSettings, TrainSettings
from prunekit.training.callbacks.history import ClampRow
from prunekit.training.optimizers import build_optimizer


class GradientClamps:
    """The gradient clamps that the settings ask for, as a context manager.

    Raises:
        UsageError: a glob matches nothing.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, settings: TrainSettings, scaler: torch.amp.GradScaler | None
    ) -> None:
        self._clamps: dict[str, tuple[GradientClamp, ClampSettings]] = {}
        self._entered = ExitStack()
        if (wanted := settings.clamp_activation_grad) is not None:
            activation = clamp_activation_grad(model, _limits(wanted), by=wanted.by, loss_scale=scaler)
            self._clamps["clamp_activation_grad"] = activation, wanted
        if (wanted := settings.clamp_weight_grad) is not None:
            weight = clamp_weight_grad(model, optimizer, _limits(wanted), by=wanted.by)
            self._clamps["clamp_weight_grad"] = weight, wanted

    def __enter__(self) -> Self:
        for clamp, _ in self._clamps.values():
            self._entered.enter_context(clamp)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.close()

    def state_dict(self) -> dict[str, Any]:
        """Return how often each was needed so far."""
        return {name: clamp.state_dict() for name, (clamp, _) in self._clamps.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counting from a state."""
        for name, (clamp, _) in self._clamps.items():
            clamp.load_state_dict(state[name])

    def counts(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Return by clamp and module path how many were beyond the limit so far, and of how many, in all processes."""
        return {name: _summed(gather_values(clamp.counts())) for name, (clamp, _) in self._clamps.items()}

    def rows(self) -> tuple[ClampRow, ...]:
        """Return one row for each module whose gradients were checked, over all processes."""
        return tuple(
            ClampRow(name, path, wanted.by, clamp.limits[path], beyond / total)
            for (name, (clamp, wanted)), counts in zip(self._clamps.items(), self.counts().values(), strict=True)
            for path, (beyond, total) in counts.items()
            if total
        )


def _summed(counts: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    beyond: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for count in counts:
        beyond.update({path: many for path, (many, _) in count.items()})
        totals.update({path: of for path, (_, of) in count.items()})
    return {path: (beyond[path], of) for path, of in totals.items()}


def check_clamps(model: nn.Module, settings: TrainSettings) -> None:
    """Raise UsageError, before anything is trained, if a glob of the clamps matches no module."""
    any_optimizer = build_optimizer(model, replace(settings, optimizer="sgd", nesterov=False))
    GradientClamps(model, any_optimizer, settings, None)


def _limits(settings: ClampSettings) -> float | Mapping[str, float]:
    return settings.limit if settings.modules is None else dict.fromkeys(settings.modules, settings.limit)
