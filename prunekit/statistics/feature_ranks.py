"""Ranks of a channel's feature maps, as in HRank."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from prunekit.channels.tracing.tracer import channel_axis
from prunekit.errors import NonFiniteError
from prunekit.hooks.hook import called_leaves
from prunekit.hooks.wrappers import unwrapped
from prunekit.statistics.consumers import Consumer
from prunekit.statistics.forward_passes import ConsumerHooks
from prunekit.statistics.layer_stats import ChannelSums, StatsKey
from prunekit.utils.inputs import blank_padding, rows_of
from prunekit.utils.tensors import gather


class MapRanks(ChannelSums):
    """Ranks of the feature maps of an activation, summed for each channel over `count` maps."""


class RankCollector(ConsumerHooks):
    """Measures the ranks of feature maps while a model runs, as a context manager of hooks.

    It measures the inputs of layers that read channels through a weight, and the outputs of linear layers and of all
    other modules without children. A feature map is a channel's height x width on one image, 1 x 1 of a flat input; for
    a channel of tokens it is the matrix samples x tokens of one batch. Each takes a singular value decomposition, which
    together take many times the forward pass: a few hundred images are enough.

    Args:
        model: the model, not compiled.

    Raises:
        ModelError: on enter, when the model is compiled.
        NonFiniteError: in a hook: a feature map holds NaN or Inf; names the activation.
    """

    _running: dict[StatsKey, MapRanks]

    def __init__(self, model: nn.Module) -> None:
        model = unwrapped(model, offloaded=True, compiled=False)
        super().__init__(model)
        self._sums: dict[StatsKey, MapRanks] = {}

    def ranks(self) -> dict[StatsKey, MapRanks]:
        """Return the ranks so far, by activation."""
        self.require_passes()
        return dict(self._sums)

    def register_hooks(self) -> None:
        """Register hooks on the outputs of modules, and intercept the consumers."""
        super().register_hooks()
        for path, module in called_leaves(self._model).items():
            self._hook_output(path, module)

    def finish_pass(self) -> None:
        """Add the ranks of the finished pass."""
        for key, ranks in self._running.items():
            known = self._sums.get(key)
            self._sums[key] = ranks if known is None else known.merge(ranks)

    def on_input(self, consumer: Consumer, values: Tensor, axis: int) -> None:
        """Measure the input of a layer with a weight."""
        self._measure(consumer.path, "input", values, axis)

    def on_output(self, consumer: Consumer, values: Tensor, axis: int) -> None:
        """Measure the output of a linear layer: nothing else carries attention's queries and keys."""
        if axis == values.dim() - 1:
            self._measure(consumer.path, "output", values, axis)

    def _hook_output(self, path: str, module: nn.Module) -> None:
        def after(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
            tensor = next(iter(gather(result)), None)
            if self.inside and tensor is not None and path not in self.consumers:
                self._measure(path, "output", tensor, channel_axis(module, tensor.ndim))

        self.own_forward(module, after, again=True)

    def _measure(self, path: str, side: Literal["input", "output"], values: Tensor, axis: int) -> None:
        key = StatsKey(path, side, self.ordinal(path, side))
        if axis == values.dim() - 1:  # padding adds no rank
            values = rows_of(values, self.counted) if values.dim() == 2 else blank_padding(values, self.counted)
        maps = _maps(values, axis)
        if maps is None:
            return
        if not maps.isfinite().all():
            raise NonFiniteError(f"NaN or Inf in the {key}; check the images and the weights before it")
        with torch.no_grad():
            found = torch.linalg.matrix_rank(maps)  # (maps, channels)
        self._running[key] = MapRanks(len(found), found.sum(0).cpu().double().numpy())


def _maps(values: Tensor, axis: int) -> Tensor | None:
    """Return feature maps (maps, channels, rows, columns) in float32 at least; None if there are none."""
    if values.ndim < 2 or not values.is_floating_point() or values.numel() == 0:
        return None
    values = values[..., None, None] if values.ndim == 2 else values
    channels = values.to(torch.promote_types(values.dtype, torch.float32)).movedim(axis, 0)
    if channels.ndim == 3:  # (channels, samples, tokens)
        return channels[None]
    return channels.transpose(0, 1).flatten(3)
