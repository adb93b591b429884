"""Trainers of ultralytics that keep the structure of a pruned model."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

from torch import nn
from ultralytics.engine.trainer import BaseTrainer
from ultralytics.models.yolo.classify import ClassificationTrainer
from ultralytics.models.yolo.world import WorldTrainer
from ultralytics.models.yolo.world.train import on_pretrain_routine_end

from prunekit.errors import ModelError, UsageError
from prunekit.integrations.yolo.head_outputs import forget_image_size
from prunekit.integrations.yolo.rebuild_guard import is_marked


class PrunedTrainer(BaseTrainer):  # type: ignore[misc]  # ultralytics has no types
    """Trainer whose model is a pruned one, where ultralytics would build a dense one from a configuration.

    A mixin in front of one of ultralytics' trainers, see `pruned_trainer`. All else is that trainer's: data, loss,
    optimizer, average of weights, checkpoints, resuming, and the start of several processes.
    """

    def get_model(self, cfg: Any = None, weights: nn.Module | None = None, verbose: bool = True) -> nn.Module:
        """Return a copy of the pruned model that `weights` is; `cfg` is not read.

        Raises:
            UsageError: there is none: `pretrained=False`.
            ModelError: it is not a pruned one, is fused, or has another number of classes than the data.
        """
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
            _set_dropout(model, self.args.dropout)
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


def _set_dropout(model: nn.Module, rate: float) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout) and rate:
            module.p = rate


MOST_TEXTS = 80
"""Texts for one image in the training of an open vocabulary, as in ultralytics."""


def _fit_classes(model: Any, data: dict[str, Any]) -> None:
    """Give an open vocabulary the classes of the data; require of other heads that they have them.

    A classifier's head is changed by its trainer.
    """
    head = model.model[-1]
    own, theirs = getattr(head, "nc", None), data["nc"]
    if hasattr(model, "set_classes") and not getattr(head, "is_fused", False):
        head.nc = min(theirs, MOST_TEXTS)
    elif own is not None and own != theirs:
        raise ModelError(
            f"train: the head of the pruned model has {own} classes, and the data has {theirs}; train the dense model "
            "on this data first, and prune it then"
        )
