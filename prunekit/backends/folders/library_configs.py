"""Configurations by which timm and transformers load a model themselves, where they can say its widths."""

import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

from torch import nn

from prunekit.backends.folders.builders import Builder, builders
from prunekit.channels.float64 import relative_difference
from prunekit.channels.rewrite.source_rewriter import original_of
from prunekit.errors import first_line
from prunekit.models.hugging_face import ConfigSearch, quiet_library, shapes_of, whole_numbers
from prunekit.models.interface import ModelInterface
from prunekit.models.preprocessing import Preprocessing
from prunekit.utils.context import set_mode, without_gradients
from prunekit.utils.files import write_json
from prunekit.utils.inputs import call
from prunekit.utils.tensors import gather

TOLERANCE = 1e-5
"""Largest relative difference of the outputs of a model that its library loads; its kernels may be other ones."""
_CANDIDATES = 64
_RESAMPLING = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}
"""Numbers of Pillow's filters, which transformers' files have."""
CONFIG = "config.json"


@dataclass(frozen=True)
class LibraryLoading:
    """The way that a model's own library loads it from a folder."""

    library: str  # `timm` or `transformers`
    config: Mapping[str, Any] | None  # what `config.json` holds; None if the library cannot load the model
    code: str = ""  # Python that loads it; `FOLDER` stands for the folder
    reason: str = ""  # why it cannot, in a sentence; empty if it can


def library_loading(
    model: nn.Module,
    example: tuple[Any, ...],
    interface: ModelInterface,
    build: Mapping[str, Any] | None,
    weights: Path,
) -> LibraryLoading | None:
    """Return how a model's own library loads it; None if it is of neither library.

    Configurations are tried: each must make tensors of the model's shapes, and the library must then really load the
    weights with it, offline, and compute the same.
    """
    found = next((builder for builder in builders(model, build) if builder.package in ("timm", "transformers")), None)
    if found is None:
        return None
    library, name = found.package, original_of(type(model)).__name__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries
        load: Callable[[str], nn.Module] = _from_timm
        if library == "transformers":
            configs, load = _transformers_configs(model, interface), partial(_from_pretrained, original_of(type(model)))
            code = f"from transformers import {name}\n\nmodel = {name}.from_pretrained(FOLDER).eval()"
        else:
            configs = _timm_configs(model, found, interface, build or {})
            code = 'import timm\n\nmodel = timm.create_model(f"local-dir:{FOLDER}", pretrained=True).eval()'
        reason = ""
        for config in configs:
            reason = _differs(model, example, config, weights, load)
            if not reason:
                return LibraryLoading(library, config, code)
        return LibraryLoading(library, None, reason=reason or _first_misfit(found.skeleton()[0], model))


def _first_misfit(dense: nn.Module, model: nn.Module) -> str:
    """Return the first tensor of a model that the dense one has in another shape."""
    theirs = shapes_of(dense)
    name, shape = next((name, shape) for name, shape in shapes_of(model).items() if theirs.get(name) != shape)
    return (
        "no configuration that was tried has the widths of all its layers; the first that differs from the dense model "
        f"is `{name}`, {shape} of {theirs.get(name)}"
    )


def _transformers_configs(model: Any, interface: ModelInterface) -> Iterator[dict[str, Any]]:
    """Yield configurations of transformers with which its class makes tensors of the model's shapes."""
    config, wanted, classes = model.config, shapes_of(model), interface.classes
    search = ConfigSearch(model, config)
    for chosen in itertools.chain([{}] if search.dense == wanted else [], search.fitting(wanted)):
        made = search.made(chosen) if chosen else config
        entries = json.loads(made.to_json_string(use_diff=False))
        entries |= {"architectures": [original_of(type(model)).__name__]}
        if classes and len(classes) == config.num_labels:
            entries["id2label"] = {str(index): name for index, name in enumerate(classes)}
            entries["label2id"] = {name: index for index, name in enumerate(classes)}
        yield entries


def _from_pretrained(cls: Any, folder: str) -> nn.Module:
    """Load a model as transformers does, without its progress bars."""
    with quiet_library():
        model: nn.Module = cls.from_pretrained(folder, local_files_only=True)
        return model


def _from_timm(folder: str) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return model


