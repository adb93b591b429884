"""A hook that belongs to an owner, and checks of where hooks run: compiled, recomputed and never called modules."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from prunekit.errors import ModelError
from prunekit.utils.private_torch import ACCELERATE_HOOK, has_compiled, in_backward

HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class HookWarning(UserWarning):
    """A hook never runs."""


class Owner(Protocol):
    """The owner of a hook."""

    active: bool  # whether its hooks are registered now
    called: bool  # set whenever a hook runs


class OwnedHook:
    """A hook that calls a function while its owner is active, and does nothing otherwise.

    `copy.deepcopy(model)` and pickling copy a module's hooks; these copies are inert, so that a copied model is neither
    masked nor counted, even if the owner is gone. A pickled one is a function of Python's own that does nothing, so
    that the file is loaded where prunekit is not installed.
    """

    def __init__(self, owner: Owner | None, function: Callable[..., Any]) -> None:
        self._owner, self._function = owner, function

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function if the owner is active."""
        if self._owner is None or not self._owner.active:
            return None
        self._owner.called = True
        return self._function(*arguments, **named)

    def acts_for(self, kind: type) -> bool:
        """Return whether its owner is an instance of a class, and active."""
        owner = self._owner
        return owner is not None and isinstance(owner, kind) and owner.active

    @property
    def inert(self) -> bool:
        """True if this is the copy of a hook."""
        return self._owner is None

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnedHook:
        return OwnedHook(None, lambda: None)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments, and returns None


def is_inert(hook: object) -> bool:
    """Return whether a hook is the copy of an owner's hook, also one that was pickled."""
    return bool(getattr(hook, "inert", False)) or getattr(hook, "__func__", None) is nullcontext.__exit__


def recomputing() -> bool:
    """Return whether a backward pass is running: a forward pass inside it is recomputed by activation checkpointing."""
    return not torch.compiler.is_compiling() and in_backward()


def never_called(module: nn.Module) -> bool:
    """Return whether a module's forward never runs: `nn.MultiheadAttention` uses `out_proj`'s weight functionally."""
    return isinstance(module, NonDynamicallyQuantizableLinear)


def called_leaves(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules without children that are ever called, by their paths."""
    modules = model.named_modules()
    return {path: module for path, module in modules if not any(module.children()) and not never_called(module)}


def warn_if_ignored(module: nn.Module, owner: str) -> None:
    """Warn if a module's forward never runs, or `torch.compile` may leave out its hooks."""
    if never_called(module):
        problem = (
            "hooks on nn.MultiheadAttention's out_proj never run, because attention uses its weight functionally; "
            "hook the attention module itself"
        )
    elif is_compiled(module):
        problem = (
            f"{type(module).__name__} is compiled, and hooks added after torch.compile may silently be ignored; "
            "register them before, or set torch._dynamo.config.skip_nnmodule_hook_guards = False"
        )
    else:
        return
    warnings.warn(f"{owner}: {problem}", HookWarning, stacklevel=5)  # where the owner is entered


def refuse_compiled(model: nn.Module, owner: str) -> None:
    """Raise if `torch.compile` has already compiled a model: hooks that are added later are silently ignored."""
    for path, module in model.named_modules():
        if is_compiled(module):
            raise ModelError(
                f"{owner}: {path or 'the model'} is compiled, and hooks added after torch.compile are silently "
                "ignored; enter with the model as it was before, and compile it inside if at all"
            )


def not_traced(what: str) -> None:
    """Break the graph of `torch.compile` here, with a reason; does nothing outside it."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=what)


def require_not_compiled(model: nn.Module, owner: str) -> None:
    """Raise if `torch.compile` has compiled code that this model runs, of this model or another of its class."""
    path = compiled_code(model)
    if path is not None:
        raise ModelError(
            f"{owner}: its hooks did not run, because {path or 'the model'} "
            f"({type(model.get_submodule(path)).__name__}), or another of its class, was compiled before they were "
            "there; compile after entering, or call torch._dynamo.reset() then"
        )


def compiled_code(model: nn.Module) -> str | None:
    """Return the path of the first module whose class's forward `torch.compile` has compiled, or None."""
    for path, module in model.named_modules():
        forward = inspect.unwrap(type(module).forward)
        if isinstance(forward, FunctionType) and has_compiled(forward.__code__):
            return str(path)
    return None


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module, or its forward, was compiled in place, or is the wrapper of `torch.compile`."""
    forward = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    return getattr(module, "_compiled_call_impl", None) is not None or forward or "_orig_mod" in module._modules


def refuse_nested(tensor: Tensor, where: str) -> None:
    """Raise if a tensor is a nested one, which has no regular axes."""
    if tensor.is_nested:
        raise ModelError(
            f"{where}: expected a plain tensor, got the nested one that attention's fast path makes of padded "
            "sequences; turn that off with torch.backends.mha.set_fastpath_enabled(False)"
        )


def offloading(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield the modules whose weights Accelerate offloads, by their paths, with its hook that moves them."""
    for path, module in model.named_modules() if "accelerate" in sys.modules else ():
        hook = getattr(module, ACCELERATE_HOOK, None)
        for one in (hook, *getattr(hook, "hooks", ())):
            if getattr(one, "offload", False):
                yield path, module, one


def is_ours(hook: object) -> bool:
    """Return whether a hook is this package's, so that it is not copied with its model."""
    return str(getattr(hook, "__module__", "")).startswith("prunekit.") or is_inert(hook)


def stays_in_copies(hook: object) -> bool:
    """Return whether a hook is a part of what a model of ours computes, see `prunekit.channels.cut.narrow_norms`."""
    return bool(getattr(hook, "stays_in_copies", False))


def count_hooks(model: nn.Module) -> int:
    """Return the number of hooks on a model: on its modules, and on its parameters' gradients.

    Inert copies of another model's hooks do not count.
    """
    tables = (getattr(module, table, {}) for module in model.modules() for table in HOOK_TABLES)
    modules = sum(not is_inert(hook) for table in tables for hook in table.values())
    of_tensors = "_backward_hooks", "_post_accumulate_grad_hooks"
    return modules + sum(len(getattr(one, table, None) or ()) for one in model.parameters() for table in of_tensors)
