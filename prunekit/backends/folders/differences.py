"""Differences between a model and the dense one that its constructor builds, except for the values of tensors."""

from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from prunekit.backends.folders.bundled_source import literal
from prunekit.channels.cut.shorter_model import REPLACED, ShorterModule, shortening_of
from prunekit.channels.labels.branch import WHOLE, Shortening, is_inside
from prunekit.channels.rewrite.source_rewriter import integers, original_of
from prunekit.channels.tracing.substitutes import SizedAttention
from prunekit.compaction.folded_norms import FoldedNorm
from prunekit.hooks.hook import HOOK_TABLES
from prunekit.hooks.model_copy import foreign_methods
from prunekit.utils.context import HOOKED

_OF_TORCH = frozenset(vars(nn.Module())) | frozenset(HOOK_TABLES)
"""Attributes that torch gives every module."""


_SETTING_HOOKS = frozenset({"transformers"})
"""Packages whose models set hooks on themselves when they run, as transformers' do to return hidden states."""
_OF_HOOKS = frozenset({HOOKED})
"""Remarks of such models that the hooks are there, which a model that has not run must not have."""


class DiffersError(Exception):
    """A model has something that the dense one does not, and that source cannot say."""


@dataclass
class Differences:
    """Changes that make a dense model another one, by module path."""

    gone: dict[str, bool] = field(default_factory=dict)  # modules that the model lacks, or has None in place of
    folded: list[str] = field(default_factory=list)  # norms of which only the modules behind them are left
    # classes of modules: with methods that were compiled again, or substitutes
    classes: dict[str, type] = field(default_factory=dict)
    attributes: dict[str, dict[str, str]] = field(default_factory=dict)  # source of plain values by attribute
    # tensors that are attributes, and neither parameters nor buffers
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    # methods that are attributes of the module itself: attribute -> name of the method
    methods: dict[str, dict[str, str]] = field(default_factory=dict)
    shorter: Shortening = WHOLE  # what is left in place of blocks that are gone

    @property
    def count(self) -> int:
        """Number of statements that they take, about."""
        named = (self.attributes, self.tensors, self.methods)
        inner = sum(len(entries) for kind in named for entries in kind.values())
        return inner + len(self.gone) + len(self.folded) + len(self.classes) + len(self.shorter.modules)


def differences(dense: nn.Module, model: nn.Module) -> Differences:
    """Return the differences of a model from a dense one, by module path; neither is changed."""
    found = Differences(shorter=shortening_of(model))
    foreign = {*foreign_methods(model)} - {*foreign_methods(dense)}
    if foreign:
        raise DiffersError(f"{min(foreign)} is a function that was set on the model itself, not a method of its class")
    _compare(dense, model, "", found, set())
    return found


def explicit_sizes(model: nn.Module) -> Differences:
    """Return all sizes of a model whose dense one is unknown: numbers, and classes that prunekit made."""
    found = Differences(shorter=shortening_of(model))
    for path, module in model.named_modules():
        if isinstance(module, (*REPLACED, ShorterModule)) or is_inside(path, found.shorter.modules):
            continue
        plain = original_of(type(module)) is type(module) and not isinstance(module, SizedAttention)
        if isinstance(module, FoldedNorm):
            found.folded.append(path)
            continue
        if not plain:
            found.classes[path] = type(module)
        own = {name: value for name, value in vars(module).items() if not _is_internal(name)}
        wanted = {
            name: text
            for name, value in own.items()
            if (text := literal(value)) is not None and (not plain or integers(value) is not None)
        }
        if wanted:
            found.attributes[path] = wanted
    return found


def _is_internal(name: str) -> bool:
    """Return whether an attribute is torch's own, or a remark of prunekit."""
    return name in _OF_TORCH or name in _OF_HOOKS or name.startswith("_prunekit")


def _compare(dense: nn.Module, model: nn.Module, path: str, found: Differences, seen: set[int]) -> None:
    if id(model) in seen:
        return
    seen.add(id(model))
    if isinstance(model, FoldedNorm) and isinstance(dense, _BatchNorm):
        found.folded.append(path)
        return
    if isinstance(model, REPLACED):
        return
    shorter = isinstance(model, ShorterModule)
    if not shorter:
        _compare_class(dense, model, path, found)
        _compare_attributes(dense, model, path, found)
    for table in HOOK_TABLES:
        hooks = [hook for hook in getattr(model, table).values() if _package_of(hook) not in _SETTING_HOOKS]
        if len(hooks) > len(getattr(dense, table)):
            raise DiffersError(f"{path or 'the model'} has a hook ({table}), which its constructor does not set")
    for name, child in dense._modules.items():
        where = f"{path}.{name}".lstrip(".")
        there = model._modules.get(name)
        if child is not None and there is None and not shorter:
            found.gone[where] = name in model._modules
        elif child is not None and there is not None:
            _compare(child, there, where, found, seen)
    for name, child in model._modules.items():
        if child is not None and dense._modules.get(name) is None:
            raise DiffersError(
                f"{path}.{name}".lstrip(".") + f" is a {type(child).__name__}, which the dense one lacks"
            )


def _package_of(hook: Any) -> str:
    return str(getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0]


def _compare_class(dense: nn.Module, model: nn.Module, path: str, found: Differences) -> None:
    old, new = type(dense), type(model)
    original = original_of(new)
    replaces = isinstance(model, SizedAttention) and issubclass(new, old) and new is not old
    # a class within a function is another one at each call
    same = original is old or (original.__module__, original.__qualname__) == (old.__module__, old.__qualname__)
    if same and original is new:
        return
    if same or replaces:
        found.classes[path] = new
        return
    parametrized = "parametrizations" in dense._modules and "parametrizations" in model._modules
    if not (parametrized and old.__name__ == new.__name__):  # such classes are made for each module
        raise DiffersError(f"{path or 'the model'} is a {new.__name__}, and its constructor makes a {old.__name__}")


def _compare_attributes(dense: nn.Module, model: nn.Module, path: str, found: Differences) -> None:
    for table in ("_parameters", "_buffers"):
        old, new = getattr(dense, table), getattr(model, table)
        for name, tensor in new.items():
            if tensor is not None and name not in old:
                raise DiffersError(f"{path}.{name}".lstrip(".") + " is a tensor that its constructor does not make")
        for name, tensor in old.items():
            if tensor is not None and new.get(name) is None:
                found.attributes.setdefault(path, {})[name] = "None"
    before = vars(dense)
    for name, value in vars(model).items():
        if _is_internal(name):
            continue
        if isinstance(value, MethodType) and value.__self__ is model:
            if path in found.classes or name not in before:
                found.methods.setdefault(path, {})[name] = value.__name__
        elif isinstance(value, Tensor):
            if not (isinstance(before.get(name), Tensor) and _equal(before[name], value)):
                found.tensors.setdefault(path, {})[name] = value.detach()
        else:
            text = literal(value)
            if text is not None and (name not in before or literal(before[name]) != text):
                found.attributes.setdefault(path, {})[name] = text


def _equal(a: Tensor, b: Tensor) -> bool:
    same = a.shape == b.shape and a.dtype == b.dtype and not a.is_meta
    return same and bool(torch.equal(a, b))
