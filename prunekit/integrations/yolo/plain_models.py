"""Plain model objects of ultralytics around a pruned model: `train`, also resumed, and `tune` keep its structure.

`YOLO("pruned.pt").train(...)` would rebuild the dense model, which the mark of `rebuild_guard` refuses. Once this
module is imported, with `prunekit.integrations.ultralytics`, the same call trains the pruned model; of other models,
ultralytics' methods do what they did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from torch import nn
from ultralytics.engine import trainer as engine
from ultralytics.engine.model import Model

from prunekit.errors import UsageError
from prunekit.integrations.yolo.pruned_trainer import pruned_trainer
from prunekit.integrations.yolo.rebuild_guard import KEY

STATE = "pruning.pt"
"""Name of the state of a training that prunes, beside its checkpoints."""
PRUNES = "prunes_while_training"
"""Attribute of an object whose callbacks prune."""
MULTIPLE = "MultiTrainer"
"""Name of the class by which ultralytics' tuner trains."""
Method = Callable[..., Any]


def keep_structure() -> None:
    """Make `train` and `tune` of ultralytics' model objects keep pruned models; once, however often it is called."""
    for name, around in (("train", _training), ("tune", _tuning)):
        method = getattr(Model, name)
        if not hasattr(method, KEY):
            setattr(Model, name, around(method))
            setattr(getattr(Model, name), KEY, True)


def _training(method: Method) -> Method:
    @wraps(method)
    def train(self: Model, trainer: Any = None, **arguments: Any) -> Any:
        if arguments.get("resume"):
            _require_attached(self, arguments["resume"])
        if _is_pruned(self):
            trainer = pruned_trainer(trainer or self._smart_load("trainer"))
        return method(self, trainer, **arguments)

    return train


def _tuning(method: Method) -> Method:
    @wraps(method)
    def tune(self: Model, use_ray: bool = False, *given: Any, **arguments: Any) -> Any:
        if not _is_pruned(self):
            return method(self, use_ray, *given, **arguments)
        if use_ray or not hasattr(engine, MULTIPLE):
            raise UsageError(
                "tune: this model is pruned, and the processes of Ray, or of this version of ultralytics, would "
                "rebuild it in its dense size; leave out use_ray, or call train(...) with the values to try"
            )
        with _training_here(pruned_trainer(self._smart_load("trainer"))):
            return method(self, use_ray, *given, **arguments)

    return tune


@contextmanager
def _training_here(trainer: type) -> Iterator[None]:
    """Have ultralytics' tuner train in this process, by a trainer, in place of processes of the command `yolo`."""
    before = getattr(engine, MULTIPLE)
    try:
        setattr(engine, MULTIPLE, lambda given, *rest, **named: before(given or trainer, *rest, **named))
        yield
    finally:
        setattr(engine, MULTIPLE, before)


def _is_pruned(yolo: Any) -> bool:
    """Return whether the model of an object was marked as pruned."""
    config = getattr(yolo.model, "yaml", None) if isinstance(yolo.model, nn.Module) else None
    return isinstance(config, dict) and KEY in config


def _require_attached(yolo: Any, resumed: Any) -> None:
    """Raise where a training that pruned would be resumed without pruning."""
    path = yolo.ckpt_path if resumed is True else resumed
    attached = any(
        hasattr(getattr(callback, "__self__", None), PRUNES)
        for callbacks in yolo.callbacks.values()
        for callback in callbacks
    )
    if isinstance(path, (str, Path)) and (Path(path).parent / STATE).is_file() and not attached:
        raise UsageError(
            f"{path}: this training prunes while it trains, and would go on without: attach it before, "
            "PruneWhileTraining(...).attach(yolo) with the same arguments, or train from its weights without resume"
        )
