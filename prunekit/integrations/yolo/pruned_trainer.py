"""Trainers of ultralytics that train pruned models, and plain model objects that use them.

`YOLO("pruned.pt").train(...)` would rebuild the dense model, which the mark of `pruned_yolo` refuses. Once this
module is imported, with `prunekit.integrations.ultralytics`, the same call trains the pruned model, also resumed, and
so does `tune`; of other models, ultralytics' methods do what they did.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from ultralytics.engine import trainer as engine
from ultralytics.engine.model import Model
from ultralytics.engine.trainer import BaseTrainer
from ultralytics.models.yolo.classify import ClassificationTrainer
from ultralytics.models.yolo.world import WorldTrainer
from ultralytics.models.yolo.world.train import on_pretrain_routine_end
from ultralytics.utils import LOGGER, RANK
from ultralytics.utils.patches import torch_load
from ultralytics.utils.torch_utils import unwrap_model

from prunekit.errors import ModelError, UsageError
from prunekit.integrations.yolo.pruned_yolo import KEY, forget_image_size, is_marked
from prunekit.repair.batchnorm_statistics import rebase_batchnorm
from prunekit.utils.context import restored, same_random_state


class PrunedTrainer(BaseTrainer):  # type: ignore[misc]  # ultralytics has no types
    """Trainer whose model is a pruned one, where ultralytics would build a dense one from a configuration.

    A mixin in front of one of ultralytics' trainers, see `pruned_trainer`. All else is that trainer's: data, loss,
    optimizer, average of weights, checkpoints, resuming, and the start of several processes.

    The model as given is validated too, before the first step, and is `best.pt` until an epoch's fitness is strictly
    better: what a training delivers is never worse than what it began with. Not so with `val=False` or `save=False`,
    where ultralytics chooses no best epoch, and of a model that is pruned further while it trains.

    Before the first step BatchNorm takes the statistics of the first batch, and the model computes what it did: see
    `rebase_batchnorm`.
    """

    _begun = False
    _given: dict[str, Tensor] | None = None  # the state of the model as given, until it is offered; None if unchanged
    _offered = False
    _beaten = True

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

    def preprocess_batch(self, batch: Any) -> Any:
        """Return what the trainer does; the first batch's statistics are those that BatchNorm begins with."""
        batch = super().preprocess_batch(batch)
        if not self._begun and self.ema is not None:  # else it is only set up
            self._begin(batch["img"])
            self._begun = True
        return batch

    def _begin(self, images: Tensor) -> None:
        """Let BatchNorm take the statistics of the first batch."""
        model = unwrap_model(self.model)
        # An open vocabulary computes with texts that it is given in training alone.
        if self.start_epoch or _prunes(self.callbacks) or hasattr(model, "set_classes"):
            return
        given = deepcopy(model.state_dict()) if self._offers else None
        with same_random_state(), restored(model.modules(), "training"), torch.no_grad():
            model.eval()
            rebase_batchnorm(model, (True for _ in map(model, [images])))
        forget_image_size(model)
        self.ema.ema.load_state_dict(model.state_dict())
        self._given = given

    @property
    def _offers(self) -> bool:
        """Whether the model as given is a candidate for the best."""
        return self.start_epoch == 0 and self.args.val and self.args.save and not _prunes(self.callbacks)

    def optimizer_step(self) -> None:
        """Make a step; before the first one, offer the model as given as the best."""
        if not self._offered:
            self._offered = True
            if self._offers:
                self._offer_start()
        super().optimizer_step()

    def _offer_start(self) -> None:
        """Write the model as given as the best so far, with its metrics."""
        average, given = self.ema.ema, self._given
        begun, self._given = deepcopy(average.state_dict()), None
        if given is not None:
            average.load_state_dict(given)
        with same_random_state():
            metrics, fitness = self.validate()
        if fitness is not None and not math.isfinite(fitness):
            self.best_fitness = None
        elif fitness is not None:  # as it is in processes that write nothing
            state = {"epoch": START, "fitness": fitness, "metrics": metrics, "last": self.best, "save_period": -1}
            with _holding(self, state):
                super().save_model()
        average.load_state_dict(begun)

    def validate(self) -> Any:
        """Return what the trainer does, and note whether the fitness is above the best so far."""
        before = self.best_fitness
        metrics, fitness = super().validate()
        self._beaten = before is None or fitness is None or before < fitness
        return metrics, fitness

    def save_model(self) -> Any:
        """Save as the trainer does, but leave `best.pt` where the epoch is only as good."""
        with _holding(self, {} if self._beaten else {"best": self.last}):
            return super().save_model()

    def final_eval(self) -> None:
        """Evaluate `best.pt`, and say if it is the model as given."""
        if RANK in {-1, 0} and self.best.exists():
            saved = torch_load(self.best, map_location="cpu")
            if saved["epoch"] == START and saved.get("ema") is not None:  # which files of finished trainings lack
                LOGGER.info(
                    f"No epoch's fitness was above {saved['train_metrics']['fitness']:.4g}, that of the pruned model "
                    "as it was given, so best.pt is that model, in the half precision that ultralytics saves."
                )
        super().final_eval()


START = -1
"""Epoch of the model as given, in its checkpoint."""


@contextmanager
def _holding(trainer: BaseTrainer, state: dict[str, Any]) -> Iterator[None]:
    """Set attributes of a trainer for a while."""
    with restored([trainer], *state):
        vars(trainer).update(state)
        yield


@cache
def pruned_trainer(base: type[BaseTrainer]) -> type[BaseTrainer]:
    """Return `PrunedDetectionTrainer` for `DetectionTrainer`, and likewise for each trainer, also of the user's own."""
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
    with restored([engine], MULTIPLE):
        setattr(engine, MULTIPLE, lambda given, *rest, **named: before(given or trainer, *rest, **named))
        yield


def _is_pruned(yolo: Any) -> bool:
    """Return whether the model of an object was marked as pruned."""
    config = getattr(yolo.model, "yaml", None) if isinstance(yolo.model, nn.Module) else None
    return isinstance(config, dict) and KEY in config


def _prunes(callbacks: dict[str, list[Method]]) -> bool:
    """Return whether a model is pruned while it trains with these callbacks."""
    every = (callback for of_event in callbacks.values() for callback in of_event)
    return any(hasattr(getattr(callback, "__self__", None), PRUNES) for callback in every)


def _require_attached(yolo: Any, resumed: Any) -> None:
    """Raise where a training that pruned would be resumed without pruning."""
    path = yolo.ckpt_path if resumed is True else resumed
    if isinstance(path, (str, Path)) and (Path(path).parent / STATE).is_file() and not _prunes(yolo.callbacks):
        raise UsageError(
            f"{path}: this training prunes while it trains, and would go on without: attach it before, "
            "PruneWhileTraining(...).attach(yolo) with the same arguments, or train from its weights without resume"
        )
