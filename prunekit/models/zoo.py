"""Models by name from torchvision, timm, transformers, ultralytics and the CIFAR ResNets, or from a user's factory.

Of timm and transformers nothing is downloaded; transformers' models are named by their type or their folder. Also which
model of a zoo a given one is, and the preprocessing that a zoo publishes with its weights: an image of exactly the
input's size is taken as it is, not enlarged and cropped again as there.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
import torchvision
from torch import nn

from prunekit.channels.rewrite.source_rewriter import original_of
from prunekit.errors import ModelError, PrunekitError, SettingsError, UsageError, nearest, reraise_shortage
from prunekit.models import hugging_face
from prunekit.models.cifar import CifarResNet
from prunekit.models.detectors import (
    load_ultralytics,
    torchvision_detector,
    ultralytics_detector,
    ultralytics_files,
)
from prunekit.models.names import (
    DEPTHS,
    SUFFIXES,
    bare_names,
    is_weights_file,
    missing_file,
    missing_folder,
    torchvision_names,
    unknown_name,
)
from prunekit.models.preprocessing import Preprocessing
from prunekit.models.state_dicts import load_weights
from prunekit.settings.inputs import Head, ModelSettings
from prunekit.utils.availability import import_of_extra
from prunekit.utils.context import device_of, seeded, training_mode
from prunekit.utils.inputs import InputSpec, as_example, call, to_device, zeros_of
from prunekit.utils.tensors import gather
from prunekit.utils.user_code import run_factory

OF_WEIGHTS = re.compile(
    r"(use_)?pretrained(_backbone|_cfg\w*|_model\w*)?|checkpoint(_path|_file)?|weights(_backbone)?|cache_dir|file|url|"
    r"_?name_or_path|trust_remote_code|auto_map|\w*_implementation"
)
"""Names of arguments, at any depth, by which a zoo would fetch or unpickle weights, or fetch code.

