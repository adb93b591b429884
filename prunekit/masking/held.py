"""What pruned entries held when they were pruned."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from prunekit.errors import ArtifactError
from prunekit.masking.targets import MaskedTensor, masked_tensors
from prunekit.planning import Plan


class HeldValues:
    """The values at all pruned entries of a model's parameters and buffers, taken when it is made.

    The variances of BatchNorms are among them: the masks leave them, but a channel that is zero has none, and they
    would be next to nothing when it comes back.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._tensors: dict[str, tuple[nn.Module, MaskedTensor]] = {}
        self.values: dict[str, Tensor] = {}
        """By tensor name: (pruned entries,), in the order of their indices."""
        for module, tensors in masked_tensors(model, plan, {}, buffers=True, variances=True).values():
            for tensor in tensors:
                whole = tensor.of(module).detach()
                self._tensors[tensor.name] = module, tensor
                self.values[tensor.name] = whole[tensor.entries.dropped(whole)]

    def write_back(self) -> None:
        """Writes the values to where they were."""
        with torch.no_grad():
            for name, (module, tensor) in self._tensors.items():
                whole = tensor.of(module).detach()
                whole[tensor.entries.dropped(whole)] = self.values[name].to(whole.device, whole.dtype)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Holds other values of the same entries, as a run that is resumed does.

        Raises:
            ArtifactError: they are not of these entries.
        """
        if {name: value.shape for name, value in values.items()} != {n: v.shape for n, v in self.values.items()}:
            raise ArtifactError("held values: expected those of what the plan prunes; were they of another plan?")
        self.values = {name: value.to(self.values[name].device) for name, value in values.items()}
