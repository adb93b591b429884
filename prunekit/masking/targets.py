"""What of a model a plan masks: parameters and buffers by the modules that own them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prunekit.errors import PlanError, nearest
from prunekit.planning import Plan

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type by the width of a floating-point value in bytes."""


class PrunedEntries:
    """Where one tensor is pruned; writes exact zeros there."""

    def __init__(self, keep: Tensor) -> None:
        self._keep = keep
        self._bits: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def zero_(self, tensor: Tensor) -> None:
        """Overwrites the pruned entries with +0.0, whatever they were (NaN too).

        It goes around the autograd version counter, on purpose: the write repeats what is there already, so graphs
        that were recorded before stay valid, and a module may be called twice in one forward pass.
        """
        bits = BITS[tensor.element_size()]
        # All bits or none: three times faster than masked_fill_, and no -0.0 and no NaN as a product would leave.
        tensor.data.view(bits).bitwise_and_(self._as(tensor.device, bits))

    def dropped(self, tensor: Tensor) -> Tensor:
        """Bool, in the tensor's shape and on its device: True where it is pruned."""
        return ~self._keep.to(tensor.device).expand(tensor.shape)

    def _as(self, device: torch.device, bits: torch.dtype) -> Tensor:
        if (device, bits) not in self._bits:
            self._bits[device, bits] = -self._keep.to(device, bits)  # two's complement: -1 is all ones
        return self._bits[device, bits]


@dataclass(frozen=True)
class MaskedTensor:
    """A parameter or buffer that a plan prunes, as an attribute of a module.

    It is looked up by name each time: `load_state_dict(assign=True)` and `.to()` may put another tensor there.
    """

    name: str
    attribute: str
    entries: PrunedEntries

    def of(self, module: nn.Module) -> Tensor:
        """The tensor, on the module that owns it (or on a copy of that module)."""
        tensor = getattr(module, self.attribute)
        assert isinstance(tensor, Tensor)
        return tensor

    def zero_(self, module: nn.Module) -> None:
        """Writes exact zeros into the pruned entries."""
        self.entries.zero_(self.of(module))


def masked_tensors(model: nn.Module, plan: Plan, *, buffers: bool) -> dict[str, tuple[nn.Module, list[MaskedTensor]]]:
    """By module path: the module, and what of its own tensors the plan prunes.

    A tensor that several modules share is listed at each of them. Of buffers only floating-point ones count, and not
    `running_var`: a variance of zero would not make a channel vanish, only its statistics degenerate.

    Raises:
        PlanError: a mask does not fit its tensor: the plan was made for another model.
    """
    canonical = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    _check_names(set(canonical.values()), plan)
    entries: dict[str, PrunedEntries | None] = {}
    found = {}
    for path, module in model.named_modules():
        masked = []
        for attribute, tensor in _owned(module, buffers=buffers).items():
            name = canonical[id(tensor)]
            if name not in entries:
                entries[name] = _entries(name, tensor, plan)
            if (pruned := entries[name]) is not None:
                masked.append(MaskedTensor(name, attribute, pruned))
        if masked:
            found[path] = (module, masked)
    return found


def _owned(module: nn.Module, *, buffers: bool) -> dict[str, Tensor]:
    owned: dict[str, Tensor | None] = dict(module._parameters)
    if buffers:
        owned |= {name: buffer for name, buffer in module._buffers.items() if name != "running_var"}
    return {name: tensor for name, tensor in owned.items() if tensor is not None and tensor.is_floating_point()}


def _check_names(names: set[str], plan: Plan) -> None:
    for name in plan.channel_map.labels:
        if name not in names and plan.mask(name) is not None:
            raise PlanError(f"the plan prunes {name!r}, which this model does not have; {nearest(name, names)}")


def _entries(name: str, tensor: Tensor, plan: Plan) -> PrunedEntries | None:
    keep = plan.mask(name)
    if keep is None:
        return None
    fits = keep.ndim == tensor.ndim and all(a in (1, b) for a, b in zip(keep.shape, tensor.shape, strict=True))
    if not fits:
        raise PlanError(
            f"{name}: the plan's mask of shape {tuple(keep.shape)} does not fit shape {tuple(tensor.shape)}; "
            "was the plan made for another model, or the model compacted already?"
        )
    return PrunedEntries(keep)
