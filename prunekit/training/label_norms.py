"""The l2 norm of a label: over all slices of all parameters that carry it, whoever makes or reads the channel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from prunekit.channels import ChannelMap


@dataclass(frozen=True)
class _Carrier:
    """A parameter, and the labels along those of its axes that carry free ones.

    Where two labels decide on an index, as on heads and positions in them, an axis is listed once for each.
    """

    parameter: Tensor
    axes: tuple[tuple[int, Tensor], ...]  # (axis, int64 (size,)), on the parameter's device

    def along(self, axis: int) -> list[int]:
        """A shape with which a vector lies along an axis."""
        return [-1 if position == axis else 1 for position in range(self.parameter.ndim)]


class LabelNorms:
    """Norms of labels over chosen parameters, and sums of gradients that point along them.

    An entry that carries two labels, as the weight of a convolution does, belongs to the slices of both.

    Args:
        channel_map: what carries which label.
        parameters: by name; those that carry no free label are left out.
    """

    def __init__(self, channel_map: ChannelMap, parameters: Mapping[str, Tensor]) -> None:
        self._n_labels = channel_map.n_labels
        found = (_carrier(channel_map, name, parameter) for name, parameter in parameters.items())
        self._carriers = [carrier for carrier in found if carrier is not None]
        self.counts = self._sums((c, torch.ones(c.parameter.shape)) for c in self._carriers)  # entries, (n_labels,)

    def norms(self) -> Tensor:
        """(n_labels,) float64 (float32 where the device has none); 0 for locked labels."""
        return self._sums((c, c.parameter.detach().square()) for c in self._carriers).sqrt()

    def _sums(self, values: Iterable[tuple[_Carrier, Tensor]]) -> Tensor:
        total: Tensor | None = None
        for carrier, entries in values:
            device = carrier.parameter.device
            if total is None:
                wide = torch.float32 if device.type == "mps" else torch.float64
                total = torch.zeros(self._n_labels, dtype=wide, device=device)
            labeled = {axis for axis, _ in carrier.axes}
            rest = [axis for axis in range(entries.ndim) if axis not in labeled]
            small = entries.sum(rest, keepdim=True) if rest else entries  # read once, whatever axes there are
            for axis, labels in carrier.axes:
                others = [other for other in range(small.ndim) if other != axis]
                along = small.sum(others) if others else small
                total.index_add_(0, labels, along.to(device, total.dtype))
        total = torch.zeros(self._n_labels) if total is None else total
        total[0] = 0
        return total

    def add_gradients_(self, factors: Tensor) -> None:
        """Adds `factors[label] * entry` to each parameter's gradient, for each label that the entry carries.

        A parameter that the loss did not reach has no gradient and gets none.

        Args:
            factors: (n_labels,), 0 for locked labels.
        """
        for carrier in self._carriers:
            parameter, sums = carrier.parameter, torch.zeros((), device=carrier.parameter.device)
            if parameter.grad is None:
                continue
            for axis, labels in carrier.axes:
                sums = sums + factors[labels].to(parameter.dtype).view(carrier.along(axis))
            parameter.grad.addcmul_(parameter.detach(), sums)


def _carrier(channel_map: ChannelMap, name: str, parameter: Tensor) -> _Carrier | None:
    axes = [
        (axis, torch.from_numpy(deciding).to(parameter.device))
        for axis, labels in enumerate(channel_map.labels.get(name, ()))
        if labels is not None and labels.any()
        for deciding in channel_map.deciding(labels)
    ]
    return _Carrier(parameter, tuple(axes)) if axes else None
