"""Copies of a model: its structure with other tensors in place of its own, and the names of its tensors.

Hooks are copied too. A hook that refers to a part of the model, be it a module or an object that a module holds, acts
on the copy's; anything else that it refers to is shared with the model. A decoder that reads what hooks on the encoder
stored thus reads that of its own encoder, while an observer's list is filled by both.
"""

import copy
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from prunekit.errors import ModelError, reraise_shortage
from prunekit.hooks.hook import HOOK_TABLES, is_ours, offloading, stays_in_copies
from prunekit.utils.private_torch import ACCELERATE_HOOK, ACCELERATE_PREPARED, CustomOpDef, OpOverload, OpOverloadPacket

_ATOMS = (int, float, bool, str, bytes, complex, type(None), type, torch.dtype, torch.device)
_CONTAINERS = (dict, set, OrderedDict)
_ATOM_TYPES = frozenset({int, float, bool, str, type(None)})
OWN_TABLES = ("_parameters", "_buffers", "_modules")


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers by name, each tensor once: a tied one under its first name."""
    seen: set[int] = set()
    modules = list(model.named_modules())
    for table in ("_parameters", "_buffers"):
        for path, module in modules:
            for name, tensor in getattr(module, table).items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield (f"{path}.{name}" if path else name), tensor


def hidden_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of modules that no module registers, such as those in a plain list, by their paths."""
    seen = {id(part) for part in model.modules()}
    left = [(path, part) for path, part in model.named_modules()]
    while left:
        path, value = left.pop()
        items: Iterable[tuple[Any, Any]]
        if isinstance(value, nn.Module):
            own = [(name, item) for name, item in vars(value).items() if name not in OWN_TABLES]
            hidden = [*value._modules.items(), *value._parameters.items()] if id(value) not in seen else []
            items = [*own, *hidden]
        else:
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, item in items:
            place = f"{path}.{name}" if path else str(name)
            if isinstance(item, nn.Parameter):
                yield place, item
            elif isinstance(item, (nn.Module, dict, list, tuple)) and id(item) not in seen:
                left.append((place, item))
        seen.add(id(value))


