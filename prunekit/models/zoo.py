"""torchvision's classifiers by name, with the architecture exactly torchvision's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torchvision
from torch import nn

from prunekit.errors import ModelError, nearest
from prunekit.models.settings import ModelSettings
from prunekit.models.weights import SUFFIXES, load_weights

WITH_INIT_WEIGHTS = (torchvision.models.googlenet, torchvision.models.inception_v3)


def zoo_names() -> tuple[str, ...]:
    """Names of the classification models of torchvision, sorted."""
    return tuple(torchvision.models.list_models(module=torchvision.models))


def build_model(settings: ModelSettings, *, num_classes: int | None) -> nn.Module:
    """Builds a model, in train mode on the CPU, with the weights asked for or random ones from torch's global seed.

    Args:
        settings: name, constructor arguments, weights.
        num_classes: classes of the data, used where `settings.arguments` has no `num_classes`; None leaves the
            constructor's own number (1000).

    Raises:
        ModelError: unknown name, arguments the constructor refuses, unknown weights, or weights that do not fit.
    """
    builder = _builder(settings.name)
    arguments = dict(settings.arguments)
    if num_classes is not None:
        arguments.setdefault("num_classes", num_classes)
    if settings.weights is None:
        return _construct(settings.name, builder, arguments)
    path = Path(settings.weights)
    if path.suffix in SUFFIXES:
        model = _construct(settings.name, builder, arguments)
        load_weights(model, path)
        return model
    return _pretrained(settings, builder, arguments)


def _builder(name: str) -> Any:
    if name not in zoo_names():
        raise ModelError(f"model.name: there is no model {name!r} in torchvision; {nearest(name, zoo_names())}")
    return torchvision.models.get_model_builder(name)


def _construct(name: str, builder: Any, arguments: dict[str, Any]) -> nn.Module:
    if builder in WITH_INIT_WEIGHTS:
        arguments.setdefault("init_weights", True)  # torchvision's default, which it warns about unless it is said
    try:
        return cast(nn.Module, builder(weights=None, **arguments))
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ModelError(f"model.arguments: torchvision's {name} refuses {arguments}: {error}") from error


def _pretrained(settings: ModelSettings, builder: Any, arguments: dict[str, Any]) -> nn.Module:
    names = list(torchvision.models.get_model_weights(builder).__members__)
    if settings.weights not in names:
        hint = nearest(str(settings.weights), names) if names else "this model has none"
        raise ModelError(
            f"model.weights: {settings.name} has no weights {settings.weights!r}; {hint} "
            f"A file must end in {', '.join(SUFFIXES)}"
        )
    weights = torchvision.models.get_model_weights(builder)[settings.weights]
    trained, asked = len(weights.meta["categories"]), arguments.get("num_classes")
    if asked not in (None, trained):
        raise ModelError(
            f"model.weights: {settings.weights} of {settings.name} knows {trained} classes, but the data has {asked}; "
            "give a state dict trained for these classes, or leave weights out and train a baseline"
        )
    try:
        return cast(nn.Module, builder(weights=weights, **arguments))
    except OSError as error:
        raise ModelError(f"model.weights: {weights.url} cannot be downloaded ({error}); give a file instead") from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(f"model.arguments: torchvision's {settings.name} refuses {arguments}: {error}") from error
