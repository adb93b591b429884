"""BatchNorm statistics computed again, exactly, over any number of batches of any size."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from prunekit.distributed.process_group import full_tensor, local_part, shard_like, total, total_of
from prunekit.errors import DataError
from prunekit.hooks.owner import HookOwner
from prunekit.hooks.wrappers import require_trainable, unwrapped
from prunekit.modes.public_call import public_call
from prunekit.statistics.observers import watch
from prunekit.statistics.reductions import VarianceSum
from prunekit.tasks.batches import ModelBatches
from prunekit.tasks.task import Task
from prunekit.utils.context import device_of, restored
from prunekit.utils.inputs import concatenate, described, sample_count
from prunekit.utils.progress import reporting
from prunekit.utils.tensors import accumulation_dtype

STEADY = 0.1
"""The least standard deviation, over the one before, of a channel that `rebase_batchnorm` changes."""


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
    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }
    place = device_of(model, device)
    if device is not None:
        model.to(place)
    moments, given = _InputMoments(norms, by_batch=True), ModelBatches(model, batches, task, "BatchNorm recalibration")
    with reporting(progress, "recalibrate_batchnorm"):
        total = length_hint(given)
        if not watch(model, moments.described(given), moments, device=place, title="recalibration", total=total):
            raise DataError("BatchNorm recalibration: expected at least one batch of samples, got none")
    with torch.no_grad():
        moments.write()
    return tuple(name for name in norms if moments.calls[name])


def rebase_batchnorm(model: nn.Module, passes: Iterable[bool]) -> None:
    """Change what BatchNorms normalize by to what they read in passes in eval mode, but not what they compute.

    Training that normalizes by batches of other images than those of the running statistics, such as blended ones,
    begins with another function than the trained one. Formula: with s = sqrt(variance + eps) of the old statistics and
    s', m' of the new, gamma (x - m) / s + beta = gamma' (x - m') / s' + beta' for gamma' = gamma s' / s and
    beta' = beta + gamma (m' - m) / s. Norms that were never trained, that have no scale and shift to train, or that
    did not run keep what they have, and so do channels that hardly vary. In a process group all call this alike.

    Args:
        passes: each has run the model once when it yields, and says whether that counts.
    """
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and is_trained(module)
        if all(
            isinstance(own, nn.Parameter) and own.requires_grad and owners[id(own)] == 1
            for own in (module._parameters.get("weight"), module._parameters.get("bias"))
        )
    }
    if not norms:
        return
    moments = _InputMoments(norms, by_batch=False)
    with moments:
        for counts in passes:
            (moments.end_pass if counts else moments.begin_pass)()
    with torch.no_grad():
        for name, norm in norms.items():
            _rebase(norm, moments.sums[name])


def is_trained(norm: _BatchNorm) -> bool:
    """Return whether a norm has running statistics that are not those of a new one."""
    mean, variance = norm.running_mean, norm.running_var
    return mean is not None and variance is not None and bool((mean != 0).any() or (variance != 1).any())


def _rebase(norm: Any, read: VarianceSum) -> None:
    """Give a BatchNorm the statistics of what it read in all processes; computed on the CPU, in float64."""
    m, v = norm.running_mean, norm.running_var
    (count,) = total(read.count)
    if count < 2:
        return
    own, squares = (value.cpu().double().expand(m.shape) for value in (read.mean, read.squares))
    mean = total_of(read.count * own) / count
    variance = total_of(squares + read.count * (own - mean).square()) / (count - 1)
    mean, variance = mean.to(m.dtype).double(), variance.to(v.dtype).double()  # as they are kept
    gamma, beta = (full_tensor(parameter).cpu().double() for parameter in (norm.weight, norm.bias))
    scale = (v.cpu().double() + norm.eps).sqrt()
    factor, shift = (variance + norm.eps).sqrt() / scale, gamma * (mean - m.cpu().double()) / scale
    # of a channel that hardly varies on these images, a batch in which it does would be made small
    told = (factor > STEADY) & factor.isfinite() & shift.isfinite()
    for parameter, value in ((norm.weight, gamma * factor), (norm.bias, beta + shift)):
        value = torch.where(told.to(parameter.device), value.to(parameter), full_tensor(parameter))
        local_part(parameter).copy_(local_part(shard_like(value, parameter)))
    for buffer, value in ((m, mean), (v, variance)):
        buffer.copy_(torch.where(told.to(buffer.device), value.to(buffer), buffer))


@contextmanager
def _batch_statistics(modules: Collection[_BatchNorm]) -> Iterator[None]:
    """Let modules normalize by the batch without changing their buffers, also if a batch fails."""
    with restored(modules, "training", "track_running_stats"):
        for module in modules:
            module.training, module.track_running_stats = True, False
        yield


class _InputMoments(HookOwner):
    """Mean and variance of what each BatchNorm reads, also while all of them normalize by the batch."""

    def __init__(self, norms: Mapping[str, _BatchNorm], *, by_batch: bool) -> None:
        super().__init__()
        self.norms, self._by_batch, self._batch = norms, by_batch, ""
        self.sums = {name: VarianceSum() for name in norms}  # per channel
        self.calls = Counter[str]()
        self._read: list[tuple[str, int, Tensor, Tensor]] = []  # in the running pass: count, mean, squared deviations

    def described(self, batches: ModelBatches) -> Iterator[tuple[Any, None]]:
        """Yield the inputs of batches, for error messages to name the running one, and add up what was read of each."""
        for number, inputs in enumerate(_without_single(batches), 1):
            self._batch = f"batch {number} of {described(inputs[0] if len(inputs) == 1 else inputs)}"
            yield inputs, None
            self.end_pass()

    def end_pass(self) -> None:
        """Add up what was read in the running pass."""
        for name, count, mean, squares in self._read:
            self.sums[name].add(count, mean, squares)
            self.calls[name] += 1
        self._read.clear()

    def begin_pass(self) -> None:
        """Drop what a pass noted that failed, or that does not count."""
        self._read.clear()

    def register(self) -> None:
        """Register a hook on each BatchNorm."""
        if self._by_batch:
            self.own_context(_batch_statistics(self.norms.values()))
        for name, norm in self.norms.items():
            self.own(norm.register_forward_pre_hook(partial(self._add, name)))

    def _add(self, name: str, norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        x = inputs[0].detach().transpose(0, 1).flatten(1)  # (C, positions)
        count = x.shape[1]
        if count < 2 and self._by_batch:
            raise DataError(
                f"BatchNorm recalibration: {self._batch}: expected more than 1 value per channel of what {name} reads, "
                f"got {tuple(inputs[0].shape)}, which has no variance"
            )
        variance, mean = torch.var_mean(x.to(accumulation_dtype(x.device)), 1, correction=0)  # (C,), (C,)
        self._read.append((name, count, mean, variance * count))

    def write(self) -> None:
        """Write mean and unbiased variance into the modules; one that never ran keeps what it had."""
        for name, calls in self.calls.items():
            norm: Any = self.norms[name]
            norm.running_mean.copy_(self.sums[name].mean)
            norm.running_var.copy_(self.sums[name].variance())
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.fill_(calls)


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
