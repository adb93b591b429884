"""A model object of ultralytics around a pruned model."""

from __future__ import annotations

from functools import cache
from typing import Any, Self

from torch import nn
from ultralytics.engine.model import Model

from prunekit.integrations.yolo.head_outputs import forget_image_size
from prunekit.integrations.yolo.rebuild_guard import Left, mark, what_is_left
from prunekit.planning.plan import Plan
from prunekit.pruning.pruned import Pruned
from prunekit.utils.display import count, share

OF_A_RUN = ("model", "ema", "optimizer", "best_fitness", "stopper", "updates", "scaler", "modelopt", "train_results")
"""Entries of a checkpoint that belong to the model or the run that it was saved in."""


class PrunedYOLO(Model):  # type: ignore[misc]  # ultralytics has no types
    """Model object of ultralytics around a pruned model, whose trainer keeps the pruned structure.

    A mixin in front of the class that was pruned (`YOLO`, `RTDETR`, `YOLOWorld`, `YOLOE`), so that all else is that
    class's: `val`, `predict`, `save`, `export`, `track`. What it saves is loaded by ultralytics alone: `YOLO(path)`.

    Attributes:
        pruned: what `prunekit.prune` returned; None where the model was loaded from a file.
        plan: that it was pruned by; None where the model was loaded from a file.
        notes: remarks of the integration, besides those in `pruned`.
    """

    pruned: Pruned | None = None
    plan: Plan | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def around(cls, yolo: Model, model: nn.Module | None = None, pruned: Pruned | None = None) -> Self:
        """Return such an object, with the settings and callbacks of another, which is left as it is.

        Args:
            yolo: the object whose class, task, settings and callbacks it takes over.
            model: a pruned model, already marked; None: the one in `yolo`.
            pruned: the result that it comes from.
        """
        given: Any = type(yolo)
        kind = pruned_class(given)
        made = kind.__new__(kind)
        made.__dict__ = {**yolo.__dict__, "_modules": dict(yolo.__dict__["_modules"])}
        made.callbacks = {event: list(all_of) for event, all_of in yolo.callbacks.items()}
        made.overrides = dict(yolo.overrides)
        if model is not None:
            made.model = model
            made.ckpt = {"epoch": -1} | {key: value for key, value in (yolo.ckpt or {}).items() if key not in OF_A_RUN}
            made.ckpt.setdefault("train_args", dict(model.args) if isinstance(model.args, dict) else vars(model.args))
            made.ckpt_path = None
        made.predictor = made.trainer = made.metrics = None
        made.pruned, made.plan = pruned, None if pruned is None else pruned.plan
        return made

    def _headline(self) -> str:
        left = ", ".join(f"{name} {share(kept / (dense or 1))}" for name, (dense, kept) in self._left().items())
        return f"{type(self).__name__} ({self.task}) with {left} left"

    def _left(self) -> Left:
        return what_is_left(self.model)

    def __repr__(self) -> str:
        return self._headline()

    def __str__(self) -> str:
        """Return what is left, and the result of `prunekit.prune` where the model comes from one."""
        if self.pruned is not None:
            return "\n".join((self._headline(), "", str(self.pruned), *self.notes))
        rows = (f"{name}: {count(dense)} -> {count(kept)}" for name, (dense, kept) in self._left().items())
        return "\n".join((self._headline(), *rows))


@cache
def pruned_class(base: Any) -> type[PrunedYOLO]:
    """Return a class of ultralytics with `PrunedYOLO` in front."""
    return base if issubclass(base, PrunedYOLO) else type(f"Pruned{base.__name__}", (PrunedYOLO, base), {})


def marked(dense: Any, small: Any, left: Left) -> nn.Module:
    """Return a pruned model, marked, and ready for any image size and for training.

    Args:
        dense: the model that it comes from.
        small: the pruned model; changed.
        left: see `rebuild_guard.mark`.
    """
    mark(small, left)
    forget_image_size(small)
    small.args = dict(dense.args) if isinstance(dense.args, dict) else dense.args
    ready: nn.Module = small.eval()
    return ready
