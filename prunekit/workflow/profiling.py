"""Latency profiles: what each layer of a dense model takes at which widths on a target, and how well that predicts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from prunekit.channels import ChannelMap
from prunekit.compaction import compact
from prunekit.errors import PlanError, UsageError
from prunekit.measure.choosing import choose
from prunekit.measure.profile import Sample, cache_folder, fit, has_layer_clock, sampled, time_networks
from prunekit.measure.runtimes import Setting
from prunekit.measure.settings import LatencySettings
from prunekit.planning import Plan, PruneSettings
from prunekit.planning.latency import LatencyTable
from prunekit.planning.select import free_parts
from prunekit.planning.settings import TargetSettings
from prunekit.planning.solve import NOTHING_FREE
from prunekit.workflow.bench import devices
from prunekit.workflow.runs import Log

NETWORKS = 40
"""That are measured for a table, the dense one among them."""
HELD_OUT = 5
"""One in so many is not fitted to at first: on those the prediction is tested."""
REPEATS = 9
"""Of each network."""


@dataclass(frozen=True)
class Check:
    """A network that a table was not fitted to.

    Attributes:
        predicted_ms: by a table from the others.
        measured_ms: scaled, as the table is, by what the dense model took beside it.
        macs_left: share of the dense model's.
    """

    predicted_ms: float
    measured_ms: float
    macs_left: float

    @property
    def error(self) -> float:
        """Relative: above 0 where the prediction is too slow."""
        return self.predicted_ms / self.measured_ms - 1


@dataclass(frozen=True, eq=False)
class Profile:
    """A latency table and what it was made from.

    Attributes:
        table: fitted to all networks.
        checks: predictions of those that were held out, by a table that was fitted to the rest.
        samples: the networks, the dense one first.
        notes: what to know about the figures.
        seconds: that it took.
    """

    table: LatencyTable
    checks: tuple[Check, ...]
    samples: tuple[Sample, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def error(self) -> float:
        """Median of the relative errors, without their signs, on networks that were held out."""
        return float(np.median([abs(check.error) for check in self.checks]))

    def summary(self) -> dict[str, Any]:
        """As plain data: how well the table predicts, and what every layer takes in the dense model."""
        return {
            "setting": dict(self.table.setting),
            "networks": len(self.samples),
            "seconds": self.seconds,
            "dense_ms": self.table.dense_ms,
            "error": self.error,
            "layers": self.rows(),
            "checks": [asdict(check) | {"error": check.error} for check in self.checks],
            "notes": list(self.notes),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Every module that takes time, the slowest first: in the dense model, and in what steps its widths count."""
        total = sum(self.samples[0].times.modules_ms.values())
        found = []
        for layer in self.table.layers:
            ms = self.samples[0].times.modules_ms.get(layer.module, 0.0)
            steps = sorted({step for term in layer.terms for step in term.steps})
            found.append(
                {
                    "module": layer.module,
                    "dense_ms": ms,
                    "share": ms / total if total else 0.0,
                    "constant_ms": layer.constant,
                    "steps": " ".join(map(str, steps)),
                    "error": layer.error,
                }
            )
        return sorted((row for row in found if row["dense_ms"]), key=lambda row: -row["dense_ms"])

    def __str__(self) -> str:
        worst = max(abs(check.error) for check in self.checks)
        notes = "".join(f"; {note}" for note in self.notes)
        return (
            f"{len(self.samples)} networks in {self.seconds:.0f} s; the sum of the layers predicts those held out with "
            f"a median error of {self.error:.1%}, at most {worst:.1%}{notes}"
        )