def has_gradients(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can have gradients: one of floating-point or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def owners(model: nn.Module) -> dict[int, set[str]]:
    """Return, by the id of each parameter and buffer, the paths of the modules that have it."""
    paths: dict[int, set[str]] = {}
    for path, module in model.named_modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            paths.setdefault(id(tensor), set()).add(path)
    return paths


def with_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a copy of a model's structure that holds `tensors` in place of its own.

    Wrappers that torch or Accelerate put around a method of an instance, such as autocast, are not copied: the copy has
    the method itself, like a model from a file. Tensors that an earlier forward pass left in other attributes are
    copied without their history.
    """
    memo: dict[int, Any] = {id(item): item for item in _shared(model)}
    for name, tensor in named_tensors(model):
        new = tensors.get(name)
        if new is None:
            continue
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad and has_gradients(new))
        memo[id(tensor)] = new
    # all that handles of hooks may refer to, of all modules that have hooks, empty tables too
    having = [module for module in model.modules() if any(vars(module).get(name) for name in HOOK_TABLES)]
    own = [(name, item) for module in having for name, item in vars(module).items()]
    tables = [item for name, item in own if name in HOOK_TABLES or (type(item) in _CONTAINERS and "_hooks_" in name)]
    memo.update((id(table), type(table)()) for table in tables)
    if any(callable(hook) and not is_ours(hook) for table in tables for hook in table.values()):
        memo.update((id(tensor), tensor.detach().clone()) for tensor in _results_kept(model, tables))
    functions: list[tuple[nn.Module, str]] = []
    try:
        with WithoutHistory():
            clone: nn.Module = _clone(model, memo, functions)
        for table in tables:
            memo[id(table)].update((key, _rebound(hook, memo)) for key, hook in table.items() if not is_ours(hook))
        for module, name in functions:
            vars(module)[name] = _rebound(vars(module)[name], memo)
    except (RuntimeError, TypeError, AttributeError) as error:
        reraise_shortage(error)
        named = _not_copied(model, tables)
        raise ModelError(
            f"{type(model).__name__} cannot be copied{f', because of its attribute {named}' * bool(named)}: {error}; "
            "expected a module whose attributes copy.deepcopy understands (no locks or open files)"
        ) from error
    return clone


@contextmanager
def without_values() -> Iterator[None]:
    """Make parameters of modules that are built take no memory and no time; buffers are real."""

    def empty(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if type(parameter) is not nn.Parameter or parameter.is_meta:  # one that is registered twice stays one
            return None
        made = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        vars(made).update(vars(parameter))
        return made

    hook = register_module_parameter_registration_hook(empty)  # type: ignore[arg-type]  # torch's is too narrow
    try:
        yield
    finally:
        hook.remove()


def _not_copied(model: nn.Module, tables: Iterable[Mapping[int, Any]]) -> str:
    """Return the path of the first attribute of a module that cannot be copied; empty if each one can."""
    memo = {id(item): item for item in (*model.modules(), *tables, *_shared(model))}
    for path, module in model.named_modules():
        for name, item in vars(module).items():
            try:
                if name not in (*OWN_TABLES, *HOOK_TABLES):
                    copy.deepcopy(item, dict[int, Any](memo))
            except (RuntimeError, TypeError, AttributeError):
                return f"{path}.{name}".lstrip(".")
    return ""


class WithoutHistory(TorchFunctionMode):
    """A mode in which `copy.deepcopy` copies results of a forward pass too, without their history."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            memo[id(tensor)] = tensor.detach().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def copied(model: nn.Module, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of a model with tensors of its own, whose hooks act on the copy.

    Norms that see kept channels only, as in the masked model of a result, do so in the copy.
    """
    computed = {name: tensor.detach().clone() for name, tensor in named_tensors(model) if not tensor.is_leaf}
    clone = with_tensors(model, computed)
    staying = [(path, hook) for path, module in model.named_modules() for hook in module._forward_hooks.values()
               if stays_in_copies(hook)]  # fmt: skip
    for path, hook in staying:
        clone.get_submodule(path).register_forward_hook(copy.deepcopy(hook), prepend=True, with_kwargs=True)
    if device is not None:
        clone = clone.to(device)
    if dtype is not None:
        clone._apply(lambda tensor: in_dtype(tensor, dtype))  # type: ignore[no-untyped-call]
    return clone


def in_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in a floating-point type, or in the complex type of that precision; others as they are.

    `Module.to(dtype)` would drop the imaginary part. Types narrower than complex64 have hardly any operators.
    """
    if tensor.is_complex():
        return tensor.to(torch.promote_types(dtype, torch.float32).to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _shared(model: nn.Module) -> Iterator[Any]:
    """Yield functions in attributes of modules that `copy.deepcopy` cannot copy: scripted ones, operators."""
    for module in model.modules():
        for item in list(vars(module).values()):
            yield from (one for one in (item, *_entries(item)) if isinstance(one, _STATELESS))


def _clone(value: Any, memo: dict[int, Any], functions: list[tuple[nn.Module, str]]) -> Any:
    """Return a copy as by `copy.deepcopy`, faster for plain modules, whose functions are added to `functions`."""
    if isinstance(value, _ATOMS):
        return value
    known = memo.get(id(value))
    if known is not None:
        return known
    if type(value) in _CONTAINERS and not value:
        memo[id(value)] = empty = type(value)()
        return empty
    if isinstance(value, torch.jit.ScriptModule):
        memo[id(value)] = scripted = _scripted(value, memo)
        return scripted
    if not isinstance(value, nn.Module) or not _is_plain(type(value)):
        return copy.deepcopy(value, memo)
    twin = value.__class__.__new__(value.__class__)
    memo[id(value)] = twin
    state = {}
    for name, item in _without_wrappers(value).items():
        kind = type(item)
        if kind in _ATOM_TYPES or (kind is tuple and all(type(entry) in _ATOM_TYPES for entry in item)):
            state[name] = item
        elif name.startswith("_") and kind in _CONTAINERS and not item:
            state[name] = memo.get(id(item), kind())  # the tables every module has, which no two share
        elif name in OWN_TABLES:
            state[name] = type(item)((key, _clone(entry, memo, functions)) for key, entry in item.items())
        else:
            state[name] = _clone(item, memo, functions)
            if name not in HOOK_TABLES and any(isinstance(one, _FUNCTIONS) for one in (item, *_entries(item))):
                functions.append((twin, name))
    twin.__setstate__(state)  # type: ignore[no-untyped-call]
    return twin


def _scripted(module: nn.Module, memo: Mapping[int, Any]) -> nn.Module:
    """Return a copy of a scripted or traced module, with other tensors put into it."""
    with torch.no_grad():  # or its parameters would be results of a copy
        twin = copy.deepcopy(module)
    parts = dict(twin.named_modules())
    for path, part in module.named_modules():
        for table in ("_parameters", "_buffers"):
            for name, tensor in getattr(part, table).items():
                if id(tensor) in memo:
                    getattr(parts[path], table)[name] = memo[id(tensor)]
        for name, tensors in _tensor_lists(part):
            if any(id(tensor) in memo for tensor in tensors):
                own = parts[path]._c.getattr(name)
                new = [memo.get(id(tensor), copied) for tensor, copied in zip(tensors, own, strict=True)]
                parts[path]._c.setattr(name, new)
    return twin


def _tensor_lists(part: nn.Module) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield the lists of tensors that a scripted module has besides its tables, such as the weights of an LSTM."""
    if isinstance(part, torch.jit.ScriptModule):
        for name in part._concrete_type.get_attributes():
            value = part._c.getattr(name)
            if isinstance(value, list) and value and all(isinstance(item, torch.Tensor) for item in value):
                yield name, value


def _is_plain(cls: type) -> bool:
    """Return whether a module's class has no way of copying of its own."""
    if any(hasattr(cls, name) for name in ("__deepcopy__", "__copy__", "__getnewargs__", "__slots__")):
        return False
    standard = {"__getstate__": nn.Module, "__reduce_ex__": object, "__reduce__": object}
    return all(getattr(cls, name) is getattr(base, name) for name, base in standard.items())


def _without_wrappers(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes without wrappers of torch and Accelerate around its methods, and their state."""
    state: dict[str, Any] = nn.Module.__getstate__(module)  # type: ignore[no-untyped-call]  # a class's own may raise
    state.pop(ACCELERATE_PREPARED, None)  # with it Accelerate would not prepare the copy
    shadowing = [name for name, item in state.items() if isinstance(item, _FUNCTIONS)]
    inner = {name: _wrapped(module, name, state[name]) for name in shadowing}
    found = {name: method for name, method in inner.items() if method is not None}
    if not found:
        return state
    kept = [
        name
        for name, item in state.items()
        if _is_foreign(type(item).__module__, _ACCELERATE)
        or (isinstance(item, MethodType) and item.__func__ in found.values() and not hasattr(type(module), name))
    ]
    state = {name: item for name, item in state.items() if name not in (*found, *kept)}
    other = {name: method for name, method in found.items() if method is not getattr(type(module), name)}
    return {**state, **{name: MethodType(method, module) for name, method in other.items()}}


def _wrapped(module: nn.Module, name: str, item: Any) -> FunctionType | None:
    """Return the method of a module's class inside of wrappers of torch or Accelerate; None without wrappers."""
    layers = 0
    while True:
        function = item.__func__ if isinstance(item, MethodType) else item
        inner = getattr(function, "__wrapped__", None)
        if getattr(type(module), getattr(function, "__name__", ""), None) is function or inner is None:
            break
        code = function.func if isinstance(function, partial) else function
        if not _is_foreign(getattr(code, "__globals__", {}).get("__name__", type(code).__module__), _WRAPPING):
            return None
        item, layers = inner, layers + 1
    if not layers or not hasattr(type(module), name) or not isinstance(function, FunctionType):
        return None
    return function if getattr(type(module), function.__name__, None) is function else None


_ACCELERATE = ("accelerate",)
_WRAPPING = ("torch", *_ACCELERATE)
"""Packages whose wrappers change the precision or the device of a method, not what it computes."""


def _is_foreign(module: str, packages: tuple[str, ...]) -> bool:
    return module.partition(".")[0] in packages


def foreign_methods(model: nn.Module) -> list[str]:
    """Return the methods of instances that replace those of their class, as `path.name`: no file can hold them.

    Except for those of every module other than forward, such as `train`, and prunekit's own, which compute nothing.
    """
    return [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, item in _without_wrappers(module).items()
        if isinstance(item, _FUNCTIONS) and hasattr(type(module), name) and not _is_own_method(module, item)
        if name == "forward" or not (hasattr(nn.Module, name) or _is_foreign(str(item.__module__), ("prunekit",)))
    ]


def _is_own_method(module: nn.Module, item: Any) -> bool:
    """Return whether an attribute is a method of a module's own, as in `self.forward = self.forward_fast`."""
    bound = isinstance(item, MethodType) and item.__self__ is module
    return bound and getattr(type(module), item.__name__, None) is item.__func__


_FUNCTIONS = (FunctionType, MethodType, partial)
_STATELESS = (torch.jit.ScriptFunction, OpOverload, OpOverloadPacket, CustomOpDef)
_DEEP = 8
"""How many references a hook is followed."""


def _entries(value: Any) -> Iterable[Any]:
    """Return the items of a plain container."""
    if type(value) in (dict, OrderedDict):
        return list(value.values())
    return list(value) if type(value) in (list, tuple, set, frozenset) else ()


def _children(value: Any) -> Iterable[Any]:
    """Return the objects that an object refers to, if a hook may act on them; none for modules, tensors and handles."""
    if isinstance(value, (*_ATOMS, nn.Module, torch.Tensor, RemovableHandle, ModuleType)):
        return ()
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values(), *vars(value).values()
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
        named = (value.__kwdefaults__ or {}).values()
        return *cells, *(value.__defaults__ or ()), *named, *vars(value).values(), *_globals_read(value).values()
    if isinstance(value, weakref.ref):
        return (value(),)
    return _entries(value) or list(getattr(value, "__dict__", {}).values())


def is_filled(cell: CellType) -> bool:
    """Return whether a variable that a function takes from outside has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _globals_read(function: FunctionType) -> dict[str, Any]:
    """Return by name the globals that a function reads: objects, containers, and functions of the same file."""
    names = [name for name in function.__code__.co_names if name in function.__globals__]
    found = {name: function.__globals__[name] for name in names}
    others = (type, ModuleType)
    return {
        name: item
        for name, item in found.items()
        if not isinstance(item, others) and getattr(item, "__globals__", function.__globals__) is function.__globals__
    }


def _reaches(value: Any, memo: Mapping[int, Any], seen: set[int], depth: int = _DEEP) -> bool:
    """Return whether an object refers to anything that has a counterpart in the copy."""
    if isinstance(value, _ATOMS):
        return False
    if id(value) in memo:
        return memo[id(value)] is not value and (not isinstance(value, torch.Tensor) or value.is_leaf)
    if id(value) in seen or not depth:
        return False
    seen.add(id(value))
    return any(_reaches(child, memo, seen, depth - 1) for child in _children(value))


def _results_kept(model: nn.Module, tables: Iterable[Mapping[int, Any]]) -> Iterator[torch.Tensor]:
    """Yield results of an earlier forward pass that hooks stored, whose history `copy.deepcopy` cannot copy."""
    hooks = [hook for table in tables for hook in table.values() if not is_ours(hook)]
    own = [vars(module).items() for module in model.modules()]
    attributes = [item for items in own for name, item in items if name not in (*HOOK_TABLES, *OWN_TABLES)]
    seen: set[int] = set()
    left = [(value, _DEEP) for value in (*hooks, *attributes)]
    while left:
        value, depth = left.pop()
        if isinstance(value, torch.Tensor) and not value.is_leaf:
            yield value
        if id(value) not in seen and depth and not isinstance(value, _ATOMS):
            seen.add(id(value))
            left += [(child, depth - 1) for child in _children(value)]


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """Return a hook that acts on the copy: references to the model are exchanged, all else is shared."""
    if id(value) in memo and not isinstance(value, _ATOMS):
        return memo[id(value)]
    if not _reaches(value, memo, set()):
        return value
    if isinstance(value, MethodType):
        return MethodType(_rebound(value.__func__, memo), _rebound(value.__self__, memo))
    if isinstance(value, partial):
        named = {key: _rebound(item, memo) for key, item in value.keywords.items()}
        bound = partial(_rebound(value.func, memo), *(_rebound(item, memo) for item in value.args), **named)
        vars(bound).update({key: _rebound(item, memo) for key, item in vars(value).items()})
        return bound
    if isinstance(value, FunctionType):
        return _function_rebound(value, memo)
    if isinstance(value, weakref.ref):
        meant = value()
        return value if meant is None else weakref.ref(_rebound(meant, memo))
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_rebound(item, memo) for item in value)
    if type(value) in (dict, OrderedDict):
        memo[id(value)] = items = type(value)()
        items.update({key: _rebound(item, memo) for key, item in value.items()})
        return items
    memo[id(value)] = twin = copy.copy(value)
    for name, item in list(vars(value).items()):
        vars(twin)[name] = copy.deepcopy(item, memo) if isinstance(item, RemovableHandle) else _rebound(item, memo)
    return twin


def _function_rebound(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    found = {name: item for name, item in _globals_read(function).items() if _reaches(item, memo, set())}
    names = {**function.__globals__} if found else function.__globals__
    cells = tuple(CellType() for _ in function.__closure__ or ())
    twin = FunctionType(function.__code__, names, function.__name__, None, cells or None)
    memo[id(function)] = twin
    names.update({name: _rebound(item, memo) for name, item in found.items()})
    twin.__defaults__ = function.__defaults__ and tuple(_rebound(item, memo) for item in function.__defaults__)
    for cell, old in zip(cells, function.__closure__ or (), strict=True):
        if is_filled(old):
            cell.cell_contents = _rebound(old.cell_contents, memo)
    if function.__kwdefaults__:
        twin.__kwdefaults__ = {key: _rebound(item, memo) for key, item in function.__kwdefaults__.items()}
    twin.__module__, twin.__qualname__, twin.__doc__ = function.__module__, function.__qualname__, function.__doc__
    vars(twin).update({key: _rebound(item, memo) for key, item in vars(function).items()})
    return twin


def with_weights(model: nn.Module) -> nn.Module:
    """Return a copy with the weights that Accelerate offloads, on the CPU; a model without such weights as it is.

    Weights on the disk are mapped into memory where Accelerate's files allow it, so that only those in use take any.
    """
    found: dict[str, torch.Tensor] = {}
    for path, module, hook in offloading(model):
        inside = bool(hook.place_submodules)
        named = (*module.named_parameters(path, inside), *module.named_buffers(path, inside))
        found |= {name: hook.weights_map[name.removeprefix(f"{path}.")] for name, tensor in named if tensor.is_meta}
    if not found:
        return model
    clone = with_tensors(model, found)
    for module in clone.modules():
        vars(module).pop(ACCELERATE_HOOK, None)
    _tie(clone, found)
    return clone.cpu()


def _tie(clone: nn.Module, found: dict[str, torch.Tensor]) -> None:
    """Give modules that share a weight one parameter again, as each may have one of its own on the meta device."""
    first: dict[tuple[int, Any], nn.Parameter] = {}
    for name, value in found.items():
        path, _, own = name.rpartition(".")
        module = clone.get_submodule(path)
        parameter = module._parameters.get(own)
        # weights in memory are the same if they begin at the same address
        if parameter is not None and value.numel():
            module._parameters[own] = first.setdefault((value.data_ptr(), value.shape), parameter)
    tie = getattr(clone, "tie_weights", None)  # transformers knows which are tied
    if callable(tie):
        tie()
