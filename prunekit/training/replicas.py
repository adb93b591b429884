"""A model trained by several processes: each has a replica and its share of every batch, and gradients are summed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from prunekit.context import seeded, training_mode
from prunekit.data import Batches
from prunekit.distributed.exchange import everyone, gather, require_equal, share_tensors
from prunekit.distributed.group import rank, size
from prunekit.errors import UsageError
from prunekit.inputs import arguments, moved
from prunekit.nested import tensors_in
from prunekit.training.checks import two_samples

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


def shares(train: Batches, validation: Batches) -> tuple[Batches, Batches]:
    """A process's part of every training batch, and some whole validation batches.

    Raises:
        UsageError: a training batch has fewer than two images for each process.
    """
    if size() == 1:
        return train, validation
    smallest = min(train.batch_size, train.images)
    if smallest < 2 * size():
        raise UsageError(
            f"data.batch: expected at least {2 * size()}, two images for each of {size()} processes, got {smallest}; "
            "the batch is that of all processes together"
        )
    return train.split(rank(), size()), validation.dealt(rank(), size())


def has_unused(model: nn.Module, train: Batches, device: torch.device) -> bool:
    """Whether what a model returns depends on fewer than all of its trainable parameters; False in a single process.

    Tried on two images in train mode; buffers and the random state are left alone.
    """
    if size() == 1:
        return False
    inputs, _ = two_samples(train.dataset)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with seeded(0), training_mode(model, True), torch.enable_grad():
        output = functional_call(model, buffers, moved(arguments(model, inputs), device))
        whole = sum(found.float().sum() for found in tensors_in(output) if found.requires_grad)
        assert isinstance(whole, Tensor)
        gradients = torch.autograd.grad(whole, weights, allow_unused=True)
    return not everyone(all(gradient is not None for gradient in gradients))


def prepared(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, *, unused: bool
) -> tuple[Any, Any, Any]:
    """Model, optimizer and schedule for the steps of a run: the model as a replica where there are several processes.

    Replicas start with the main process's weights. Hooks on the model itself stay: only calls that lead to a backward
    pass go through the replica. Its gradients are summed over the processes, not averaged: losses are divided by the
    images of all processes, so that what flows back through each is what would flow in a single process.

    Args:
        unused: whether there are trainable parameters that the output may not depend on: found in each step.
    """
    if size() > 1:
        accelerator.ddp_handler = DistributedDataParallelKwargs(
            find_unused_parameters=unused, gradient_as_bucket_view=True
        )
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, lambda _, bucket: _summed(bucket))
    return model, optimizer, schedule


def _summed(bucket: GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def kept_apart(replica: nn.Module) -> AbstractContextManager[None]:
    """Within, gradients are added up in each process for itself, until a backward pass outside of it."""
    return replica.no_sync() if isinstance(replica, DistributedDataParallel) else nullcontext()


def share_buffers(model: nn.Module) -> None:
    """Gives every process the main one's buffers: BatchNorm statistics are of its share of the images, as in DDP."""
    share_tensors(model.named_buffers(), "the model's buffers")


def share_corrupt(*batches: Batches) -> None:
    """Tells every process which images the others could not read.

    Raises:
        DataError: they are too many.
    """
    for corrupt in [each.dataset.corrupt for each in batches if each.dataset.corrupt.limit]:
        for found in gather(corrupt.found):
            corrupt.merge(found)


def require_same_weights(model: nn.Module, when: str) -> None:
    """Checks that the replicas are equal.

    Raises:
        RunError: they have drifted apart.
    """
    if size() > 1:
        sums = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
        require_equal(repr(sums), f"the weights {when}")