def profile(
    model: nn.Module,
    channel_map: ChannelMap,
    sample_shape: Sequence[int],
    target: TargetSettings,
    prune: PruneSettings,
    *,
    networks: int | None = None,
    cache: Path | None = None,
    log: Log,
) -> Profile:
    """Measures networks of widths all over the range, and fits what each layer takes by its widths.

    Latency does not depend on weights: a model need not be trained. What was measured before on the same machine, with
    the same versions and shapes, is taken from the cache.

    Args:
        model: dense; on the CPU.
        channel_map: of it, traced.
        sample_shape: of one input without the batch, such as (3, 224, 224).
        target: runtime, device, batch, threads, dtype and memory format. A runtime that cannot tell layers apart is
            profiled in eager, which a note says: what a plan takes on it is measured all the same.
        prune: what may go: exclusions, roundings, least widths.
        networks: to measure, at least 10; 40 where it is not given.
        cache: a folder; None: the user's own.
        log: gets a line for each network.

    Raises:
        UsageError: the runtime is not installed, or does not take the setting.
        PlanError: nothing is free.
        RunError: a network fails in the runtime.
    """
    start = time.perf_counter()
    setting, notes = layer_setting(target)
    wanted = in_blocks(replace(prune, target=target, ratios={}))
    parts = free_parts(channel_map, np.zeros(channel_map.n_labels), wanted)
    if not parts:
        raise PlanError(NOTHING_FREE)
    keeps = list(sampled(channel_map, parts, networks or NETWORKS))
    made = _networks(model, channel_map, keeps)
    times = time_networks(model, made, sample_shape, setting, repeats=REPEATS, cache=cache or cache_folder(), log=log)
    samples = tuple(Sample(keep, found) for keep, found in zip(keeps, times, strict=True))
    table = fit(channel_map, samples, asdict(setting))
    doubtful = sum(bool(sample.times.doubts) for sample in samples)
    if doubtful:
        notes.append(f"{doubtful} of {len(samples)} networks were timed on a machine too noisy to trust each of them")
    return Profile(table, _checked(channel_map, samples, table), samples, tuple(notes), time.perf_counter() - start)


def profile_for(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    channel_map: ChannelMap,
    settings: PruneSettings,
    *,
    log: Log,
) -> Profile | None:
    """A profile on the target of the settings; None where no budget is one of time.

    Raises:
        UsageError: the model takes something else than one tensor, or as for `profile`.
    """
    if not settings.budget.measured:
        return None
    if len(example_inputs) != 1 or not isinstance(example_inputs[0], Tensor):
        raise UsageError(
            "budget latency_ms or speedup: expected a model that takes one tensor, which is what is timed; give macs, "
            "params, channels or size_mb instead"
        )
    shape = tuple(example_inputs[0].shape[1:])
    found = profile(model, channel_map, shape, settings.target, settings, log=log)
    log(f"profile: {found}")
    return found


def in_blocks(settings: PruneSettings) -> PruneSettings:
    """Settings whose channel counts are multiples of the target's block too."""
    return replace(settings, round_to=lcm(settings.round_to, settings.target.block))


def layer_setting(target: TargetSettings) -> tuple[Setting, list[str]]:
    """The setting that a target's layers are timed in, and what to say of it.

    Raises:
        UsageError: the runtime is not installed, or does not take the setting.
    """
    wanted = setting_of(target)
    if has_layer_clock(target.runtime):
        return wanted, []
    note = f"{target.runtime} cannot tell how long each layer takes: the table is of eager, and plans are measured"
    return replace(wanted, runtime="eager"), [note]


def setting_of(target: TargetSettings) -> Setting:
    """A target as the measuring core has it.

    Raises:
        UsageError: the runtime is not installed, the device is not there, or they do not go together.
    """
    settings = as_latency(target)
    found, _ = choose(settings, devices(target.device, settings))
    return found[0]


def as_latency(target: TargetSettings, repeats: int = LatencySettings.repeats) -> LatencySettings:
    """A target as settings of a measurement."""
    return LatencySettings(
        (target.batch,), (target.threads,), repeats, (target.runtime,), (target.dtype,), (target.memory_format,)
    )


def _networks(model: nn.Module, channel_map: ChannelMap, keeps: Sequence[Any]) -> Iterator[tuple[str, nn.Module]]:
    for index, keep in enumerate(keeps):
        plan = Plan(channel_map, keep, {})
        share = channel_map.macs(keep) / channel_map.macs()
        yield f"profile: network {index + 1} of {len(keeps)}, {share:.0%} of the MACs", compact(model, plan)


def _checked(channel_map: ChannelMap, samples: Sequence[Sample], table: LatencyTable) -> tuple[Check, ...]:
    held_out = set(range(HELD_OUT - 1, len(samples), HELD_OUT))
    rest = fit(channel_map, [one for index, one in enumerate(samples) if index not in held_out], table.setting)
    return tuple(
        Check(
            rest.at(channel_map, samples[index].keep),
            samples[index].whole_ms(rest.dense_ms),
            channel_map.macs(samples[index].keep) / channel_map.macs(),
        )
        for index in sorted(held_out)
    )
