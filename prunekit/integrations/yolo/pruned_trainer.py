"""Trainers of ultralytics that train pruned models, and plain model objects that use them.

`YOLO("pruned.pt").train(...)` would rebuild the dense model, which the mark of `pruned_yolo` refuses. Once this
module is imported, with `prunekit.integrations.ultralytics`, the same call trains the pruned model, also resumed, and
so does `tune`; of other models, ultralytics' methods do what they did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, wraps
from pathlib import Path
from typing import Any

from torch import nn
from ultralytics.engine import trainer as engine
from ultralytics.engine.model import Model
from ultralytics.engine.trainer import BaseTrainer
from ultralytics.models.yolo.classify import ClassificationTrainer
from ultralytics.models.yolo.world import WorldTrainer
from ultralytics.models.yolo.world.train import on_pretrain_routine_end

from prunekit.errors import ModelError, UsageError
from prunekit.integrations.yolo.pruned_yolo import KEY, forget_image_size, is_marked


class PrunedTrainer(BaseTrainer):  # type: ignore[misc]  # ultralytics has no types
    """Trainer whose model is a pruned one, where ultralytics would build a dense one from a configuration.

    A mixin in front of one of ultralytics' trainers, see `pruned_trainer`. All else is that trainer's: data, loss,
    optimizer, average of weights, checkpoints, resuming, and the start of several processes.
    """

    def get_model(self, cfg: Any = None, weights: nn.Module | None = None, verbose: bool = True) -> nn.Module:
        """Return a copy of the pruned model that `weights` is; `cfg` is not read."""
        if weights is None:
            raise UsageError(
                "train: expected the weights of the pruned model, got none; its structure is in the file of its "
                "weights alone, so leave out pretrained=False"
            )
        if not is_marked(weights):
            raise ModelError(
                "train: expected a pruned model, got a dense one; leave out pretrained=..., or train the dense one by "
                "ultralytics alone: YOLO('file.pt').train(...)"
            )
        if getattr(weights, "is_fused", lambda: False)():
            raise ModelError(
                "train: this model's norms are folded into its convolutions (fuse), so it can no longer be trained as "
                "before; load the file again that it was saved in"
            )
        model: nn.Module = deepcopy(weights).float()
        model.criterion = None  # type: ignore[assignment]  # as in a model that was just built
        forget_image_size(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".dfl" not in name)
        if isinstance(self, ClassificationTrainer):
            for module in model.modules():
                if isinstance(module, nn.Dropout) and self.args.dropout:
                    module.p = self.args.dropout
        else:
            _fit_classes(model, self.data)
        if isinstance(self, WorldTrainer) and on_pretrain_routine_end not in self.callbacks["on_pretrain_routine_end"]:
            self.add_callback("on_pretrain_routine_end", on_pretrain_routine_end)
        return model


@cache
def pruned_trainer(base: type[BaseTrainer]) -> type[BaseTrainer]:
    """Return one of ultralytics' trainers, or a subclass of the user's, with `PrunedTrainer` in front.

    Example:
        >>> from ultralytics.models.yolo.detect import DetectionTrainer
        >>> from prunekit.integrations.yolo.pruned_trainer import pruned_trainer
        >>> pruned_trainer(DetectionTrainer).__name__
        'PrunedDetectionTrainer'
    """
    return base if issubclass(base, PrunedTrainer) else type(f"Pruned{base.__name__}", (PrunedTrainer, base), {})


MOST_TEXTS = 80
"""Texts for one image in the training of an open vocabulary, as in ultralytics."""


def _fit_classes(model: Any, data: dict[str, Any]) -> None:
    """Give an open vocabulary the classes of the data; require of other heads that they have them."""
    head = model.model[-1]
    own, theirs = getattr(head, "nc", None), data["nc"]  # None of a classifier, whose trainer changes it
    if hasattr(model, "set_classes") and not getattr(head, "is_fused", False):
        head.nc = min(theirs, MOST_TEXTS)
    elif own is not None and own != theirs:
        raise ModelError(
            f"train: the head of the pruned model has {own} classes, and the data has {theirs}; train the dense model "
            "on this data first, and prune it then"
        )


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
