"""Calibration in one call: everything that is wanted, in the same forward passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from prunekit.calibration.collector import StatsCollector
from prunekit.calibration.moments import MomentsCollector
from prunekit.calibration.passes import PassHooks, run_passes
from prunekit.calibration.ranks import RankCollector
from prunekit.calibration.stats import ChannelStats
from prunekit.context import device_of
from prunekit.errors import UsageError
from prunekit.inputs import inputs_in, moved, taken
from prunekit.progress import reporting
from prunekit.settings.calibration import MOMENTS_LIMIT_MIB, Moments
from prunekit.tasks import Pairs, Task
from prunekit.wrappers import unwrapped


@dataclass(frozen=True, eq=False)
class Collectors:
    """What looks on while a model runs; `moments` and `ranks` where they are wanted."""

    stats: StatsCollector
    moments: MomentsCollector | None = None
    ranks: RankCollector | None = None

    @property
    def _owners(self) -> list[PassHooks]:
        return [owner for owner in (self.stats, self.moments, self.ranks) if owner is not None]

    def dealt(self, rank: int, of: int) -> None:
        """Says that what `run` is given is every `of`-th batch of a data set, from number `rank`."""
        for owner in self._owners:
            owner.dealt(rank, of)

    def run(self, model: nn.Module, batches: Iterable[Any], device: torch.device) -> ChannelStats:
        """Runs the model as `collect` does, and returns all that was seen so far."""
        run_passes(model, batches, device, *self._owners)
        return replace(
            self.stats.stats(),
            moments={} if self.moments is None else self.moments.moments(),
            ranks={} if self.ranks is None else self.ranks.ranks(),
        )


def collect(
    model: nn.Module,
    batches: Any,
    *,
    device: torch.device | str | None = None,
    modules: Sequence[str] | None = None,
    inputs: bool = True,
    outputs: bool = True,
    fused: bool | None = None,
    moments: Moments = "none",
    moments_ignore: Sequence[str] = (),
    moments_limit_mib: int = MOMENTS_LIMIT_MIB,
    moments_positions: int | None = None,
    ranks: bool = False,
    task: Task | str | None = None,
    progress: bool | None = None,
) -> ChannelStats:
    """Runs a model over batches, in eval mode without gradients, and returns its channel statistics.

    Args:
        model: every module is afterwards in the mode it had.
        batches: as `prunekit.prune` takes them: tensors, or mappings of them by the names of the model's arguments; or
            tuples and lists whose first entry is that or a tuple of all arguments, such as (images, labels). Or all
            samples as one tensor or one mapping of tensors, or a data set of them.
        device: where the batches go; None: where the model's parameters are.
        modules, inputs, outputs, fused: as for `StatsCollector`.
        moments: "full": also the Gram matrix of every layer's input channels, as `MomentsCollector` collects them.
        moments_ignore, moments_limit_mib, moments_positions: its `ignore`, `limit_mib` and `positions`.
        ranks: whether to measure the ranks of feature maps too, as `RankCollector` does.
        task: takes batches apart that come in another form; itself or its name.
        progress: whether to show bars on stderr; None: on a terminal and in a notebook.

    Raises:
        UsageError: `batches` is empty, and as for the collectors.
        DataError: a batch comes in a form that is not known; a `UsageError`.
        NonFiniteError: as for `RankCollector`.

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
    stats = StatsCollector(model, modules=modules, inputs=inputs, outputs=outputs, fused=fused)
    second: MomentsCollector | None = None
    pairs: Iterable[Any] = Pairs(model, batches, task)
    if moments == "full":
        few, pairs = few_samples(pairs)
        second = MomentsCollector(
            model,
            moved(few, place),
            ignore=moments_ignore,
            limit_mib=moments_limit_mib,
            positions=moments_positions,
        )
    with reporting(progress, "calibrate"):
        return Collectors(stats, second, RankCollector(model) if ranks else None).run(model, pairs, place)


def few_samples(batches: Iterable[Any]) -> tuple[Any, Iterator[Any]]:
    """The inputs of the first two samples, and the same batches.

    Raises:
        UsageError: there are none.
    """
    rest = iter(batches)
    for first in rest:
        return taken(inputs_in(first), slice(2)), chain([first], rest)
    raise UsageError("calibration: expected at least one batch, got none")