def _timm_configs(
    model: Any, builder: Builder, interface: ModelInterface, build: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the first configuration with which timm makes tensors of the model's shapes, if there is one."""
    import timm

    given, classes = getattr(model, "pretrained_cfg", None) or {}, model.num_classes
    name = str(build.get("name") or given.get("architecture"))
    arguments = {key: value for key, value in (build.get("arguments") or {}).items() if key != "num_classes"}
    for chosen in _timm_arguments(builder.skeleton()[0], model):
        own = {**arguments, **chosen}
        made = Builder(partial(timm.create_model, name, num_classes=classes, **own), "")
        with suppress(Exception):  # sizes that the constructor refuses
            if shapes_of(made.skeleton()[0]) == shapes_of(model):
                break
    else:
        return
    yield {
        "architecture": name,
        "num_classes": classes,
        "num_features": model.num_features,
        **({"label_names": list(interface.classes)} if interface.classes else {}),
        **({"model_args": own} if own else {}),
        "pretrained_cfg": _timm_input(dict(given), interface.preprocessing, classes),
    }


def _timm_arguments(dense: Any, model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield arguments of constructors that may make the widths of a model: those that timm's transformers share."""
    options: dict[str, list[Any]] = {}
    width, ours = getattr(dense, "embed_dim", None), shapes_of(model)
    if type(width) is int:
        axes = (
            pair for name, shape in shapes_of(dense).items() for pair in zip(shape, ours.get(name, ()), strict=False)
        )
        options["embed_dim"] = sorted({after for before, after in axes if before == width} | {width}, reverse=True)
    heads = whole_numbers(model).get("num_heads", set())
    if heads:
        options["num_heads"] = sorted(heads)
    first = [getattr(module, "fc1", None) for module in model.modules()]
    ratios = {layer.out_features / layer.in_features for layer in first if isinstance(layer, nn.Linear)}
    if len(ratios) == 1:
        options["mlp_ratio"] = sorted(ratios)
    yield {}
    for values in islice(product(*options.values()), _CANDIDATES):
        chosen = dict(zip(options, values, strict=True))
        yield {key: value for key, value in chosen.items() if not (key == "embed_dim" and value == width)}


def _timm_input(given: dict[str, Any], preprocessing: Preprocessing | None, classes: int) -> dict[str, Any]:
    """Return timm's entry for input and preprocessing."""
    kept = {key: value for key, value in given.items() if key not in _OF_SOURCE and value is not None}
    with suppress(TypeError, ValueError):
        kept = json.loads(json.dumps(kept))
    kept["num_classes"], kept["custom_load"] = classes, False
    if preprocessing is not None:
        kept |= {
            "input_size": [len(preprocessing.mean), preprocessing.height, preprocessing.width],
            "mean": list(preprocessing.mean),
            "std": list(preprocessing.std),
            "interpolation": preprocessing.interpolation,
            "crop_pct": preprocessing.height / (preprocessing.shorter_side or preprocessing.height),
            "crop_mode": "center" if preprocessing.shorter_side else "squash",
        }
    return kept


_OF_SOURCE = frozenset(
    {"url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "architecture", "tag", "custom_load",
     "license", "label_names", "label_descriptions", "label_offset"}
)  # fmt: skip


def _differs(
    model: nn.Module,
    example: tuple[Any, ...],
    entries: Mapping[str, Any],
    weights: Path,
    load: Callable[[str], nn.Module],
) -> str:
    """Return why a library does not load a model that computes the same with a configuration; empty if it does."""
    folder = weights.parent
    write_json(folder / CONFIG, dict(entries))
    try:
        loaded = set_mode(load(str(folder)), False)
        found = gather(without_gradients(lambda: call(loaded, example)))
    except Exception as error:
        first = first_line(error).replace(str(folder), "the folder")
        return f"loading it raises {type(error).__name__}: {first}"
    expected = gather(without_gradients(lambda: call(model, example)))
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in expected]:
        return "what it loads returns other shapes"
    pairs = zip(expected, found, strict=True)
    distance = max((relative_difference(a.double(), b.double(), 0.0)[0] for a, b in pairs), default=0.0)
    if not distance <= TOLERANCE:
        return (
            f"what it loads computes something else, by {distance:.1e}; its code derives a size or a scale from others"
        )
    return ""


def processor_config(preprocessing: Preprocessing) -> dict[str, Any] | None:
    """Return the preprocessing as transformers' `AutoImageProcessor` reads it; None if it has no such steps."""
    if preprocessing.channel_order != "rgb" or len(preprocessing.mean) != 3 or preprocessing.padding is not None:
        return None
    size = {"height": preprocessing.height, "width": preprocessing.width}
    crops = preprocessing.shorter_side is not None
    return {
        "image_processor_type": "BitImageProcessor" if crops else "ViTImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": preprocessing.shorter_side} if crops else size,
        "resample": _RESAMPLING[preprocessing.interpolation],
        **({"do_center_crop": True, "crop_size": size} if crops else {}),
        "do_rescale": True,
        "rescale_factor": 1 / preprocessing.white,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
    }
