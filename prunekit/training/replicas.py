"""Replicated training: each process has a replica and its share of every batch, and gradients are summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from prunekit.data.loader import Batches
from prunekit.distributed.process_group import (
    everyone,
    from_main,
    gather_values,
    is_main,
    rank,
    require_equal,
    share_tensors,
    size,
)
from prunekit.distributed.sharded_tensors import is_sharded
from prunekit.errors import UsageError
from prunekit.training.compatibility import two_samples
from prunekit.utils.context import same_random_state, seeded, training_mode
from prunekit.utils.inputs import inputs_as_example, split, to_device
from prunekit.utils.state_folders import decode_state, encode_state
from prunekit.utils.tensors import gather

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


def shares(train: Batches, validation: Batches) -> tuple[Batches, Batches]:
    """Return a process's part of every training batch, and some whole validation batches."""
    if size() == 1:
        return train, validation
    smallest = min(train.batch_size, train.images)
    if smallest < 2 * size():
        raise UsageError(
            f"data.batch: expected at least {2 * size()}, two images for each of {size()} processes, got {smallest}; "
            "the batch is that of all processes together"
        )
    return train.split(rank(), size()), validation.dealt(rank(), size())


def replica_of(model: nn.Module, train: Batches) -> nn.Module:
    """Return the module to call in training steps: the model, or among several processes this one's replica of it.

    Replicas start with the main process's weights. Hooks on the model itself stay: only calls that lead to a backward
    pass go through the replica. Gradients are summed over the processes, not averaged: losses are divided by the images
    of all processes, so that gradients are those of a single process.
    """
    if is_sharded(model) or size() == 1:
        return model
    with same_random_state():
        inputs, _ = two_samples(train.dataset)
        given = to_device(inputs_as_example(model, inputs), next(model.parameters()).device)
    unused = _has_unused(model, given)
    replica = DistributedDataParallel(model, find_unused_parameters=unused, gradient_as_bucket_view=True)
    replica.register_comm_hook(None, lambda _, bucket: _summed(bucket))
    if not unused:
        _arrange_buckets(replica, given)
    return replica


def _has_unused(model: nn.Module, inputs: tuple[Any, ...]) -> bool:
    """Return whether what a model returns depends on fewer than all of its trainable parameters."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with summed_output(model, inputs) as whole:
        gradients = torch.autograd.grad(whole, weights, allow_unused=True)
    return not everyone(all(gradient is not None for gradient in gradients))


def _arrange_buckets(replica: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Show DDP the order of gradients, by which it rearranges its buckets before the next step.

    Sums over more than two processes depend on a number's place in its bucket, and in the first step of a resumed run
    would differ from those of an uninterrupted one.
    """
    with summed_output(replica, inputs) as whole:
        whole.backward()  # type: ignore[no-untyped-call]
    replica.zero_grad()


@contextmanager
def summed_output(model: nn.Module, inputs: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yield the sum of a model's outputs for inputs in train mode; buffers and random state don't change."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with seeded(0), training_mode(model, True), torch.enable_grad():
        output = functional_call(model, buffers, *split(inputs))
        whole = sum(found.float().sum() for found in gather(output) if found.requires_grad)
        assert isinstance(whole, Tensor)
        yield whole


def _summed(bucket: GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def kept_apart(replica: Callable[..., Any]) -> AbstractContextManager[None]:
    """Return a context in which each process adds up its own gradients, until a backward pass outside of it."""
    return replica.no_sync() if isinstance(replica, DistributedDataParallel) else nullcontext()


def share_buffers(model: nn.Module) -> None:
    """Give every process the main one's buffers: BatchNorm statistics are of its share of the images, as in DDP."""
    share_tensors(model.named_buffers(), "the model's buffers")


def share_state(state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the main process's nested state in every process; None if it has none."""
    if size() == 1:
        return state
    plain, tensors = (None, {}) if state is None else encode_state(state)
    shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    plain, shapes = from_main(lambda: (plain, shapes))
    if not is_main():
        tensors = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in shapes}
    share_tensors(tensors.items(), "the state of a run")
    return None if plain is None else decode_state(plain, tensors)


def share_corrupt(*batches: Batches) -> None:
    """Tell every process which images the others could not read."""
    for corrupt in [each.dataset.corrupt for each in batches if each.dataset.corrupt.limit]:
        for found in gather_values(corrupt.found):
            corrupt.merge(found)


def require_same_weights(model: nn.Module, when: str) -> None:
    """Raise RunError if the weights of the replicas differ."""
    if size() > 1 and not is_sharded(model):
        sums = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
        require_equal(repr(sums), f"the weights {when}")
