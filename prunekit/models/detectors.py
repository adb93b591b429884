"""Detectors by name: torchvision's, and ultralytics' from the files that its package has of their layers."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from prunekit.errors import ModelError, reason_of, reraise_shortage
from prunekit.models.state_dicts import load_state, load_weights
from prunekit.reading.yaml_files import read_yaml
from prunekit.utils.availability import package_folders

FIXED = ("weights", "weights_backbone", "progress")
"""Arguments by which torchvision would fetch files; weights come from `model.weights` alone."""
HEADS = ("Detect", "v10Detect", "RTDETRDecoder")
"""Last layers of ultralytics' detectors."""
MODULES = ("torch.nn.modules.", "ultralytics.nn.modules.", "ultralytics.nn.tasks")
"""Packages with the classes that an ultralytics checkpoint may name."""
PLAIN = ("ultralytics.utils.IterableSimpleNamespace", "ultralytics.utils.loss.", "ultralytics.utils.tal.")
"""Other classes of ultralytics that its checkpoints name: settings, and losses."""


def torchvision_detector(name: str) -> Callable[..., nn.Module]:
    """Return the builder of one of torchvision's detectors, which downloads nothing.

    Besides torchvision's own arguments it takes `image_size`, the height and width of the images, which else would be
    enlarged to the size that the detector was made for.
    """
    build = torchvision.models.get_model_builder(name)

    def made(image_size: int | None = None, weights: Any = None, **arguments: Any) -> nn.Module:
        if refused := [argument for argument in FIXED if argument in arguments]:
            raise ValueError(f"{refused[0]}: weights come from model.weights")
        model: nn.Module = build(weights=weights, weights_backbone=None, **arguments)
        if image_size is not None:  # images of this size are left as they are
            transform: Any = model.transform
            transform.fixed_size = None if transform.fixed_size is None else (image_size, image_size)
            transform.min_size, transform.max_size = (image_size,), image_size
        return model

    made.__name__ = name
    return made


def made_for(model: nn.Module) -> int | None:
    """Return the height and width that a detector of torchvision resizes images to, or their shorter side."""
    transform: Any = getattr(model, "transform", None)
    if not isinstance(transform, torchvision.models.detection.transform.GeneralizedRCNNTransform):
        return None
    return int(transform.fixed_size[0] if transform.fixed_size is not None else transform.min_size[-1])


@cache
def ultralytics_files() -> dict[str, tuple[Path, str]]:
    """Return the file of layers of each of ultralytics' detectors, by name, with its scale; empty without scales."""
    folders = package_folders("ultralytics")
    if not folders:
        raise ModelError(
            "model.zoo=ultralytics needs the package ultralytics, which is not installed: "
            "pip install prunekit[ultralytics]"
        )
    files = sorted(file for folder in folders for file in (folder / "cfg" / "models").rglob("*.yaml"))
    return {name: (file, scale) for file in files for name, scale in _scaled_names(file)}


def _layers(file: Path) -> Any:
    return read_yaml(file, "the layers of a model (YAML)", ModelError)


def _scaled_names(file: Path) -> Iterator[tuple[str, str]]:
    """Yield name and scale of the models of a file, one for each of its scales: `yolov8n-p2` of `yolov8-p2.yaml`."""
    if not any(head.encode() in file.read_bytes() for head in HEADS):  # to parse all files takes seconds
        return
    content = _layers(file)
    head = content["head"][-1][2] if isinstance(content, Mapping) and content.get("head") else ""
    if head not in HEADS:
        return
    family = re.fullmatch(r"(yolov?\d+)(-.+)?", file.stem)
    if family is None:  # a name with its scale in it, such as yolov10n or rtdetr-l
        yield file.stem, ""
        return
    for scale in content.get("scales") or ("",):
        yield f"{family[1]}{scale}{family[2] or ''}", scale


def ultralytics_detector(name: str) -> Callable[..., nn.Module]:
    """Return the builder of one of ultralytics' detectors, by its name, with random weights."""

    def build(num_classes: int | None = None, **arguments: Any) -> nn.Module:
        tasks, utils = import_module("ultralytics.nn.tasks"), import_module("ultralytics.utils")
        kind = tasks.RTDETRDetectionModel if "rtdetr" in name else tasks.DetectionModel
        known = set(inspect.signature(kind).parameters) - {"cfg", "nc", "verbose"}
        for argument in arguments.keys() - known:
            raise ValueError(f"there is no argument {argument!r}; expected {', '.join(sorted(known))} or num_classes")
        file, scale = ultralytics_files()[name]
        # not by its name: the package would take a file of this name in the current folder, such as a recipe
        layers = _layers(file) | {"scale": scale, "yaml_file": f"{name}.yaml"}
        layers |= {} if num_classes is None else {"nc": num_classes}
        model: Any = kind(layers, nc=num_classes, verbose=False, **arguments)
        model.args = utils.IterableSimpleNamespace(**utils.DEFAULT_CFG_DICT)  # which its loss reads
        built: nn.Module = model
        return built

    build.__name__ = name
    return build


def load_ultralytics(model: nn.Module, path: Path) -> None:
    """Load weights into a detector of ultralytics, in place: a state dict, or ultralytics' own checkpoint.

    Of a checkpoint, the averaged weights are taken if there are any, as ultralytics does.
    """
    state = ultralytics_state(path)
    if state is None:
        load_weights(model, path)
    else:
        load_state(model, state, path)


def ultralytics_state(path: Path) -> dict[str, Tensor] | None:
    """Return the weights in ultralytics' own checkpoint; None if the file is something else, such as a state dict."""
    if path.suffix not in (".pt", ".pth") or not path.is_file():
        return None
    try:
        needed = get_unsafe_globals_in_checkpoint(path)
    except (OSError, ValueError, RuntimeError) as error:  # no archive of torch's: what reads state dicts says so
        reraise_shortage(error)
        return None
    if not any(name.startswith("ultralytics.") for name in needed):
        return None
    try:
        with safe_globals([_allowed(name, path) for name in needed]):
            content = torch.load(path, map_location="cpu", weights_only=True)
        found = (content.get("ema") or content.get("model")) if isinstance(content, dict) else None
        if not isinstance(found, _Stored):
            raise TypeError(f"there is no `model` in its {type(content).__name__}")
        return {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in found.state_dict().items()
        }
    except (UnpicklingError, RuntimeError, EOFError, AttributeError, TypeError, KeyError, ValueError) as error:
        reraise_shortage(error)
        raise ModelError(f"{path}: expected a checkpoint of ultralytics, but {reason_of(error)}") from error


class _Stored(nn.Module):
    """Stands for every class that a checkpoint names: holds what was stored, and runs nothing of the library."""

    def __init__(self) -> None:
        super().__init__()


def _allowed(name: str, path: Path) -> tuple[Any, str]:
    """Return the stand-in for a class of a checkpoint, and the name that it stands for."""
    if not name.startswith((*MODULES, *PLAIN)):
        raise ModelError(
            f"{path}: it names {name}, and of ultralytics' checkpoints only layers of torch and ultralytics are "
            "loaded; save a state dict where you trust the file: torch.save(YOLO(path).model.state_dict(), 'w.pt')"
        )
    return _Stored, name  # not the class, which the checkpoint may call: some of ultralytics evaluate text