Weights come from `model.weights` alone.
"""
PLAIN_TEXT = re.compile(r"[\w .+-]*")
"""Text in arguments, such as the name of an activation: no path, address or expression."""


def _timm() -> Any:
    return import_of_extra("timm", "timm", "model.zoo=timm", ModelError)


def image_shape(model: nn.Module) -> tuple[int, ...] | None:
    """Return the shape (channels, height, width) of images that a model of these zoos is made for; None if unknown."""
    if isinstance(getattr(model, "yaml", None), dict):  # of ultralytics, whose detectors take any multiple of 32
        return (model.yaml.get("channels", 3), 640, 640)  # type: ignore[operator,union-attr]
    made_for = getattr(model, "pretrained_cfg", None)
    if isinstance(made_for, dict) and "input_size" in made_for:
        return tuple(made_for["input_size"])
    config = getattr(model, "config", None)
    size = getattr(config, "image_size", 224)
    if config is None or not hasattr(config, "num_channels"):  # as of language models
        return None
    return (config.num_channels, *([size, size] if isinstance(size, int) else size))


WITH_INIT_WEIGHTS = (torchvision.models.googlenet, torchvision.models.inception_v3)


def zoo_names(zoo: str = "torchvision", head: Head | None = None) -> tuple[str, ...]:
    """Return the names of the models of a zoo, sorted; of torchvision, its classifiers and then its detectors.

    Of transformers these are the model types that have a head.
    """
    if zoo == "ultralytics":
        return tuple(sorted(ultralytics_files()))
    if zoo == "timm":
        return tuple(sorted(_timm().list_models()))
    if zoo == "hf":
        return hugging_face.model_types(head)
    return bare_names(zoo)


def is_detector(settings: ModelSettings) -> bool:
    """Return whether settings name a detector of torchvision or ultralytics."""
    of_torchvision = settings.zoo == "torchvision" and settings.name in torchvision_names("detection")
    return of_torchvision or settings.zoo == "ultralytics"


def model_arguments(settings: ModelSettings, num_classes: int | None, image_size: int | None = None) -> dict[str, Any]:
    """Return the arguments of a model's constructor; those that settings do not name come from the data.

    torchvision's detectors count the background as a class, and are told the size of images.
    """
    known: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    if settings.zoo == "torchvision" and is_detector(settings):
        known = {name: count + 1 for name, count in known.items()}
        known |= {} if image_size is None else {"image_size": image_size}
    return {**settings.arguments, **{name: value for name, value in known.items() if name not in settings.arguments}}


def build_model(settings: ModelSettings, *, num_classes: int | None, image_size: int | None = None) -> nn.Module:
    """Build a model, in train mode on the CPU, with its weights, or random ones from torch's global seed.

    `num_classes` are those of the data, used where `settings.arguments` has none; None leaves the constructor's own
    number (1000 as a rule, and 10 for CIFAR). `image_size` is that of the data, for torchvision's detectors alone.
    """
    builder = _builder(settings)
    if settings.zoo != "own" and (problem := next(_reaching(settings.arguments), None)) is not None:
        raise ModelError(f"model.arguments: {settings.zoo}'s {settings.name}: {problem}")
    arguments = model_arguments(settings, num_classes, image_size)
    if settings.weights is None or is_weights_file(settings):
        model = _construct(settings, builder, arguments)
        if settings.weights is not None:
            load = load_ultralytics if settings.zoo == "ultralytics" else load_weights
            load(model, Path(settings.weights))
        return model
    return _pretrained(settings, builder, arguments)


def _reaching(given: Any, at: str = "") -> Iterator[str]:
    """Yield what is wrong with arguments by which a constructor could reach weights, files, addresses or code."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            name = f"{at}.{key}" if at else str(key)
            if OF_WEIGHTS.fullmatch(str(key)) and value not in (None, False):
                yield f"{name}: weights come from model.weights, and arguments name no code; got {value!r:.99}"
            else:
                yield from _reaching(value, name)
    elif isinstance(given, (list, tuple)):
        for index, value in enumerate(given):
            yield from _reaching(value, f"{at}[{index}]")
    elif isinstance(given, str) and not PLAIN_TEXT.fullmatch(given):
        yield f"{at}: expected a name such as 'gelu', no path or expression, got {given!r:.99}"


def with_head(settings: ModelSettings, task: str) -> ModelSettings:
    """Return settings of a model of transformers with the head of a task, unless they name one or the task has none."""
    head = next((known for known in hugging_face.CLASSES if known == task), None)
    return replace(settings, head=head) if settings.zoo == "hf" and settings.head is None else settings


def has_weights(settings: ModelSettings) -> bool:
    """Return whether a model comes with weights: a file's, named ones, or those of its folder."""
    return settings.weights is not None or settings.folder is not None


def as_build(settings: ModelSettings) -> dict[str, Any]:
    """Return how a model is built, as plain data for model folders; never a path."""
    known = hugging_face.structure_of(settings)
    head = {} if known.head is None else {"head": known.head}
    return {"name": known.name, "zoo": known.zoo, "arguments": dict(known.arguments), **head}


def from_build(build: Any) -> ModelSettings | None:
    """Return the settings of `as_build`; None if the data is something else."""
    match build:
        case {
            "name": str(name),
            "zoo": "torchvision" | "cifar" | "timm" | "hf" | "ultralytics" as zoo,
            "arguments": dict(arguments),
        }:
            head = build.get("head")
            known = head is None or head in hugging_face.CLASSES
            settings = ModelSettings(name, zoo, arguments=arguments, head=head) if known else None
            return settings if settings is not None and settings.folder is None else None
    return None


