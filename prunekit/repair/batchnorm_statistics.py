"""BatchNorm statistics computed again, exactly, over any number of batches of any size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from prunekit.errors import DataError
from prunekit.hooks.owner import HookOwner
from prunekit.hooks.wrappers import require_trainable, unwrapped
from prunekit.modes.public_call import public_call
from prunekit.tasks.batches import ModelBatches
from prunekit.tasks.task import Task
from prunekit.utils.context import device_of, training_mode
from prunekit.utils.inputs import call, concatenate, described, running, sample_count, to_device
from prunekit.utils.progress import reporting, tracked
from prunekit.utils.tensors import accumulation_dtype


class _Moments(HookOwner):
    """Count, mean and sum of squared deviations of a BatchNorm's inputs, per channel.

    Merged as in Chan, Golub & LeVeque 1983, in float64 (float32 where the device has no float64).
    """

    def __init__(self, module: _BatchNorm) -> None:
        super().__init__()
        self.module, self.calls, self.count = module, 0, 0
        self.mean: Tensor | float = 0.0  # (C,) after the first call
        self.squares: Tensor | float = 0.0  # (C,)

    def register(self) -> None:
        """Register the hook."""
        self.own(self.module.register_forward_pre_hook(self._see))

    def _see(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        x = inputs[0].detach().transpose(0, 1).flatten(1)  # (C, positions)
        variance, mean = torch.var_mean(x.to(accumulation_dtype(x.device)), 1, correction=0)  # (C,), (C,)
        count = x.shape[1]
        total, delta = self.count + count, mean - self.mean
        self.squares = self.squares + variance * count + delta**2 * (self.count * count / total)
        self.mean = self.mean + delta * (count / total)
        self.count, self.calls = total, self.calls + 1

    def write(self) -> None:
        """Write mean and unbiased variance into the module; a module that never ran keeps what it had."""
        if not self.calls or not isinstance(self.mean, Tensor) or not isinstance(self.squares, Tensor):
            return
        module = self.module
        assert module.running_mean is not None
        assert module.running_var is not None
        module.running_mean.copy_(self.mean)
        module.running_var.copy_(self.squares / max(1, self.count - 1))
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.fill_(self.calls)


@public_call
def recalibrate_batchnorm(
    model: nn.Module,
    batches: Any,
    *,
    device: torch.device | str | None = None,
    task: Task | str | None = None,
    progress: bool | None = None,
) -> tuple[str, ...]:
    """Replace the running statistics of every BatchNorm by those of `batches`, in place.

    Each position of each batch has the same weight, whatever the batches' sizes: the result is the mean and the
    unbiased variance of all values that reached the layer, not an average over batches. As in
    `torch.optim.swa_utils.update_bn`, every layer normalizes a batch by that batch's own statistics meanwhile;
    everything else, dropout too, is in eval mode. Modes and momentum are restored.

    Args:
        model: moved to `device` if one is given.
        batches: as for `prunekit.prune`, with or without targets, which are not used: a loader of images (B, C, H, W),
            all of them as one tensor, mappings... A batch of one sample, which may have no variance, is joined with the
            one before.
        device: where the model runs; None: where its parameters are.
        task: the task or its name, which splits batches that come in another form.
        progress: whether to show bars on stderr; None: on a terminal and in a notebook.

    Returns:
        Paths of the modules recalibrated; one that did not run, such as an auxiliary head, is not among them.

    Raises:
        DataError: there are no batches, one has an unknown form, or there are too few values for a variance.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 2, 1))
        >>> small = pk.prune(model, torch.randn(1, 3, 8, 8), channels=0.5).model
        >>> pk.recalibrate_batchnorm(small, torch.randn(64, 3, 8, 8))
        ('1',)
    """
    model = unwrapped(model, offloaded=True)
    require_trainable(model, "recalibrate_batchnorm")
    moments = {
        name: _Moments(module)
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }
    place = device_of(model, device)
    if device is not None:
        model.to(place)
    with ExitStack() as stack:
        stack.enter_context(reporting(progress, "recalibrate_batchnorm"))
        stack.enter_context(training_mode(model, False))
        stack.enter_context(_batch_statistics([owner.module for owner in moments.values()]))
        for owner in moments.values():
            stack.enter_context(owner)
        _run(model, ModelBatches(model, batches, task, "BatchNorm recalibration"), place)
    for owner in moments.values():
        owner.write()
    return tuple(name for name, owner in moments.items() if owner.calls)


@contextmanager
def _batch_statistics(modules: Sequence[_BatchNorm]) -> Iterator[None]:
    """Let modules normalize by the batch without changing their buffers, also if a batch fails."""
    before = [(module, module.training, module.track_running_stats) for module in modules]
    try:
        for module in modules:
            module.training, module.track_running_stats = True, False
        yield
    finally:
        for module, training, tracked in before:
            module.training, module.track_running_stats = training, tracked


@torch.no_grad()
def _run(model: nn.Module, batches: ModelBatches, device: torch.device) -> None:
    count, given = 0, _without_single(batches)
    for count, inputs in enumerate(tracked(given, "recalibration", total=length_hint(batches)), 1):
        with running(model, inputs):
            try:
                call(model, to_device(inputs, device))
            except ValueError as error:  # torch: "Expected more than 1 value per channel when training"
                shown = inputs[0] if len(inputs) == 1 else inputs
                raise DataError(f"BatchNorm recalibration: batch {count} of {described(shown)}: {error}") from error
    if not count:
        raise DataError("BatchNorm recalibration: expected at least one batch of samples, got none")


def _without_single(batches: ModelBatches) -> Iterator[Any]:
    held: Any = None
    for inputs, _ in batches:
        if held is not None and sample_count(inputs) > 1 and sample_count(held) > 1:
            yield held
            held = inputs
        else:
            held = inputs if held is None else concatenate([held, inputs])
    if held is not None:
        yield held
