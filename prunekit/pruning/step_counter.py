"""The steps of an optimizer, counted where it makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from prunekit.errors import UsageError
from prunekit.hooks.hook import OwnedHook
from prunekit.hooks.owner import HookOwner


class StepCounter(HookOwner):
    """The number of steps that an optimizer has made.

    Attributes:
        tried: with those that a GradScaler skipped.
        told: whether the pruner's `step` was ever called.
    """

    def __init__(self, optimizer: Optimizer, last: int) -> None:
        super().__init__()
        self._optimizer, self._last = optimizer, last
        self.begin_at(0)
        self.told = False

    def begin_at(self, step: int) -> None:
        """Go on counting from a step."""
        self.tried, self._skipped = step, torch.zeros(())
        self.told = step > 0

    def register(self) -> None:
        """Register hooks before and after the optimizer's step."""
        self.own(self._optimizer.register_step_pre_hook(OwnedHook(self, self._before)))
        self.own(self._optimizer.register_step_post_hook(OwnedHook(self, self._after)))

    def _before(self, *_: Any) -> None:
        if self.tried > self._last and not self.told:
            raise UsageError(
                f"the schedule's {self._last} steps are over, and pruner.step() was never called, so nothing was "
                "pruned; call it after optimizer.step()"
            )

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self.tried += 1
        skipped: Tensor | None = getattr(optimizer, "found_inf", None)  # of a fused one, which skips in its step
        if skipped is not None:
            self._skipped = self._skipped.to(skipped.device) + (skipped.detach() != 0).sum()

    @property
    def made(self) -> int:
        """The number of steps that were not skipped; waits for the device."""
        return self.tried - int(self._skipped)
