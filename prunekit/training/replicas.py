"""A model trained by several processes: each has a replica and its share of every batch, and gradients are summed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from prunekit.data import Batches
from prunekit.distributed.exchange import gather, require_equal, share_tensors
from prunekit.distributed.group import rank, size
from prunekit.errors import UsageError

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


def prepared(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler
) -> tuple[Any, Any, Any]:
    """Model, optimizer and schedule for the steps of a run: the model as a replica where there are several processes.

    Replicas start with the main process's weights. Hooks on the model itself stay: only calls that lead to a backward
    pass go through the replica. Its gradients are summed over the processes, not averaged: losses are divided by the
    images of all processes, so that what flows back through each is what would flow in a single process. Parameters
    that the loss does not depend on are found in each step, and have no gradient.
    """
    if size() > 1:
        accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
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


@contextmanager
def quiet() -> Iterator[None]:
    """Leaves out DDP's advice not to look for unused parameters: whether there are any, only the model knows."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        yield
