"""Training in several processes: each has a replica of the model, or its shards of every parameter (FSDP2).

Every process takes its share of each batch, and gradients are summed over the processes: together they compute what one
process would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from prunekit.data.loader import Batches
from prunekit.distributed.process_group import (
    everyone,
    from_main,
    gather_values,
    is_main,
    is_sharded,
    rank,
    require_equal,
    share_tensors,
    size,
    total,
)
from prunekit.errors import ModelError, UsageError
from prunekit.hooks.model_copy import copied
from prunekit.hooks.owner import HookOwner
from prunekit.settings.train import TrainSettings
from prunekit.training.callbacks.averaging import Average
from prunekit.training.callbacks.callback import Callback
from prunekit.training.callbacks.pruning_schedule import PruningSchedule
from prunekit.training.callbacks.regularizers import SparsityRegularizer
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


def replica_of(model: nn.Module, train: Batches, read: Callable[[Any], Any] | None = None) -> nn.Module:
    """Return the module to call in training steps: the model, or among several processes this one's replica of it.

    Replicas start with the main process's weights. Hooks on the model itself stay: only calls that lead to a backward
    pass go through the replica. Gradients are summed over the processes, not averaged: losses are divided by the images
    of all processes, so that gradients are those of a single process. `read` takes from an output what the loss is of;
    None: all of it.
    """
    if is_sharded(model) or size() == 1:
        return model
    with same_random_state():
        inputs, _ = two_samples(train.dataset)
        given = to_device(inputs_as_example(model, inputs), next(model.parameters()).device)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with _summed_output(model, given, read) as whole:
        gradients = torch.autograd.grad(whole, weights, allow_unused=True)
    unused = not everyone(all(gradient is not None for gradient in gradients))
    replica = DistributedDataParallel(model, find_unused_parameters=unused, gradient_as_bucket_view=True)
    replica.register_comm_hook(None, lambda _, bucket: _summed(bucket))
    if not unused:
        # Show DDP the order of gradients, by which it rearranges its buckets before the next step. Sums over more than
        # two processes depend on a number's place in its bucket, and in the first step of a resumed run would differ
        # from those of an uninterrupted one.
        with _summed_output(replica, given, read) as whole:
            whole.backward()  # type: ignore[no-untyped-call]
        replica.zero_grad()
    return replica


@contextmanager
def _summed_output(
    model: nn.Module, inputs: tuple[Any, ...], read: Callable[[Any], Any] | None = None
) -> Iterator[Tensor]:
    """Yield the sum of a model's outputs for inputs in train mode; buffers and random state don't change."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with seeded(0), training_mode(model, True), torch.enable_grad():
        output = functional_call(model, buffers, *split(inputs))
        read_of = output if read is None else read(output)
        whole = sum(found.float().sum() for found in gather(read_of) if found.requires_grad)
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


WHOLE = (Average, PruningSchedule, SparsityRegularizer)
"""Callbacks that read or write whole weights."""
UNIT = 2**20
"""The fewest parameters of a module that is gathered by itself, and not together with the modules around it."""


def in_shards(settings: TrainSettings) -> bool:
    """Return whether a run's model is sharded, which takes several processes."""
    return settings.sharding == "full" and size() > 1


def require_shardable(settings: TrainSettings, callbacks: Sequence[Callback], *, pauses: bool) -> None:
    """Raise UsageError if a run needs whole weights in each process."""
    whole = [type(callback).__name__ for callback in callbacks if isinstance(callback, WHOLE)]
    whole += ["a run that is paused"] * pauses
    whole += ["precision fp16, whose loss scale"] * (settings.precision == "fp16")
    if whole:
        raise UsageError(
            f"sharding: full does not go with {'; '.join(whole)}, which need the whole weights in each process; leave "
            "them out, or set sharding: replicas"
        )


def sharded_copy(model: nn.Module, train: Batches, device: torch.device) -> nn.Module:
    """Return a copy of a model on `device`, sharded by `fully_shard`, and move the model itself to the CPU.

    Each large module is gathered while it runs, forward and backward, and the rest together with the whole model.
    Gradients are summed over the processes, as those of replicas are. All begin with the main process's weights.
    """
    share_tensors(chain(model.named_parameters(), model.named_buffers()), "the model")
    with same_random_state():
        inputs, _ = two_samples(train.dataset)
    calls, example = Counter[str](), to_device(inputs_as_example(model, inputs), device)
    with HookOwner(partial(_count_calls, model, calls)), _summed_output(model, example):
        units = list(_units(model, {path for path, count in calls.items() if count == 1}))
    sharded = copied(model.cpu())
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)  # type: ignore[arg-type]  # torch's stub: may be None
    for path in [*units, ""]:
        try:
            unit = fully_shard(sharded.get_submodule(path), mesh=mesh, reshard_after_forward=True)
        except (NotImplementedError, ValueError) as error:
            where = path or type(model).__name__
            raise ModelError(f"sharding: full: {where}: {error}; set sharding: replicas") from error
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return sharded


def give_back_buffers(sharded: nn.Module, model: nn.Module) -> None:
    """Give a model the buffers of its sharded copy, also those that no state dict has."""
    for path, module in sharded.named_modules():
        model.get_submodule(path)._buffers.update(module._buffers)


def in_step(model: nn.Module, dealt: Batches, *, together: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yield this process's batches, and whether each counts, because a sharded model runs in all processes together.

    With `together`, so does another: its processes exchange something in every batch.

    A process that has no batches left is given others that do not count until no process has any.
    """
    if not is_sharded(model) and (size() == 1 or not together):
        yield from ((batch, True) for batch in dealt)
        return
    mine, last = iter(dealt), None
    while True:
        batch = next(mine, None)
        if not total(int(batch is not None))[0]:
            return
        if batch is None and last is None:
            last = next(iter(dealt.dealt(0, size())))
        last = last if batch is None else batch
        yield last, batch is not None


def _count_calls(model: nn.Module, calls: Counter[str], hooks: HookOwner) -> None:
    """Count the calls of modules that contain modules; a call that returns a view counts twice."""

    def count(path: str, module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        # such modules are excluded: FSDP2 would miss gradients of views written to in place
        calls[path] += 2 if any(tensor._is_view() for tensor in gather(output)) else 1

    for path, module in model.named_modules():
        if any(True for _ in module.children()):
            hooks.own_forward(module, partial(count, path))


def _units(model: nn.Module, called: set[str]) -> Iterator[str]:
    """Yield the paths of the modules that are gathered by themselves, inner ones first, without the model itself."""
    owned = Counter(map(id, _every_parameter(model)))
    taken: set[int] = set()

    def visit(path: str, module: nn.Module) -> Iterator[str]:
        for name, child in module.named_children():
            yield from visit(f"{path}.{name}" if path else name, child)
        within = Counter(map(id, _every_parameter(module)))
        left = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        apart = all(within[key] == owned[key] for key in left)
        # called once, with at least `UNIT` parameters outside of inner units, and none shared with others
        if path and path in called and apart and sum(left.values()) >= UNIT:
            taken.update(left)
            yield path

    return visit("", model)


def _every_parameter(model: nn.Module) -> Iterator[Tensor]:
    """Yield each parameter as often as a module has it."""
    for _, module in model.named_modules(remove_duplicate=False):
        yield from (parameter for parameter in module._parameters.values() if parameter is not None)
