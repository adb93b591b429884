"""Non-finite numbers: the batch is run again to name the first module with a NaN or Inf."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.distributed.process_group import everyone, gather_values, is_sharded, local_part
from prunekit.hooks.owner import HookOwner, after_forward
from prunekit.utils.inputs import call
from prunekit.utils.tensors import first_not_finite, gather, is_finite


def first_non_finite(model: nn.Module, inputs: tuple[Any, ...]) -> str:
    """Run a batch again and return what is first not finite: the input, a parameter or an output.

    The model runs in its present mode, without gradients. A sharded model does not run in one process alone. Inputs are
    an example, see `prunekit.utils.inputs.as_example`.
    """
    if any(not bool(torch.isfinite(tensor).all()) for tensor in gather(inputs)):
        return "the input images" if len(inputs) == 1 else "the inputs"
    if is_sharded(model):
        return "unknown, because a sharded model is not run again (`sharding: replicas` names it)"
    found: list[str] = []

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        outputs = output if isinstance(output, (tuple, list)) else [output]
        named: list[tuple[str, Tensor]] = [
            (f"parameter {key!r}", parameter) for key, parameter in module.named_parameters(recurse=False)
        ]
        named += [("the output", each) for each in outputs if isinstance(each, Tensor)]
        if not found and (what := first_not_finite(named)) is not None:
            found.append(f"{what} of module {name!r} ({type(module).__name__})")

    def register(hooks: HookOwner) -> None:
        for name, module in model.named_modules():
            if not any(True for _ in module.children()) or any(True for _ in module.parameters(recurse=False)):
                hooks.own(after_forward(module, partial(look, name or type(module).__name__)))

    with HookOwner(register), torch.no_grad():
        call(model, inputs)
    return found[0] if found else "the loss alone; every module's output is finite"


def infinite_buffers(model: nn.Module) -> frozenset[str]:
    """Return the names of the buffers with an Inf in them, such as masks of attention that are added to scores."""
    return frozenset(name for name, buffer in model.named_buffers() if not is_finite(local_part(buffer)))


def non_finite_tensor(model: nn.Module, infinite: Collection[str] = ()) -> str | None:
    """Return the first parameter or buffer with a NaN or an Inf in it; None if all are finite.

    All processes of a sharded model call this together, and get the same.
    """
    found = None
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name not in infinite)
    for kind, tensors in (("buffer", buffers), ("parameter", model.named_parameters())):
        if (name := first_not_finite((name, local_part(tensor)) for name, tensor in tensors)) is not None:
            found = f"{kind} {name!r}"
    return _agreed(model, found)


def _agreed(model: nn.Module, found: str | None) -> str | None:
    """Return what the first process has found, if each of several searches its own shards."""
    if not is_sharded(model) or everyone(found is None):
        return found
    return next(each for each in gather_values(found) if each is not None)


def first_non_finite_gradient(model: nn.Module, backward: Callable[[], None]) -> str | None:
    """Return the first gradient that is not finite, in the order of computation; None if all are finite.

    Also None for a sharded model, in which gradients of single batches are never whole.
    """
    if is_sharded(model):
        return None
    found: list[str] = []

    def look(what: str, gradient: Tensor, index: int) -> None:
        if not found and not torch.isfinite(gradient).all():
            found.append(what)

    def register(hooks: HookOwner) -> None:
        for path, module in model.named_modules():
            where = f"module {path or type(module).__name__!r} ({type(module).__name__})"
            own = list(module.named_parameters(recurse=False))
            if own or not any(True for _ in module.children()):
                hooks.own_output_gradients(module, partial(look, f"that of the output of {where}"))
            for name, parameter in own:
                if parameter.requires_grad:
                    hooks.own_tensor_gradient(parameter, partial(look, f"that of parameter {name!r} of {where}"))

    model.zero_grad(set_to_none=True)
    with HookOwner(register):
        backward()
    return found[0] if found else None


def non_finite_gradient(model: nn.Module, *, nan_only: bool) -> str | None:
    """Return the first parameter whose gradient has a NaN or an Inf in it; None if all are finite.

    With `nan_only`, Inf does not count. All processes of a sharded model call this together, and get the same.
    """
    given = {
        name: local_part(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not parameter.grad.is_sparse
    }
    # One pass over all gradients; their norm may overflow although no value has, and then each is checked.
    if bool(torch.isfinite(torch.nn.utils.get_total_norm(given.values()))):
        found = None
    elif nan_only:
        found = next((name for name, gradient in given.items() if bool(gradient.isnan().any())), None)
    else:
        found = first_not_finite(given.items())
    return _agreed(model, found)


def finite_step(model: nn.Module, losses: Sequence[Tensor], *, gradients: bool) -> bool:
    """Return whether losses are finite, and perhaps all gradients, by one number that is read from the device.

    False also for finite gradients whose norm overflows.
    """
    found = [p.grad for p in model.parameters() if p.grad is not None and not p.grad.is_sparse] if gradients else []
    norms = [torch.nn.utils.get_total_norm(found)] if found else []
    return bool(torch.stack([torch.isfinite(number.detach()).all() for number in (*losses, *norms)]).all())
