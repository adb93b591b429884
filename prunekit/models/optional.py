"""Zoos of other packages: timm's models, and image classifiers of transformers by model type. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from typing import Any, Literal, get_args

from torch import nn

from prunekit.errors import ModelError, nearest

OptionalZoo = Literal["timm", "hf"]
OPTIONAL_ZOOS: tuple[OptionalZoo, ...] = get_args(OptionalZoo)
PACKAGES: dict[str, str] = {"timm": "timm", "hf": "transformers"}
OF_WEIGHTS = frozenset({"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"})
"""Arguments by which timm would fetch or unpickle weights: those come from `model.weights` alone."""


def package(zoo: str) -> Any:
    """The package of an optional zoo.

    Raises:
        ModelError: it is not installed; the message names the extra that brings it.
    """
    try:
        return import_module(PACKAGES[zoo])
    except ModuleNotFoundError as error:
        raise ModelError(
            f"model.zoo={zoo} needs the package {PACKAGES[zoo]}, which is not installed: pip install prunekit[{zoo}]"
        ) from error


def optional_names(zoo: str) -> tuple[str, ...]:
    """Names of timm's models; of transformers, the model types that have an image classifier.

    Raises:
        ModelError: the package is not installed.
    """
    if zoo == "timm":
        return tuple(sorted(package(zoo).list_models()))
    package(zoo)
    known = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    return tuple(sorted(set(known) - {"timm_wrapper"}))  # which is a model of timm's by another name


def optional_builder(zoo: str, name: str) -> Callable[..., nn.Module]:
    """What builds a model of an optional zoo with random weights; the name is one of `optional_names`."""
    return _timm(name) if zoo == "timm" else _hf(name)


def _timm(name: str) -> Callable[..., nn.Module]:
    def build(**arguments: Any) -> nn.Module:
        refused = OF_WEIGHTS & arguments.keys()
        if refused:
            raise ValueError(f"{min(refused)}: weights come from model.weights")
        model: nn.Module = package("timm").create_model(name, pretrained=False, **arguments)
        return model

    return build


def _hf(name: str) -> Callable[..., nn.Module]:
    def build(num_classes: int | None = None, **arguments: Any) -> nn.Module:
        transformers = package("hf")
        # Fields of every configuration, and what is in none, may name code to fetch; a model's own say its sizes.
        own = {field.name for field in fields(transformers.CONFIG_MAPPING[name])}
        known = own - {field.name for field in fields(transformers.PreTrainedConfig)}
        for key in arguments:
            if key not in known:
                raise ValueError(f"there is no {key!r} in the configuration of {name}; {nearest(key, sorted(known))}")
        labels = {} if num_classes is None else {"num_labels": num_classes}
        try:
            config = transformers.AutoConfig.for_model(name, **arguments, **labels)
        except Exception as error:  # its validation has a family of errors of its own
            raise ValueError(str(error)) from error
        model: nn.Module = transformers.AutoModelForImageClassification.from_config(config)
        return model

    return build


def image_shape(model: nn.Module) -> tuple[int, ...] | None:
    """The shape (channels, height, width) of images that a model of these zoos says it was made for; None if not."""
    made_for = getattr(model, "pretrained_cfg", None)
    if isinstance(made_for, dict) and "input_size" in made_for:
        return tuple(made_for["input_size"])
    config = getattr(model, "config", None)
    size = getattr(config, "image_size", 224)
    return None if config is None else (config.num_channels, *([size, size] if isinstance(size, int) else size))
