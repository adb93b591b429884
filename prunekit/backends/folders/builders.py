"""Builders of dense models as Python source: calls of a library's constructors, or of the user's own code."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torchvision
from torch import nn

from prunekit.backends.folders.bundled_source import call_of, importable_module
from prunekit.channels.rewrite.source_rewriter import original_of
from prunekit.errors import ModelError
from prunekit.hooks.model_copy import without_values
from prunekit.models.cifar import CifarResNet
from prunekit.models.names import DEPTHS
from prunekit.models.zoo import as_build, load_factory, zoo_candidates
from prunekit.utils.context import seeded
from prunekit.utils.user_code import is_reference

_QUIET = frozenset({"googlenet", "inception_v3"})
"""Models of torchvision whose own initialization takes seconds, for weights that are replaced."""


@dataclass(frozen=True, eq=False)
class Builder:
    """The way a dense model is built."""

    make: Callable[[], nn.Module]  # builds it here
    code: str  # an expression that builds it
    modules: tuple[str, ...] = ()  # that the expression reads by their whole names
    names: Mapping[str, str] | None = None  # of modules -> names that the expression imports from them
    included: tuple[tuple[str, str], ...] = ()  # classes of prunekit whose source is included: (module, name)
    package: str = ""  # whose version matters; empty for the user's own code
    own: bool = False  # whether it is the user's code

    def skeleton(self) -> tuple[nn.Module, bool]:
        """Build the model, if its constructor allows that without values, and return whether it does."""
        with seeded(0):
            with suppress(Exception):
                with without_values():
                    model = self.make()
                attributes = (value for module in model.modules() for value in vars(module).values())
                if not any(getattr(value, "is_meta", False) for value in attributes):  # computed without values
                    return model, True
            return self.make(), False


def builders(model: nn.Module, build: Mapping[str, Any] | None, dense: Any = None) -> Iterator[Builder]:
    """Yield builders of the dense model that a model may come from, the likeliest first.

    `build` is its name, zoo and arguments, as in a model folder, or the zoo `own` with `file.py:factory` as the name.
    """
    if build is not None:
        yield from _of_zoo(build)
    if dense is not None and not isinstance(dense, nn.Module):
        yield from _without_arguments(dense)
    for settings in zoo_candidates(model):
        yield from _of_zoo(as_build(settings))
    cls = original_of(type(model))
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)  # not imported for this
    if isinstance(base, type) and issubclass(cls, base):
        yield from _transformers(model, cls)
    elif cls.__module__.startswith("ultralytics.nn.tasks"):
        yield from _ultralytics(model, cls)
    elif cls.__module__.partition(".")[0] not in ("torch", "torchvision"):
        yield from _without_arguments(cls)


def _of_zoo(build: Mapping[str, Any]) -> Iterator[Builder]:
    name, zoo, arguments = str(build["name"]), build["zoo"], dict(build.get("arguments") or {})
    if zoo == "cifar":
        included = ((CifarResNet.__module__, CifarResNet.__name__),)
        code = call_of("CifarResNet", DEPTHS[name], **arguments)
        yield Builder(partial(CifarResNet, DEPTHS[name], **arguments), code, included=included)
    elif zoo == "torchvision":
        yield _torchvision(name, arguments)
    elif zoo == "timm":
        yield _timm(name, arguments)
    elif zoo == "own" and is_reference(name):
        yield _own(name)


def _torchvision(name: str, arguments: dict[str, Any]) -> Builder:
    function = torchvision.models.get_model_builder(name)
    given = dict(arguments) | ({"init_weights": False} if name in _QUIET else {})
    known = inspect.signature(function).parameters
    none = {key: None for key in ("weights", "weights_backbone") if key in known}
    home = "torchvision.models" if getattr(torchvision.models, name, None) is function else function.__module__
    return Builder(
        partial(function, **none, **given),
        call_of(f"{home}.{function.__name__}", **none, **given),
        modules=(home,),
        package="torchvision",
    )


def _timm(name: str, arguments: dict[str, Any]) -> Builder:
    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False, **arguments)
        return model

    code = call_of("timm.create_model", name, pretrained=False, **arguments)
    return Builder(make, code, modules=("timm",), package="timm")


def _transformers(model: Any, cls: type) -> Iterator[Builder]:
    import transformers

    config = model.config
    usual = type(config)().to_dict()
    given = {key: value for key, value in config.to_dict().items() if key not in _OF_FILES and usual.get(key) != value}
    attention = getattr(config, "_attn_implementation", None)
    if isinstance(attention, str):
        given["attn_implementation"] = attention
    names: dict[str, str] = {}
    for kind in (type(config), cls):
        names[kind.__name__] = "transformers"
        if getattr(transformers, kind.__name__, None) is not kind:
            names[kind.__name__] = importable_module(kind)
    code = f"{cls.__name__}({call_of(type(config).__name__, **given)})"
    yield Builder(lambda: cls(type(config)(**given)), code, names=names, package="transformers")


_OF_FILES = frozenset({"architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype", "model_type"})
"""Entries of a configuration that tell where it is from, not how the model is built."""


def _ultralytics(model: Any, cls: type) -> Iterator[Builder]:
    given = dict(model.yaml)
    channels = given.get("ch", given.get("channels", 3))
    code = call_of(f"{cls.__module__}.{cls.__name__}", given, ch=channels, verbose=False)

    def make() -> nn.Module:
        import copy

        built: nn.Module = cls(copy.deepcopy(given), ch=channels, verbose=False)
        return built

    yield Builder(make, code, modules=(cls.__module__,), package="ultralytics")


def _own(reference: str) -> Builder:
    file, _, name = reference.rpartition(":")
    module = file.removeprefix("python:") if file.startswith("python:") else Path(file).stem
    code = f"{name}()"
    if not all(part.isidentifier() for part in module.split(".")):
        raise ModelError(
            f"{reference}: expected a file that Python can import, and {module!r} is no name of a module; rename the "
            "file, with letters, digits and underscores alone"
        )
    return Builder(partial(load_factory, reference), code, names={name: module}, own=True)


def _without_arguments(function: Any) -> Iterator[Builder]:
    """Yield the builder that calls a class or function of a module without arguments, if it can be called so."""
    with suppress(AttributeError, LookupError, TypeError, ValueError, ImportError):
        inspect.signature(function).bind()
        module, name = importable_module(function), function.__name__
        if name.isidentifier() and function.__qualname__ == name:

            def make() -> nn.Module:
                built = function()
                model: nn.Module = built[0] if isinstance(built, tuple) else built  # a factory may return an example
                return model

            yield Builder(make, f"{name}()", names={name: module}, own=True)
