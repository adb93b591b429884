"""Names of models and files of weights, and what is wrong with them: known before torch is imported."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from prunekit.errors import ModelError, nearest
from prunekit.utils.availability import package_folders

if TYPE_CHECKING:
    from prunekit.settings.inputs import ModelSettings

DEPTHS = {f"resnet{depth}": depth for depth in (8, 20, 32, 44, 56, 110)}
"""Layers of the CIFAR ResNets, by name."""
ZOOS: tuple[Literal["torchvision", "cifar"], ...] = ("torchvision", "cifar")
"""The zoos that are always installed, in which a bare name is looked up."""
SUFFIXES = (".safetensors", ".pt", ".pth", ".th")
"""Ends of the names of files of weights."""
CONFIG = "config.json"
"""The configuration in a folder of transformers."""
_REGISTERED = re.compile(r'^@register_model\((?:name=)?(?:"(\w+)")?\)\n(?:[@ )][^\n]*\n)*?def (\w+)\(', re.MULTILINE)
"""A function that torchvision registers as a model, with the name that it may be given."""


@cache
def torchvision_names(folder: str = "") -> tuple[str, ...]:
    """Return the names of torchvision's models, sorted, as its source registers them; `detection`: its detectors."""
    files = [file for place in package_folders("torchvision") for file in (place / "models" / folder).glob("*.py")]
    found = [pair for file in files for pair in _REGISTERED.findall(file.read_text(encoding="utf-8"))]
    if found:
        return tuple(sorted(given or function for given, function in found))
    from torchvision import models  # installed without its source

    return tuple(models.list_models(module=getattr(models, folder) if folder else models))


def bare_names(zoo: str) -> tuple[str, ...]:
    """Return the names of a zoo in `ZOOS`, sorted; of torchvision, its classifiers and then its detectors."""
    return tuple(sorted(DEPTHS)) if zoo == "cifar" else (*torchvision_names(), *torchvision_names("detection"))


def require_bare_name(name: str, zoo: str) -> None:
    """Raise a `ModelError` if a zoo that is always installed has no model of this name; do nothing for other zoos."""
    if zoo in ZOOS and name not in bare_names(zoo):
        raise unknown_name(name, zoo, bare_names(zoo))


def unknown_name(name: str, zoo: str, names: tuple[str, ...]) -> ModelError:
    """Return the error of a name that is not among the names of a zoo."""
    other = next((f"it is in model.zoo={other}" for other in ZOOS if name in bare_names(other)), None)
    return ModelError(f"model.name: there is no model {name!r} in {zoo}; {other or nearest(name, names)}")


def zoo_of(name: str) -> Literal["torchvision", "cifar"]:
    """Return the zoo of a bare name on a command line, where a path or a recipe could stand too."""
    zoo = next((zoo for zoo in ZOOS if name in bare_names(zoo)), None)
    if zoo is not None:
        return zoo
    near = nearest(name, [known for zoo in ZOOS for known in bare_names(zoo)])
    if ".py" in name:
        hint = "give your own model as --model file.py:factory"
    else:  # if no name is near, it was a path: a list of model names would not help
        hint = near if near.startswith("did you mean") else "there is no such file, folder or model"
    raise ModelError(
        f"{name!r}: expected a recipe, a model folder, or the name of a torchvision or CIFAR model; {hint}"
    )


def is_weights_file(settings: ModelSettings) -> bool:
    """Return whether the weights are a file's, not a torchvision name."""
    return settings.weights is not None and Path(settings.weights).suffix in SUFFIXES


def missing_file(settings: ModelSettings) -> str | None:
    """Return which file of weights, or which folder of transformers, is missing, and how to get it; None if none."""
    if (missing := missing_folder(settings)) is not None or not is_weights_file(settings):
        return missing
    path, origin = Path(str(settings.weights)), f"; {settings.origin}" if settings.origin else ""
    beside = "" if path.is_absolute() else ", nor beside the recipe that names it"
    found = f"there is no such file of weights{beside}; give its path as model.weights=FILE{origin}"
    return None if path.is_file() else f"model.weights: {path.absolute()}: {found}"


def missing_folder(settings: ModelSettings) -> str | None:
    """Return why a model's folder cannot be used, where it was looked for and how to get it.

    None if it is there, or the model is not named by one.
    """
    folder, origin = settings.folder, f"; {settings.origin}" if settings.origin else ""
    if folder is None or (folder / CONFIG).is_file():
        return None
    reason = f"there is no {CONFIG} in it" if folder.is_dir() else "there is no such folder"
    beside = "" if folder.is_absolute() or folder.is_dir() else ", nor beside the recipe that names it"
    return (
        f"model.name: {folder.absolute()}: {reason}{beside}; expected one that `save_pretrained` wrote, with "
        f"{CONFIG} and model.safetensors; nothing is downloaded: hf download NAME --local-dir FOLDER, and give its "
        f"path as model.name=FOLDER{origin}"
    )
