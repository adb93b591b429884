"""Latency profiles: what each layer of a dense model takes at which widths on a target, and how well that predicts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
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
from prunekit.planning.select import free_parts
from prunekit.planning.settings import TargetSettings
from prunekit.planning.solve import NOTHING_FREE
from prunekit.workflow.bench import devices
from prunekit.workflow.profiled import Check, Profile
from prunekit.workflow.runs import Log

NETWORKS = 40
"""That are measured for a table, the dense one among them."""
HELD_OUT = 5
"""One in so many is not fitted to at first: on those the prediction is tested."""
REPEATS = 9
"""Of each network."""


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
    predictions = _predicted(channel_map, samples, table.setting)
    return Profile(table, predictions, samples, tuple(notes), time.perf_counter() - start)


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


def _predicted(channel_map: ChannelMap, samples: Sequence[Sample], setting: Mapping[str, Any]) -> tuple[Check, ...]:
    """Every network by a table that was fitted to those that are not held out."""
    held_out = set(range(HELD_OUT - 1, len(samples), HELD_OUT))
    rest = fit(channel_map, [one for index, one in enumerate(samples) if index not in held_out], setting)
    return tuple(
        Check(
            rest.at(channel_map, sample.keep),
            sample.whole_ms(rest.dense_ms),
            channel_map.macs(sample.keep) / channel_map.macs(),
            index in held_out,
        )
        for index, sample in enumerate(samples)
    )
