"""The common part of callbacks for trainers: a pruner, made once the trainer has its optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from prunekit.errors import UsageError
from prunekit.hooks.wrappers import unwrapped
from prunekit.planning.plan import Plan
from prunekit.pruning.pruner import Pruner
from prunekit.settings.pruning import ScheduleSettings

MADE_HERE = ("model", "optimizer", "average")
"""Arguments of `Pruner` that a callback takes from its trainer."""


class PrunesInTrainer:
    """Base of callbacks: what they were given, and the pruner of the training that they are in."""

    def __init__(self, example: Any = None, *, steps: float | None = None, begin: float = 0, **arguments: Any) -> None:
        for name in MADE_HERE:
            if name in arguments:
                raise UsageError(f"{name}: expected none, because the callback takes it from its trainer")
        for name, value in (("steps", steps), ("begin", begin)):
            if isinstance(value, float) and not 0 <= value <= 1:
                raise UsageError(
                    f"{name}: expected a whole number of optimizer steps, or a share of the training in 0..1, "
                    f"got {value:g}"
                )
        self.example, self.steps, self.begin, self.arguments = example, steps, begin, arguments
        self._pruner: Pruner | None = None
        self._model: nn.Module | None = None
        self._small: nn.Module | None = None
        self._saved: Mapping[str, Any] | None = None
        self._asked: dict[str, int] = {}
        self._figures: tuple[int, dict[str, float]] = (-1, {})

    @property
    def pruner(self) -> Pruner:
        """The pruner of the training; a `UsageError` if none has begun."""
        if self._pruner is None:
            raise UsageError(
                f"{type(self).__name__}: expected a training that has begun with this callback in this process; give "
                "the callback to the trainer, and train (strategies such as ddp_spawn train in processes of their own)"
            )
        return self._pruner

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.pruner.plan

    @property
    def is_open(self) -> bool:
        """True from the beginning of a training until `finish`."""
        return self._pruner is not None and self._small is None

    def _begin(
        self,
        model: nn.Module,
        optimizer: Any,
        total: float,
        example: Any,
        average: AveragedModel | None = None,
        *,
        anew: bool = False,
    ) -> None:
        """Make the pruner of a training that begins, or go on with the pruner of the training before."""
        inner = unwrapped(model)
        known = self._small if self._small is not None else self._model
        if self.is_open and anew:
            self._pause()
            self._saved, self._figures = None, (-1, {})
        elif known is not None and inner is not known:
            done = "has finished with" if self._small is not None else "prunes"
            raise UsageError(
                f"{type(self).__name__}: this one {done} another {type(known).__name__} than the "
                f"{type(inner).__name__} that the trainer has now; make a callback for each model"
            )
        elif self._small is not None:
            return  # the compact model is trained further
        elif self.is_open:
            kept = None if self._saved is None else self._saved["pruner"]["masks"]["keep"].numpy()
            if kept is not None and kept.shape == self.plan.keep.shape and (kept & ~self.plan.keep).any():
                raise UsageError(
                    f"{type(self).__name__}: this checkpoint has channels that the model has lost since, and whose "
                    "weights were zeroed as it was loaded; go on from it with a new model, trainer and callback"
                )
            self._pause()
        saved, self._saved = self._saved, None
        self._asked = self._scheduled(total, saved)
        arguments = {**self.arguments, **self._asked} | ({} if average is None else {"average": average})
        self._pruner, self._model = Pruner(inner, optimizer, example, **arguments), inner
        if saved is not None:
            self._pruner.load_state_dict(saved["pruner"])

    def _pause(self) -> None:
        """Leave the masks until the next training, which goes on from the state now, or from that of a checkpoint."""
        self._saved = self._state() if self._saved is None else self._saved
        self.pruner.close(restore=False)
        self._pruner = None

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the pruner's state, and `steps` and `begin` in steps of the optimizer."""
        return {"scheduled": dict(self._asked), "pruner": self.pruner.state_dict()}

    def _scheduled(self, total: float, saved: Mapping[str, Any] | None) -> dict[str, int]:
        """Return `steps` and `begin` in steps of the optimizer; shares are those of the training that began first."""
        known = {} if saved is None else saved["scheduled"]

        def counted(name: str, value: float | None, share: float) -> int:
            if isinstance(value, int):
                return value
            if name in known:
                return int(known[name])
            if not total < math.inf:
                raise UsageError(
                    f"{name}: expected a whole number of optimizer steps, because nobody knows the length of this "
                    f"training before it ends, got {'none' if value is None else f'the share {value:g}'}"
                )
            return round(share * total)

        begin = counted("begin", self.begin, self.begin)
        schedule = self.arguments.get("schedule", "cubic")
        settled = isinstance(schedule, ScheduleSettings)
        once = (schedule.kind if settled else schedule) == "oneshot"
        if self.steps is None and (once or (settled and schedule.end is not None)):
            return {"begin": begin}
        rest = (begin / total + 1) / 2  # halfway from begin to the end of the training
        steps = counted("steps", self.steps, rest if self.steps is None else self.steps)
        return {"begin": begin, "steps": max(1, steps)}

    def _step(self) -> bool:
        """Put the next plan in force if its step is reached, and return whether channels were removed or came back."""
        before = len(self.pruner.changes)
        self.pruner.step()
        return any(change.pruned or change.regrown for change in self.pruner.changes[before:])

    def figures(self) -> dict[str, float]:
        """Return what a logger shows: `sparsity`, the share of weights that are zero, and the shares that are left."""
        changes = self.pruner.changes
        if self._figures[0] != len(changes):
            left = changes[-1].shares if changes else {}
            shares = {f"{name}_left": share for name, (_, share) in left.items()}
            self._figures = len(changes), {"sparsity": self.pruner.sparsity.weights} | shares
        return dict(self._figures[1])

    def _finish(self, early: bool) -> nn.Module:
        """Return the compact model, and remember it."""
        self._small, _ = self.pruner.finish(early=early)
        return self._small
