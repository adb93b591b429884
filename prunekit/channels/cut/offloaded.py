"""Models whose weights Accelerate keeps on the CPU or the disk, as copies that have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from prunekit.channels.cut.model_copy import with_tensors
from prunekit.utils.private_torch import ACCELERATE_HOOK


def with_weights(model: nn.Module) -> nn.Module:
    """Return a copy with the weights that Accelerate offloads, on the CPU; a model without such weights as it is.

    Weights on the disk are mapped into memory where Accelerate's files allow it, so that only those in use take any.
    """
    found = dict(_offloaded(model))
    if not found:
        return model
    copy = with_tensors(model, found)
    for module in copy.modules():
        vars(module).pop(ACCELERATE_HOOK, None)
    _tie(copy, found)
    return copy.cpu()


def _offloaded(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        hook = getattr(module, ACCELERATE_HOOK, None)
        for one in (hook, *getattr(hook, "hooks", ())):
            if getattr(one, "offload", False):
                yield from _weights_of(path, module, one)


def _weights_of(path: str, module: nn.Module, hook: Any) -> Iterator[tuple[str, Tensor]]:
    inside = bool(hook.place_submodules)
    named = [*module.named_parameters(recurse=inside), *module.named_buffers(recurse=inside)]
    for name, tensor in named:
        if tensor.is_meta:
            yield f"{path}.{name}" if path else name, hook.weights_map[name]


def _tie(copy: nn.Module, found: dict[str, Tensor]) -> None:
    """Give modules that share a weight one parameter again, as each of them may have one of its own on the meta device.

    Weights in memory are the same if they begin at the same address; transformers knows which of its own are tied.
    """
    first: dict[tuple[int, Any], nn.Parameter] = {}
    for name, value in found.items():
        path, _, own = name.rpartition(".")
        module = copy.get_submodule(path)
        parameter = module._parameters.get(own)
        if parameter is not None and value.numel():
            module._parameters[own] = first.setdefault((value.data_ptr(), value.shape), parameter)
    tie = getattr(copy, "tie_weights", None)
    if callable(tie):
        tie()
