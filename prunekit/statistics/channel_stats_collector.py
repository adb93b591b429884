"""Calibration: a model runs over batches, and a collector measures its activations."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.channels.tracing.execution import channel_axis
from prunekit.errors import UsageError, nearest
from prunekit.hooks.hook import called_leaves, never_called
from prunekit.hooks.wrappers import unwrapped
from prunekit.modes.public_call import public_call
from prunekit.statistics.channel_stats import ChannelStats
from prunekit.statistics.layer_stats import ARRAYS, FloatArray, LayerStats, Side, StatsKey, combine_rows
from prunekit.statistics.observers import Consumer, ConsumerHooks, watch
from prunekit.statistics.reductions import summarize
from prunekit.tasks.batches import ModelBatches
from prunekit.tasks.task import Task
from prunekit.utils.context import device_of
from prunekit.utils.globs import globs
from prunekit.utils.private_torch import without_torch_function
from prunekit.utils.progress import reporting
from prunekit.utils.tensors import gather

PARTS = 16
"""Batches merged at a time; merging each alone costs as much as measuring a small activation."""
FIRST_NON_FINITE = ARRAYS.index("first_non_finite")
CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.PReLU)
"""Modules that read channels on axis 1, also where that is as long as texts are; others keep them on the last one."""


@public_call
def calibrate(
    model: nn.Module,
    batches: Any,
    *,
    device: torch.device | str | None = None,
    modules: Sequence[str] | None = None,
    inputs: bool = True,
    outputs: bool = True,
    task: Task | str | None = None,
    progress: bool | None = None,
) -> ChannelStats:
    """Run a model over batches, in eval mode without gradients, and return its channel statistics.

    Args:
        model: every module is afterwards in the mode it had.
        batches: as `prunekit.prune` takes them: tensors, or mappings of them by the names of the model's arguments; or
            tuples and lists whose first entry is that or a tuple of all arguments, such as (images, labels). Or all
            samples as one tensor, one list of images (C, H, W), or one mapping of tensors, or a data set of them.
        device: of the batches; None: that of the model's parameters.
        modules: as for `StatsCollector`.
        inputs: as for `StatsCollector`.
        outputs: as for `StatsCollector`.
        task: takes batches apart that come in another form; itself or its name.
        progress: whether to show bars on stderr; None: on a terminal and in a notebook.

    Raises:
        UsageError: `batches` is empty, and as for `StatsCollector`.
        DataError: a batch has a form that is not known; a `UsageError`.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> stats = pk.calibrate(model, torch.randn(64, 4))  # or a loader, with or without labels
        >>> print(stats)
        Channel statistics: 6 activations, 70 channels, 0 of them dead
        ...
          module  side    channels  values  ...  zeros  dead  NaN or Inf
          0       input          4     256  ...
        ...
        >>> plan = pk.plan(model, torch.randn(1, 4), macs=0.5, criterion="activation_rms", stats=stats)
    """
    model = unwrapped(model, offloaded=True)
    place = device_of(model, device)
    collector = StatsCollector(model, modules=modules, inputs=inputs, outputs=outputs)
    with reporting(progress, "calibrate"):
        watch(model, ModelBatches(model, batches, task), collector, device=place)
    return collector.stats()


class StatsCollector(ConsumerHooks):
    """Collects per-channel statistics of a model's activations, as a context manager of forward hooks.

    It also measures the inputs and outputs of layers whose weight is used without a call of their module, as in
    attention.

    Every forward pass of `model` inside the `with` counts, in full: every batch, every call of a module that is
    called more than once, every position. Memory is O(channels). Train or eval mode and `no_grad` are left to the
    caller.

    Values are reduced inside the hook, because a later in-place ReLU may overwrite them.

    Args:
        model: the model, not compiled.
        modules: paths as in `named_modules()`; None: every module without children, every layer with a weight.
        inputs: whether to measure the first tensor among a module's arguments.
        outputs: whether to measure the first tensor in a module's result.
        axes: channel axis by module path, where `channel_axis` is wrong (an activation after a Linear, say).

    Raises:
        UsageError: the model has no module of that path; in a hook: the number of channels of an activation changes
            from batch to batch, or it does not have the given axis.
        ModelError: on enter, when the model is compiled: hooks added after `torch.compile` are silently ignored.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> with pk.StatsCollector(model, modules=["1"], inputs=False) as collector:
        ...     for _ in range(3):
        ...         y = model(x)
        >>> collector.stats()  # of all three batches
        <ChannelStats: 1 activation, 16 channels, ... of them dead>
        >>> (layer,) = collector.stats().layers.values()
        >>> int(layer.count[0])  # values of a channel
        12
    """

    _running: dict[StatsKey, FloatArray]

    def __init__(
        self,
        model: nn.Module,
        *,
        modules: Sequence[str] | None = None,
        inputs: bool = True,
        outputs: bool = True,
        axes: Mapping[str, int] | None = None,
    ) -> None:
        model = unwrapped(model, offloaded=True, compiled=False)
        super().__init__(model)
        self._targets = _targets(model, modules)
        self._every = modules is None
        self._called: set[str] = set()
        self._sides = {"input": inputs, "output": outputs}
        self._axes = dict(axes or {})
        for path in self._axes:
            if path not in self._targets:
                raise UsageError(f"axes: {path!r} is not among the measured modules; {nearest(path, self._targets)}")
        self._parts: dict[StatsKey, list[FloatArray]] = {}

    def register_hooks(self) -> None:
        """Register hooks on the modules, and intercept the consumers."""
        super().register_hooks()
        for path, module in self._targets.items():
            if not never_called(module):  # else a consumer, measured where its weight is used
                self.own_forward_pre(module, partial(self._before, path))
                if self._sides["output"]:
                    self.own_forward(module, partial(self._after, path))

    def run(self, batches: Iterable[Any], *, device: torch.device | str | None = None) -> ChannelStats:
        """Run the model over batches, in eval mode without gradients, and return the statistics so far."""
        watch(self._model, ModelBatches(self._model, batches), self, device=device)
        return self.stats()

    def stats(self) -> ChannelStats:
        """Return the statistics so far, in the order in which activations were first met.

        Raises:
            UsageError: the model has not run inside the `with`.
        """
        self.require_passes()
        merged = {key: LayerStats.from_rows(combine_rows(parts)) for key, parts in self._parts.items()}
        return ChannelStats(merged, reads=dict(self.consumers))

    def _before(self, path: str, module: nn.Module, arguments: Any, named: Any) -> None:
        self._called.add(path)
        if self._sides["input"]:
            self._measure(path, "input", first_tensor((arguments, named)))

    def _after(self, path: str, module: nn.Module, arguments: Any, named: Any, result: Any) -> None:
        self._measure(path, "output", first_tensor(result))

    def start_pass(self) -> None:
        """Drop the results of a pass that raised."""
        super().start_pass()
        self._called.clear()

    def on_values(self, consumer: Consumer, side: Side, values: Tensor, axis: int) -> None:
        """Measure what a layer whose module is not called reads or returns."""
        path = consumer.path
        if self._sides[side] and path not in self._called and (self._every or path in self._targets):
            self._measure(path, side, values, axis)

    def _measure(self, path: str, side: Side, tensor: Tensor | None, axis: int | None = None) -> None:
        if not self.inside:
            return
        key = StatsKey(path, side, self.ordinal(path, side))
        if tensor is None or tensor.ndim < 2:
            return
        if axis is None:
            module = self._targets[path]
            by_token = self._has_tokens(tensor) and not isinstance(module, CHANNELS_FIRST)
            axis = self._axes.get(path, 2 if by_token else channel_axis(module, tensor.ndim))
        with without_torch_function():  # these computations are not the model's
            found = self.measurable(tensor, axis)
            if found is not None:
                tensor, axis = found
                if not -tensor.ndim <= axis < tensor.ndim:
                    raise UsageError(f"{key}: axes names channel axis {axis}, but the shape is {tuple(tensor.shape)}")
                self._running[key] = self._summarize(tensor, axis % tensor.ndim)

    def _has_tokens(self, tensor: Tensor) -> bool:
        """Return whether a tensor is (B, T, channels) of sequences, or (1, T, channels) of what all of them share."""
        return tensor.ndim == 3 and any(
            tuple(tensor.shape[:2]) in ((1, length), (count, length)) for count, length in self.sequences
        )

    def finish_pass(self) -> None:
        """Add the results of the finished forward pass; one that raised does not count."""
        for key, rows in self._running.items():
            parts = self._parts.setdefault(key, [])
            if parts and parts[0].shape != rows.shape:
                raise UsageError(
                    f"{key}: expected {parts[0].shape[1]} channels as before, got {rows.shape[1]}; where the size of "
                    f"the samples changes, name the axis that holds the channels: axes={{{key.module!r}: -1}}"
                )
            parts.append(rows)
            if len(parts) == PARTS:
                parts[:] = [combine_rows(parts)]
        self._cache.clear()

    def _summarize(self, tensor: Tensor, axis: int) -> FloatArray:
        """Return the measurement of a tensor, from the cache if it was measured before."""
        rows: FloatArray | None = self._cache.get(tensor, axis)
        if rows is None:
            rows = summarize(*self.without_padding(tensor, axis))
            rows[FIRST_NON_FINITE] *= self.number + 1
            self._cache.put(tensor, axis, rows)
        return rows


def first_tensor(value: Any) -> Tensor | None:
    """Return the first floating-point tensor in a value or in its tuples, lists and dictionaries; None if none."""
    return next((tensor for tensor in gather(value) if tensor.is_floating_point()), None)


def _targets(model: nn.Module, modules: Sequence[str] | None) -> dict[str, nn.Module]:
    if modules is None:
        return called_leaves(model)
    found = dict(model.named_modules())
    for path in globs(modules, "modules", model):
        if path not in found:
            raise UsageError(f"modules: the model has no module {path!r}; {nearest(path, found)}")
    return {path: found[path] for path in modules}