def missing_weights(settings: ModelSettings) -> str | None:
    """Return which weights are missing, where they were looked for and how to supply them; None if they are there.

    Weights that torchvision knows by name are missing here until they have been downloaded once.
    """
    missing = missing_file(settings)
    known = settings.zoo == "torchvision" and settings.name in zoo_names()
    if missing is not None or settings.weights is None or is_weights_file(settings) or not known:
        return missing
    origin = f"; {settings.origin}" if settings.origin else ""
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
    if settings.folder is not None:
        if (missing := missing_folder(settings)) is not None:
            raise ModelError(missing)
        return hugging_face.builder(settings)
    names = zoo_names(zoo, settings.head)
    if name not in names:
        raise unknown_name(name, zoo if settings.head is None else f"{zoo} with the head {settings.head}", names)
    if zoo == "cifar":
        return partial(CifarResNet, DEPTHS[name])
    if zoo == "timm":
        return partial(_timm().create_model, name, False)  # by position: no argument can replace it
    if zoo == "hf":
        return hugging_face.builder(settings)
    if zoo == "ultralytics":
        return ultralytics_detector(name)
    if is_detector(settings):
        return torchvision_detector(name)
    return cast(Callable[..., nn.Module], torchvision.models.get_model_builder(name))


def _construct(settings: ModelSettings, builder: Callable[..., nn.Module], arguments: dict[str, Any]) -> nn.Module:
    if builder in WITH_INIT_WEIGHTS:
        arguments.setdefault("init_weights", True)  # torchvision's default, which it warns about unless it is given
    fixed = {"weights": None} if settings.zoo == "torchvision" else {}
    try:
        return builder(**fixed, **arguments)
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError) as error:
        reraise_shortage(error)
        raise _constructor_error(settings, arguments, error) from error


def _constructor_error(settings: ModelSettings, arguments: dict[str, Any], error: Exception) -> ModelError:
    # Python 3.11 says KeyError for an argument given twice, where the call is made while an exception is handled.
    why = f"{error} is set already, or names nothing" if isinstance(error, KeyError) else error
    return ModelError(f"model.arguments: {settings.zoo}'s {settings.name} refuses {arguments}: {why}")


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
    trained, classes = len(weights.meta["categories"]), arguments.get("num_classes")
    if classes not in (None, trained):
        raise ModelError(
            f"model.weights: {settings.weights} of {settings.name} has {trained} classes, but the data {classes}; "
            "give a state dict trained for these classes, or leave weights out and train the dense model"
        )
    try:
        return builder(weights=weights, **arguments)
    except OSError as error:
        raise ModelError(f"model.weights: {_to_download(weights.url)}; downloading it failed: {error}") from error
    except (UnpicklingError, EOFError) as error:
        path = _cached(weights.url)
        raise ModelError(f"model.weights: {path}: the file is damaged ({error}); remove it") from error
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        reraise_shortage(error)
        raise _constructor_error(settings, arguments, error) from error


def load_factory(reference: str) -> nn.Module:
    """Run `file.py:factory` and return the model it builds. The file's code is run: name only files you trust.

    The factory is a function or class that takes no arguments; it must build a new model at each call, because the file
    is run once. It may return (model, example), see `load_with_example`.
    """
    return load_with_example(reference)[0]


def load_with_example(reference: str) -> tuple[nn.Module, tuple[Any, ...] | None]:
    """Run a factory as `load_factory` does, and return the model and the example; None if the factory returns none."""
    found = run_factory(reference, ModelError)
    model, given = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{reference}: expected the factory to return an nn.Module, or (module, example), got "
            f"{type(found).__name__}"
        )
    try:
        return model, None if given is None else as_example(model, given)
    except UsageError as error:
        raise ModelError(f"{reference}: {error}") from None


def published(settings: ModelSettings, model: nn.Module) -> tuple[Preprocessing | None, tuple[str, ...]]:
    """Return the preprocessing that a zoo's model is evaluated with, and the names of its classes, as far as known."""
    if settings.zoo == "timm":
        return timm_preprocessing(model), ()
    if settings.zoo != "torchvision" or settings.weights is None or settings.name not in zoo_names():
        return None, ()
    known = torchvision.models.get_model_weights(settings.name).__members__
    return torchvision_weights(known[settings.weights]) if settings.weights in known else (None, ())


