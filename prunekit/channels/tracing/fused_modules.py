"""Modules that a model's own `fuse()` removes: heads that only training needs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from torch import nn

from prunekit.hooks.model_copy import with_tensors


def fused_away(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules that `model.fuse()` removes from a copy without a replacement.

    A module whose class or children change was merged, not removed. There are none if the model has no such method, or
    it does not work on a copy.
    """
    fuse = getattr(model, "fuse", None)
    if not inspect.ismethod(fuse) or any(_required(one) for one in inspect.signature(fuse).parameters.values()):
        return ()
    try:
        fused = with_tensors(model, {})
        quiet = {"verbose": False} if "verbose" in inspect.signature(fuse).parameters else {}
        fused.fuse(**quiet)  # type: ignore[operator]
    except Exception:  # a method of that name that is something else, or not for copies
        return ()
    before, after = dict(model.named_modules()), dict(fused.named_modules())
    found = []
    for path, module in before.items():
        around, other = before[_around(path)], after.get(_around(path))
        merged = other is not None and (type(other) is not type(around) or set(other._modules) - set(around._modules))
        if path and path not in after and other is not None and not merged and any(True for _ in module.parameters()):
            found.append(path)
    return tuple(found)


def is_inside(path: str, parts: Iterable[str]) -> bool:
    """Return whether a module is one of some parts, or inside one of them."""
    return any(path == part or path.startswith(f"{part}.") for part in parts)


def _around(path: str) -> str:
    return path.rpartition(".")[0]


def _required(parameter: inspect.Parameter) -> bool:
    varied = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not varied
