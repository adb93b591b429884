"""The main memory that pruning a large model from samples takes, said before it begins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import psutil
from torch import nn

from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.channels.tracing.traced_run import TracedOperator
from prunekit.criteria.elimination import most_state_bytes
from prunekit.errors import UsageError
from prunekit.hooks.model_copy import named_tensors
from prunekit.settings.calibration import RepairSettings
from prunekit.statistics.patch_moments import IN_MEMORY
from prunekit.utils.context import device_of, is_large
from prunekit.utils.display import size

SAMPLES = 2
"""Samples that are traced, and compared."""
ROOM = 1.3
"""Memory that a process has, by what its tensors take: allocators keep freed pieces."""
DOUBT = 0.6
"""Share of the need that is counted: a little less than that may be enough, and is only said."""
_VIEWS = frozenset(
    f"aten.{name}" for name in ("view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "detach")
)  # fmt: skip


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that the stages of `prune` take at most beside the model.

    Attributes:
        gains: of gradients of one sample, and what the changes of layers take: a prediction of half of what a linear
            one reads, and a change of the weight of another.
        order: of elimination, for the group that the most layers read.
        trial: of two compact models, the largest module in float64, and the largest results of a pass.
        repair: of a masked copy, and the limit of `RepairSettings`; 0 without a repair.
    """

    gains: int
    order: int
    trial: int
    repair: int

    @classmethod
    def of(cls, model: nn.Module, channel_map: ChannelMap, repair: RepairSettings | None) -> MemoryNeed:
        """Return the need of a model whose weights are ranked by `elimination`."""
        tensors = {id(tensor): tensor for _, tensor in named_tensors(model)}.values()
        copy, largest = sum(tensor.nbytes for tensor in tensors), max((tensor.nbytes for tensor in tensors), default=0)
        changes = sum(tensor.nbytes if tensor.dim() > 2 else tensor.numel() for tensor in tensors)
        run = channel_map.traced.trace.runs[0]
        made = [_made(operator) for operator in run.operators]
        activations, results = sum(made) * _item(model) // SAMPLES, 8 * max(made, default=0)
        return cls(
            int(ROOM * (IN_MEMORY + changes + 2 * largest + activations)),
            int(ROOM * (IN_MEMORY + most_state_bytes(channel_map))),
            int(ROOM * (IN_MEMORY + 2 * copy + 24 * largest // _item(model) + 2 * results)),
            0 if repair is None else int(ROOM * copy) + repair.memory_bytes,
        )

    @property
    def most(self) -> int:
        """The need of the stage that takes the most."""
        return max(self.gains, self.order, self.trial, self.repair)

    def __str__(self) -> str:
        parts = {
            "the gradients of one sample": self.gains,
            "the order of elimination": self.order,
            "the trial of the plan in float64": self.trial,
            "a masked copy, and what the repair may use": self.repair,
        }
        said = ", ".join(f"{size(taken)} for {what}" for what, taken in parts.items() if taken)
        return f"about {size(self.most)} beside the model: {said}"


def require_memory(model: nn.Module, channel_map: ChannelMap, repair: RepairSettings | None) -> str | None:
    """Return a sentence on the memory that pruning a large model on the CPU takes; None for other models."""
    if not is_large(model) or device_of(model).type != "cpu":
        return None
    need, free = MemoryNeed.of(model, channel_map, repair), int(psutil.virtual_memory().available)
    short = "" if need.most <= free else ", which may be too little"
    if DOUBT * need.most <= free:
        return f"memory: {need}; {size(free)} are free{short}"
    advice = "shorter samples take less for the gradients and the trial; criterion='l2' needs no gradients and no order"
    if repair is not None and need.repair == need.most:
        least = max(need.gains, need.order, need.trial, need.repair - repair.memory_bytes)
        left = max(0, int(free / DOUBT) - need.repair + repair.memory_bytes) // 2**20 * 2**20
        advice = (
            f"repair=prunekit.RepairSettings(memory_bytes={left}), repair.memory_bytes in a recipe, fits"
            if left >= 2**28
            else f"the least is {size(least)}, with a small memory_bytes in prunekit.RepairSettings; " + advice
        )
    raise UsageError(f"memory: {need}; but only {size(free)} are free: {advice}")


def _made(operator: TracedOperator) -> int:
    """Return how many numbers an operator makes."""
    if operator.name in _VIEWS:
        return 0
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in operator.call[2] if isinstance(shape, tuple))


def _item(model: nn.Module) -> int:
    return max((tensor.element_size() for tensor in model.parameters()), default=4)
