"""A model trained in shards: each process has its part of every parameter, gradient and momentum (FSDP2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from prunekit.channels.cut.model_copy import copied
from prunekit.data.loader import Batches
from prunekit.distributed.process_group import is_sharded, share_tensors, size, total
from prunekit.errors import ModelError, UsageError
from prunekit.hooks.owner import HookOwner
from prunekit.settings.train import TrainSettings
from prunekit.training.callbacks.averaging import Average
from prunekit.training.callbacks.callback import Part
from prunekit.training.callbacks.gradient_flow import GradientFlow
from prunekit.training.callbacks.regularizers import Sparsifying
from prunekit.training.callbacks.scheduled_masks import PruningSchedule
from prunekit.training.callbacks.tensorboard import Watching
from prunekit.training.checks import two_samples
from prunekit.training.replicas import tried
from prunekit.utils.context import same_random_state
from prunekit.utils.inputs import inputs_as_example, to_device
from prunekit.utils.tensors import gather

WHOLE = (Average, GradientFlow, PruningSchedule, Sparsifying)
"""Parts that read or write whole weights."""
UNIT = 2**20
"""Parameters of a module from which on it is put together by itself, and not with what is around it."""


def in_shards(settings: TrainSettings) -> bool:
    """Return whether a run's model is sharded: one process has nobody to share with."""
    return settings.sharding == "full" and size() > 1


def require_shardable(settings: TrainSettings, parts: Sequence[Part], *, left: bool) -> None:
    """Checks that nothing takes part in a run that needs whole weights in each process.

    Args:
        left: whether the run may be left before its end, or is one that was.

    Raises:
        UsageError: something does; says what.
    """
    whole = [type(part).__name__ for part in parts if isinstance(part, WHOLE)]
    whole += ["watched histograms or images" for part in parts if isinstance(part, Watching) and part.reads_weights]
    whole += ["a run that is left and gone on with"] * left
    whole += ["precision fp16, whose loss scale"] * (settings.precision == "fp16")
    if whole:
        raise UsageError(
            f"sharding: full does not go with {'; '.join(whole)}, which need the whole weights in each process; leave "
            "them out, or set sharding: replicas"
        )


def sharded_copy(model: nn.Module, train: Batches, device: torch.device) -> nn.Module:
    """Return a copy of a model on `device`, spread over the processes by `fully_shard`; the model itself goes to the
    CPU.

    Each large module is put together while it runs, forward and backward, and the rest with the whole model.
    Gradients are summed over the processes, as those of replicas are. All begin with the main process's weights.

    Args:
        model: on `device`, without hooks that the two images it is tried on would disturb.
        train: what it will be trained on.

    Raises:
        ModelError: torch cannot shard one of its parameters, such as a scalar.
    """
    share_tensors(chain(model.named_parameters(), model.named_buffers()), "the model")
    with same_random_state():
        inputs, _ = two_samples(train.dataset)
    with _Called(model) as watch, tried(model, to_device(inputs_as_example(model, inputs), device)):
        units = list(_units(model, watch.once()))
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


def in_step(model: nn.Module, dealt: Batches) -> Iterator[tuple[Any, bool]]:
    """This process's batches, and whether each counts: a sharded model runs in all processes or in none.

    Where one has no more, it is given others that do not count until all have none.
    """
    if not is_sharded(model):
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


class _Called(HookOwner):
    """Counts the calls of modules that have modules within, but for those that return views.

    What is written in place to a view of a module's result would keep FSDP2 from hearing of its gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._calls: Counter[str] = Counter()

    def register(self) -> None:
        for path, module in self._model.named_modules():
            if any(True for _ in module.children()):
                self.own_forward(module, partial(self._see, path), again=True)

    def _see(self, path: str, module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        self._calls[path] += 2 if any(tensor._is_view() for tensor in gather(output)) else 1

    def once(self) -> set[str]:
        """Return the paths of those that were called once."""
        return {path for path, calls in self._calls.items() if calls == 1}


def _units(model: nn.Module, called: set[str]) -> Iterator[str]:
    """Yield the paths of the modules to be put together by themselves, inner ones first; the model itself is left out.

    Each is called, has at least `UNIT` parameters that no module in it takes, and shares none with others.
    """
    owned = Counter(map(id, _every_parameter(model)))
    taken: set[int] = set()

    def visit(path: str, module: nn.Module) -> Iterator[str]:
        for name, child in module.named_children():
            yield from visit(f"{path}.{name}" if path else name, child)
        within = Counter(map(id, _every_parameter(module)))
        left = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        apart = all(within[key] == owned[key] for key in left)
        if path and path in called and apart and sum(left.values()) >= UNIT:
            taken.update(left)
            yield path

    return visit("", model)


def _every_parameter(model: nn.Module) -> Iterator[Tensor]:
    """Yield each parameter as often as a module has it."""
    for _, module in model.named_modules(remove_duplicate=False):
        yield from (parameter for parameter in module._parameters.values() if parameter is not None)
