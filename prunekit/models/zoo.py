"""Models by name: torchvision's classifiers, exactly torchvision's own, the CIFAR ResNets, and other packages' zoos."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, cast

import torch
import torchvision
from torch import nn

from prunekit.errors import ModelError, nearest
from prunekit.models.cifar import DEPTHS, CifarResNet
from prunekit.models.optional import OPTIONAL_ZOOS, optional_builder, optional_names
from prunekit.models.weights import SUFFIXES, load_weights
from prunekit.settings.model import ModelSettings

ZOOS: tuple[Literal["torchvision", "cifar"], ...] = ("torchvision", "cifar")
"""Those that are always there, in which a bare name is looked up."""
WITH_INIT_WEIGHTS = (torchvision.models.googlenet, torchvision.models.inception_v3)


def zoo_names(zoo: str = "torchvision") -> tuple[str, ...]:
    """Names of the classification models of a zoo, sorted.

    Raises:
        ModelError: the zoo's package is not installed.
    """
    if zoo in OPTIONAL_ZOOS:
        return optional_names(zoo)
    if zoo == "cifar":
        return tuple(sorted(DEPTHS))
    return tuple(torchvision.models.list_models(module=torchvision.models))


def build_model(settings: ModelSettings, *, num_classes: int | None) -> nn.Module:
    """Builds a model, in train mode on the CPU, with the weights asked for or random ones from torch's global seed.

    Args:
        settings: zoo, name, constructor arguments, weights.
        num_classes: classes of the data, used where `settings.arguments` has no `num_classes`; None leaves the
            constructor's own number (1000 as a rule, and 10 for CIFAR).

    Raises:
        ModelError: unknown name, arguments the constructor refuses, unknown weights, or weights that do not fit.
    """
    builder = _builder(settings)
    arguments = dict(settings.arguments)
    if num_classes is not None:
        arguments.setdefault("num_classes", num_classes)
    if settings.weights is None or is_weights_file(settings):
        model = _construct(settings, builder, arguments)
        if settings.weights is not None:
            load_weights(model, Path(settings.weights))
        return model
    return _pretrained(settings, builder, arguments)


def is_weights_file(settings: ModelSettings) -> bool:
    """Whether the weights are a file's, not a torchvision name."""
    return settings.weights is not None and Path(settings.weights).suffix in SUFFIXES


def missing_weights(settings: ModelSettings) -> str | None:
    """What is missing of the weights, where it was looked for and how to supply it; None when nothing is.

    Weights that torchvision knows by name are missing here until they have been downloaded once.
    """
    if settings.weights is None:
        return None
    origin = f"; {settings.origin}" if settings.origin else ""
    if is_weights_file(settings):
        path = Path(settings.weights)
        beside = "" if path.is_absolute() else ", nor beside the recipe that names it"
        found = f"there is no such file of weights{beside}; give its path as model.weights=FILE{origin}"
        return None if path.is_file() else f"model.weights: {path.absolute()}: {found}"
    if settings.zoo != "torchvision" or settings.name not in zoo_names():
        return None
    weights = torchvision.models.get_model_weights(settings.name).__members__.get(settings.weights)
    if weights is None or _cached(weights.url).is_file():
        return None
    return f"model.weights: {_to_download(weights.url)}{origin}"


def _cached(url: str) -> Path:
    return Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]


def _to_download(url: str) -> str:
    path = _cached(url)
    return (
        f"{path.name} is not in {path.parent}; it comes from {url}: put it there, or give a state dict as "
        "model.weights=FILE"
    )


def _builder(settings: ModelSettings) -> Callable[..., nn.Module]:
    name, zoo = settings.name, settings.zoo
    if zoo == "own":
        raise ModelError(f"model.zoo: {name!r} is its owner's code; give that as --model file.py:factory")
    if name not in zoo_names(zoo):
        other = next((f"it is in model.zoo={other}" for other in ZOOS if name in zoo_names(other)), None)
        raise ModelError(f"model.name: there is no model {name!r} in {zoo}; {other or nearest(name, zoo_names(zoo))}")
    if zoo == "cifar":
        return partial(CifarResNet, DEPTHS[name])
    if zoo in OPTIONAL_ZOOS:
        return optional_builder(zoo, name)
    return cast(Callable[..., nn.Module], torchvision.models.get_model_builder(name))


def _construct(settings: ModelSettings, builder: Callable[..., nn.Module], arguments: dict[str, Any]) -> nn.Module:
    if builder in WITH_INIT_WEIGHTS:
        arguments.setdefault("init_weights", True)  # torchvision's default, which it warns about unless it is said
    fixed = {"weights": None} if settings.zoo == "torchvision" else {}
    try:
        return builder(**fixed, **arguments)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise _refused(settings, arguments, error) from error


def _refused(settings: ModelSettings, arguments: dict[str, Any], error: Exception) -> ModelError:
    return ModelError(f"model.arguments: {settings.zoo}'s {settings.name} refuses {arguments}: {error}")


def _pretrained(settings: ModelSettings, builder: Callable[..., nn.Module], arguments: dict[str, Any]) -> nn.Module:
    named = settings.zoo == "torchvision"
    known = torchvision.models.get_model_weights(settings.name).__members__ if named else {}
    if settings.weights not in known:
        hint = nearest(str(settings.weights), known) if known else "it has none with names;"
        raise ModelError(
            f"model.weights: {settings.name} has no weights {settings.weights!r}; {hint} "
            f"A file must end in {', '.join(SUFFIXES)}"
        )
    weights = known[settings.weights]
    trained, asked = len(weights.meta["categories"]), arguments.get("num_classes")
    if asked not in (None, trained):
        raise ModelError(
            f"model.weights: {settings.weights} of {settings.name} knows {trained} classes, but the data has {asked}; "
            "give a state dict trained for these classes, or leave weights out and train a baseline"
        )
    try:
        return builder(weights=weights, **arguments)
    except OSError as error:
        raise ModelError(f"model.weights: {_to_download(weights.url)}; downloading it failed: {error}") from error
    except (UnpicklingError, EOFError) as error:
        path = _cached(weights.url)
        raise ModelError(f"model.weights: {path}: the file is damaged ({error}); remove it") from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise _refused(settings, arguments, error) from error