def torchvision_weights(weights: Any) -> tuple[Preprocessing | None, tuple[str, ...]]:
    """Return the preprocessing and the classes of weights of torchvision; None for presets of other tasks."""
    preset, classes = weights.transforms(), tuple(map(str, weights.meta.get("categories") or ()))
    if type(preset).__name__ != "ImageClassification":
        return None, classes
    (height, *_, width), (shorter,) = [*preset.crop_size] * 2, preset.resize_size  # one number, or two
    return _preprocessing(height, width, shorter, preset.interpolation.value, preset.mean, preset.std), classes


def timm_preprocessing(model: nn.Module) -> Preprocessing | None:
    """Return the preprocessing in the configuration of a model of timm; None if it has none, or another one."""
    if not isinstance(getattr(model, "pretrained_cfg", None), dict):
        return None
    found = _timm().data.resolve_data_config({}, model=model)
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


Shapes = Mapping[str, tuple[int, ...]]


def zoo_origins(model: nn.Module, shapes: Shapes) -> Iterator[ModelSettings]:
    """Yield models of zoos that have the class of a model, and dense tensors of its shapes; the likeliest first.

    Such a model may still compute something else, by another stride or rate of dropout: the caller compares.
    """
    for settings in zoo_candidates(model):
        built = None
        with suppress(Exception), seeded(0), torch.device("meta"):
            built = build_model(settings, num_classes=None)
        if built is None:  # a constructor that looks at its weights
            with suppress(PrunekitError), seeded(0):
                built = build_model(settings, num_classes=None)
        found = {} if built is None else hugging_face.shapes_of(built)
        if built is not None and all(found.get(name) == tuple(shape) for name, shape in shapes.items()):
            yield settings


def zoo_candidates(model: nn.Module) -> Iterator[ModelSettings]:
    """Yield settings of models of zoos that have the class of a model, dense or compact; nothing is built."""
    cls = original_of(type(model))
    last = next(reversed([*model.parameters()]), None)
    # The first size of the last parameter is the number of classes of most classifiers.
    home, classes = cls.__module__, None if last is None or not last.dim() else len(last)
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
        yield from () if found is None else (found,)


def _with_classes(name: str, zoo: Any, classes: int | None) -> Iterator[ModelSettings]:
    yield ModelSettings(name, zoo)
    if isinstance(classes, int):
        yield ModelSettings(name, zoo, arguments={"num_classes": classes})


def found_build(
    model: nn.Module, shapes: Shapes, specs: Sequence[InputSpec], load: Callable[[dict[str, Any]], nn.Module]
) -> dict[str, Any] | None:
    """Return how a zoo builds the dense model, if what is loaded by that equals the compact one; None if no zoo does.

    Two models are equal if all their modules have the same settings, which show what acts in train mode alone, and
    their outputs are the same to the bit.
    """
    own: list[Any] = []
    for settings in zoo_origins(model, shapes):
        build = as_build(settings)
        with suppress(Exception):  # of a model's own code: without a build, a folder is loaded by its owner's
            loaded = load(build)
            own = own or _described(model, specs)
            if own == _described(loaded, specs):
                return build
    return None


def _described(model: nn.Module, specs: Sequence[InputSpec]) -> list[Any]:
    """Return the settings of all modules, and dtypes and bytes of the output for random input, in eval mode."""
    modules = [(path, original_of(type(part)).__name__, part.extra_repr()) for path, part in model.named_modules()]
    example, generator = zeros_of(specs), torch.Generator().manual_seed(0)
    for tensor in gather(example):
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    with training_mode(model, False), torch.no_grad(), seeded(0):
        output = gather(call(model, to_device(example, device_of(model))))
    return [modules, [(one.dtype, one.cpu().contiguous().view(torch.uint8).numpy().tobytes()) for one in output]]
