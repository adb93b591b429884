"""Preprocessing and classes of a zoo's weights, as the zoo publishes them: torchvision's presets, timm's configuration.

One thing differs from there: an image of exactly the input's size is taken as it is, not enlarged and cropped again.
"""

from __future__ import annotations

import math
from typing import Any

import torchvision
from torch import nn

from prunekit.errors import SettingsError
from prunekit.models.preprocessing import Preprocessing
from prunekit.models.zoo import package, zoo_names
from prunekit.settings.inputs import ModelSettings


def published(settings: ModelSettings, model: nn.Module) -> tuple[Preprocessing | None, tuple[str, ...]]:
    """Return the preprocessing that a zoo's model is evaluated with, and the names of its classes, as far as known."""
    if settings.zoo == "timm":
        return timm_preprocessing(model), ()
    if settings.zoo != "torchvision" or settings.weights is None or settings.name not in zoo_names():
        return None, ()
    known = torchvision.models.get_model_weights(settings.name).__members__
    return torchvision_weights(known[settings.weights]) if settings.weights in known else (None, ())


def torchvision_weights(weights: Any) -> tuple[Preprocessing | None, tuple[str, ...]]:
    """Return the preprocessing and the classes of weights of torchvision; None for presets of other tasks.

    Example:
        >>> from torchvision.models import ResNet18_Weights
        >>> feed, classes = torchvision_weights(ResNet18_Weights.DEFAULT)
        >>> feed.height, feed.shorter_side, classes[0]
        (224, 256, 'tench')
    """
    preset, classes = weights.transforms(), tuple(map(str, weights.meta.get("categories") or ()))
    if type(preset).__name__ != "ImageClassification":
        return None, classes
    (height, width), (shorter,) = _pair(preset.crop_size), preset.resize_size
    return _preprocessing(height, width, shorter, preset.interpolation.value, preset.mean, preset.std), classes


def timm_preprocessing(model: nn.Module) -> Preprocessing | None:
    """Return the preprocessing in the configuration of a model of timm; None if it has none, or another one."""
    if not isinstance(getattr(model, "pretrained_cfg", None), dict):
        return None
    found = package("timm").data.resolve_data_config({}, model=model)
    (channels, height, width), kind = found["input_size"], found["interpolation"]
    mean, std = tuple(found["mean"])[:channels], tuple(found["std"])[:channels]
    if found["crop_mode"] == "squash":
        return _preprocessing(height, width, None, kind, mean, std) if found["crop_pct"] == 1 else None
    if found["crop_mode"] != "center" or height != width:
        return None
    return _preprocessing(height, width, math.floor(height / found["crop_pct"]), kind, mean, std)


def _preprocessing(
    height: int, width: int, shorter: int | None, kind: str, mean: Any, std: Any
) -> Preprocessing | None:
    try:
        return Preprocessing(height, width, shorter, kind, tuple(mean), tuple(std))  # type: ignore[arg-type]
    except SettingsError:  # more than three channels, or an interpolation that it does not know
        return None


def _pair(size: Any) -> tuple[int, int]:
    given = list(size)
    return given[0], given[-1]
