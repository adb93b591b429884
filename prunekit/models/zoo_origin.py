"""The origin of a model: which model of a zoo it is, found by its class and the shapes of its dense tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from prunekit.channels.rewrite.source_rewriter import original_of
from prunekit.errors import PrunekitError
from prunekit.hooks.model_copy import named_tensors
from prunekit.models import hugging_face
from prunekit.models.cifar import DEPTHS, CifarResNet
from prunekit.models.zoo import build_model, zoo_names
from prunekit.settings.inputs import ModelSettings
from prunekit.utils.context import seeded

Shapes = Mapping[str, tuple[int, ...]]


def zoo_origins(model: nn.Module, shapes: Shapes) -> Iterator[ModelSettings]:
    """Yield models of zoos that have the class of a model, and dense tensors of its shapes; the likeliest first.

    They may still compute something else, by another stride or rate of dropout: the caller compares.

    Args:
        shapes: of the dense model's parameters and buffers, by name.
    """
    for settings in zoo_candidates(model):
        built = None
        with suppress(Exception), seeded(0), torch.device("meta"):
            built = build_model(settings, num_classes=None)
        if built is None:  # a constructor that looks at its weights
            with suppress(PrunekitError), seeded(0):
                built = build_model(settings, num_classes=None)
        if built is not None and _has(built, shapes):
            yield settings


def _has(built: nn.Module, shapes: Shapes) -> bool:
    found = {name: tuple(tensor.shape) for name, tensor in named_tensors(built)}
    return all(found.get(name) == tuple(shape) for name, shape in shapes.items())


def zoo_candidates(model: nn.Module) -> Iterator[ModelSettings]:
    """Yield settings of models of zoos that have the class of a model, dense or compact; nothing is built."""
    cls = original_of(type(model))
    home, classes = cls.__module__, _last_size(model)
    if cls is CifarResNet:
        for name in DEPTHS:
            yield from _with_classes(name, "cifar", classes)
    elif home.startswith("torchvision.models."):
        for name in zoo_names():
            if torchvision.models.get_model_builder(name).__module__ == home:
                yield from _with_classes(name, "torchvision", classes)
    elif home.startswith("ultralytics.nn.tasks") and isinstance(getattr(model, "yaml", None), dict):
        given: Any = model.yaml
        yield ModelSettings(
            Path(str(given.get("yaml_file"))).stem, "ultralytics", arguments={"num_classes": given.get("nc")}
        )
    elif isinstance(getattr(model, "pretrained_cfg", None), dict) and "timm" in sys.modules:
        name = str(model.pretrained_cfg.get("architecture"))  # type: ignore[operator,union-attr]
        yield from _with_classes(name, "timm", getattr(model, "num_classes", None))
    elif hasattr(model, "config") and "transformers" in sys.modules:
        found = hugging_face.settings_of(model, cls)
        if found is not None:
            yield found


def _with_classes(name: str, zoo: Any, classes: int | None) -> Iterator[ModelSettings]:
    yield ModelSettings(name, zoo)
    if isinstance(classes, int):
        yield ModelSettings(name, zoo, arguments={"num_classes": classes})


def _last_size(model: nn.Module) -> int | None:
    """Return the first size of the last parameter, which is the number of classes of most classifiers."""
    last = next(reversed([*model.parameters()]), None)
    return None if last is None or not last.dim() else len(last)
