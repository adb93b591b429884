"""Wrappers of models: the model inside them, and checks that it can be worked on and trained."""

import inspect
import sys
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from prunekit.errors import ModelError, UsageError
from prunekit.hooks.hook import compiled_code, is_compiled, offloading

WRAPPERS = (DataParallel, DistributedDataParallel, AveragedModel)
"""Classes of wrappers, whose `module` is the model."""


def unwrapped(model: Any, *, offloaded: bool = False, compiled: bool = True) -> nn.Module:
    """Return the model inside of `torch.compile`, `DistributedDataParallel`, `DataParallel` and `AveragedModel`."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: expected a torch.nn.Module, got {_instead(model)}")
    found: nn.Module = model
    while (inner := _inside(found)) is not None and (compiled or not is_compiled(found)):
        found = inner
    name = type(found).__name__
    if isinstance(found, torch.jit.ScriptModule):
        raise ModelError(f"{name} is a TorchScript program, which cannot be followed; give the module it was made from")
    for path, tensor in (*found.named_parameters(), *found.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(f"{name}: {path} is not initialized yet; run the model once on an example first: model(x)")
    if "torch.distributed.fsdp" in sys.modules:  # imported wherever a model is wrapped with it
        _refuse_flattened(found)
    for path, _, _ in () if offloaded else offloading(found):
        raise ModelError(
            f"Accelerate offloads the weights of {path or 'the model'}; bring them back first: "
            "accelerate.hooks.remove_hook_from_submodules(model), or load the model without device_map"
        )
    return found


def unwrapped_for_hooks(model: Any, owner: str) -> nn.Module:
    """Return the model itself, as `unwrapped` does, for hooks that must run when the caller calls the given model."""
    inner, compiled = unwrapped(model), False
    while isinstance(model, nn.Module) and (inside := _inside(model)) is not None:
        compiled, model = compiled or "_orig_mod" in model._modules, inside
    path = compiled_code(inner) if compiled else None
    if path is not None:
        raise ModelError(
            f"{owner}: torch.compile has compiled {path or 'the model'} already, and hooks added later are silently "
            "ignored; enter before the compiled model runs for the first time, or call torch._dynamo.reset() first"
        )
    return inner


def require_values(model: nn.Module, what: str) -> None:
    """Raise if a model's weights have no values."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelError(
                f"{type(model).__name__}: {name} is on the meta device, and {what} needs values; give the model with "
                "its weights: model.to_empty(device='cpu'), then load_state_dict"
            )


def require_trainable(model: nn.Module, what: str) -> None:
    """Raise if a model's weights have no values, or can neither be changed nor have gradients."""
    require_values(model, what)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            raise ModelError(
                f"{type(model).__name__}: {name} was made in torch.inference_mode, so that it can be neither trained "
                f"nor changed, as {what} needs it; give copy.deepcopy(model), made outside of that mode"
            )
    for path, module in model.named_modules():
        own = {**module._parameters, **module._buffers}
        for name, tensor in own.items():
            if tensor is not None and (held := _packed(name, tensor)) is not None:
                raise ModelError(
                    f"{type(model).__name__}: {f'{path}.{name}'.lstrip('.')} holds quantized or packed weights "
                    f"({held}), of which {what} takes out no channels: give the model in floating point, and quantize "
                    "the compact one afterwards"
                )


def _packed(name: str, tensor: torch.Tensor) -> str | None:
    """Return how a tensor of a module holds quantized weights; None if it does not.

    Torchao has subclasses of tensors, bitsandbytes parameters of bytes, and GPTQ and others packed integers.
    """
    kind = type(tensor.data)
    if kind is not torch.Tensor and hasattr(kind, "__tensor_flatten__") and not hasattr(tensor, "placements"):
        return kind.__name__
    small = tensor.dtype.itemsize == 1 or tensor.dtype in (torch.int16, torch.int32)
    packed = small and tensor.dtype != torch.bool and tensor.dim() > 1
    if not packed or not (isinstance(tensor, nn.Parameter) or "weight" in name):
        return None
    return f"{type(tensor).__name__} of {str(tensor.dtype).removeprefix('torch.')}"


def is_frozen(model: nn.Module) -> bool:
    """Return whether a model has no parameter that training could change (none at all counts as frozen)."""
    return not any(parameter.requires_grad for parameter in model.parameters())


def require_unfrozen(model: nn.Module) -> None:
    """Raise `ModelError` if every parameter of a model is frozen, or if there is none."""
    if is_frozen(model):
        count = sum(1 for _ in model.parameters())
        raise ModelError(
            f"{type(model).__name__}: expected parameters to train, but all {count} have requires_grad=False; "
            "unfreeze some with parameter.requires_grad_(True)"
        )


def _inside(model: nn.Module) -> nn.Module | None:
    if "_orig_mod" in model._modules:  # of torch.compile; this does not import the compiler
        return model._modules["_orig_mod"]
    return model._modules["module"] if isinstance(model, WRAPPERS) else None


def _instead(given: Any) -> str:
    """Return what was given in place of a module, and what to do about it."""
    if isinstance(given, type) and issubclass(given, nn.Module):
        return f"the class {given.__name__}; make one: {given.__name__}(...)"
    if inspect.isroutine(given):
        return f"the function {given.__name__}; call it: {given.__name__}(...)"
    if isinstance(given, (str, PathLike)):
        return (
            f"{given if isinstance(given, str) else str(given)!r} ({type(given).__name__}); build the model, such as "
            "torchvision.models.resnet18(), and give it its weights: model.load_state_dict(torch.load(path)); for a "
            "folder of prunekit.save: prunekit.load(folder)"
        )
    if isinstance(given, Mapping):
        return "a mapping, as a state dict is; build the model, and model.load_state_dict(...)"
    inside = [name for name, value in getattr(given, "__dict__", {}).items() if isinstance(value, nn.Module)]
    there = f", whose {inside[0]} is one: give .{inside[0]}" if inside else ""
    return f"{type(given).__name__}{there}"


def _refuse_flattened(model: nn.Module) -> None:
    fsdp = sys.modules["torch.distributed.fsdp"]
    for path, module in model.named_modules():
        if isinstance(module, fsdp.FullyShardedDataParallel):
            raise ModelError(
                f"{path or 'the model'} is wrapped in FullyShardedDataParallel, which flattens its parameters; give "
                "the model as it was before that, and wrap what comes out"
            )
