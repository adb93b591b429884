"""Latency profiling: networks of many widths are timed, and each layer's time is fitted to its widths."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from prunekit.channels.channel_map import ChannelMap, Keep
from prunekit.channels.cut.model_copy import named_tensors, with_tensors
from prunekit.channels.trace import trace
from prunekit.channels.trial.trial import run_trial
from prunekit.compaction.compact_model import compact
from prunekit.deploy.transform import AS_IT_IS, Transform, transform_of
from prunekit.errors import NotMeasuredError
from prunekit.hooks.wrappers import unwrapped
from prunekit.jobs.bench import devices
from prunekit.jobs.prune.profile_result import NetworkPrediction, Profile
from prunekit.jobs.run.dense_model import prepare
from prunekit.jobs.run.job_inputs import RECIPE_ONLY, Own
from prunekit.jobs.run.resume import run_recipe
from prunekit.jobs.run.run_folder import Finish, Log, environment, run_folder, write_report
from prunekit.measure.effort import Effort, current_effort
from prunekit.measure.latency.comparison import choose_settings
from prunekit.measure.latency.machine import clock_mhz, describe_machine
from prunekit.measure.latency_profile.layer_times import LayerTimes, cache_folder
from prunekit.measure.latency_profile.network_timing import (
    Network,
    cached_times,
    has_layer_clock,
    sample_widths,
    time_networks,
)
from prunekit.measure.latency_profile.staircase_fit import TimedNetwork, fit_latency_table
from prunekit.measure.runtimes.session import Setting, inputs_like
from prunekit.modes.public_call import public_call
from prunekit.planning.candidates import GroupPart
from prunekit.planning.depth_search import all_that_may_go, blocks_of
from prunekit.planning.feasibility import require_free_parts
from prunekit.planning.plan import Plan
from prunekit.report.requirements import require_report
from prunekit.settings.deployment import LatencySettings
from prunekit.settings.job import JobSettings
from prunekit.settings.prune import PruneSettings, Target
from prunekit.utils.context import paused_garbage_collection
from prunekit.utils.files import StrPath, write_csv, write_json
from prunekit.utils.inputs import as_examples
from prunekit.utils.progress import reporting, stage, tracked

HELD_OUT = 5
"""One network in so many is held out of a first fit, to test its predictions."""
FEWEST = 10
"""Networks, at least, that a table is fitted to."""


@public_call
def profile(
    model: nn.Module,
    example: Any,
    *,
    target: Target | None = None,
    settings: PruneSettings | None = None,
    channel_map: ChannelMap | None = None,
    more_examples: Sequence[Any] = (),
    networks: int | None = None,
    cache: StrPath | None = None,
    again: bool = False,
    measure: bool = True,
    limit_s: float | None = None,
    transform: Transform = AS_IT_IS,
    log: Log = stage,
    progress: bool | None = None,
) -> Profile:
    """Time networks of many widths, and fit the time of each layer to its widths.

    Latency does not depend on weights: a model need not be trained. Earlier measurements on the same machine, with the
    same versions and shapes, are taken from the cache.

    Args:
        model: dense; on the CPU.
        example: what it is called with: a tensor, a tuple of positional arguments or a mapping of arguments by name;
            samples on the first axis of every tensor. Networks are timed on inputs like it.
        target: runtime, device, batch, threads, dtype and memory format; None: that of `settings`. A runtime that
            cannot tell layers apart is profiled in eager, which a note says: what a plan takes on it is measured all
            the same.
        settings: which channels a plan may remove: `ignore`, `round_to`, `min_channels`; None: defaults.
        channel_map: of the model, if it was traced already.
        more_examples: further ones, for branches of the model that the first does not take.
        networks: how many to measure, at least 10; None: 40.
        cache: a folder; None: the user's own.
        again: whether networks are measured again whose cached times are from a machine that was too noisy.
        measure: whether networks that are not in the cache are measured; if not, the others are used alone.
        limit_s: seconds after which no more networks are measured, once there are ten; None: no limit.
        transform: applied to every network, the dense one too, before it is timed.
        log: gets a line for each network.
        progress: whether to show bars on stderr; None: on a terminal and in a notebook.

    Raises:
        UsageError: the runtime is not installed, or does not take the setting; or batches cannot be made of the input.
        NotMeasuredError: `measure` is False, and the cache has fewer than ten of the networks.
        PlanError: no channel is free, or no plan passes its trial.
        RunError: a network fails in the runtime.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
        >>> target = pk.Target("eager", batch=4)
        >>> found = pk.profile(model, torch.randn(1, 64), target=target, networks=10, cache="profiles")
        >>> print(found)
        Profile: dense ... ms (eager, cpu, batch 4, threads 1, float32, contiguous);
          10 networks in ...
        ...
          module ...ms   share  widths in steps of  changes at widths  fit error
        ...
        >>> again = pk.profile(model, torch.randn(1, 64), target=target, networks=10, cache="profiles", measure=False)
        >>> len(again.samples)  # all of them from the cache
        10
    """
    model = unwrapped(model)
    start, effort = time.perf_counter(), current_effort()
    settings = settings or PruneSettings()
    target = target or settings.target
    setting, notes = layer_setting(target)
    notes += [f"every network, the dense one too, is timed as it is deployed: {transform}"] if str(transform) else []
    wanted = in_blocks(replace(settings, target=target, ratios={}))
    given = list(as_examples(model, [example, *more_examples]))
    inputs = inputs_like(given[0])
    channel_map = _tried(model, channel_map or trace(model, *given), wanted, given)
    parts = _parts(channel_map, wanted)
    blocks = blocks_of(channel_map, parts, np.zeros(channel_map.n_labels), wanted)
    keeps = list(sample_widths(channel_map, parts, networks or effort.networks, blocks=blocks))
    made = _networks(model, channel_map, keeps, transform)
    kept_in = cache_folder() if cache is None else Path(cache)
    dense, rounds = transform(model), effort.network_rounds
    if measure:
        log(f"profile: {len(keeps)} networks of all widths, timed in {setting.runtime} with the dense one beside each")
        limit = math.inf if limit_s is None else limit_s
        times = time_networks(
            dense, made, inputs, setting, repeats=rounds, cache=kept_in, again=again, limit_s=limit / FEWEST, log=log
        )
        with reporting(progress, "profile"):
            timed = _within(limit, tracked(times, "profile", total=len(keeps), unit="network"))
            samples = tuple(TimedNetwork(keep, found) for keep, found in zip(keeps, timed, strict=False))
        if len(samples) < len(keeps):
            notes.append(
                f"{len(samples)} of {len(keeps)} networks were measured in the {limit:.0f} s that they may take; a "
                "larger target.limit_s, or an idle machine, makes predictions better"
            )
    else:
        known = cached_times(dense, made, inputs, setting, repeats=rounds, cache=kept_in)
        samples = tuple(
            TimedNetwork(keep, found) for keep, found in zip(keeps, known, strict=True) if found is not None
        )
        there = f"{len(samples)} of {len(keeps)} networks of the profile are in {kept_in}"
        if len(samples) < FEWEST:
            raise NotMeasuredError(f"{there}, at least {FEWEST} are needed: `prunekit profile RECIPE` measures them")
        notes += [f"{there}, measured before"]
    table = fit_latency_table(channel_map, samples, asdict(setting))
    doubtful = sum(bool(sample.times.doubts) for sample in samples)
    if doubtful:
        were = "was" if doubtful == 1 else "were"
        cure = "when it is quiet, `prunekit profile RECIPE --again` measures such networks again"
        notes.append(
            f"of {len(samples)} networks {doubtful} {were} timed on a machine too noisy to trust that figure; {cure}"
        )
    predictions = _predicted(channel_map, samples, table.setting)
    return Profile(channel_map, table, predictions, samples, tuple(notes), time.perf_counter() - start)


def in_blocks(settings: PruneSettings) -> PruneSettings:
    """Return settings that also round channel counts to the target's block."""
    return replace(settings, round_to=lcm(settings.round_to, settings.target.block))


def layer_setting(target: Target) -> tuple[Setting, list[str]]:
    """Return the setting in which a target's layers are timed, and notes on it.

    Raises:
        UsageError: the runtime is not installed, or does not take the setting.
    """
    settings = as_latency(target)
    (wanted,), _ = choose_settings(settings, devices(target.device, settings))
    if has_layer_clock(target.runtime):
        return wanted, []
    note = f"{target.runtime} cannot tell how long each layer takes: the table is of eager, and plans are measured"
    return replace(wanted, runtime="eager"), [note]


def as_latency(target: Target) -> LatencySettings:
    """Return the settings of a measurement on a target."""
    return LatencySettings(
        (target.batch,),
        (target.threads,),
        runtimes=(target.runtime,),
        dtypes=(target.dtype,),
        memory_formats=(target.memory_format,),
    )


def _within(limit_s: float, times: Iterable[LayerTimes]) -> Iterator[LayerTimes]:
    """Yield the times of networks until the limit, and of `FEWEST` in any case."""
    over = time.perf_counter() + limit_s
    for number, found in enumerate(times, 1):
        yield found
        if number >= FEWEST and time.perf_counter() >= over:
            return


def _parts(channel_map: ChannelMap, wanted: PruneSettings) -> list[GroupPart]:
    return require_free_parts(channel_map, np.zeros(channel_map.n_labels), wanted)


def _tried(
    model: nn.Module, channel_map: ChannelMap, wanted: PruneSettings, examples: Sequence[tuple[Any, ...]]
) -> ChannelMap:
    """Return the channel map with what only a trial finds: locks, and sizes in the model's Python attributes."""

    def choose(chart: ChannelMap) -> Keep:
        parts = _parts(chart, wanted)
        _, narrow = sample_widths(chart, parts, 2)
        blocks = blocks_of(chart, parts, np.zeros(chart.n_labels), wanted)
        for block in all_that_may_go(parts, blocks, wanted) if shallow else []:
            for index in block.parts:
                narrow[parts[index].labels] = False
        return chart.completed(narrow)

    shallow = False
    with paused_garbage_collection():
        channel_map = run_trial(model, channel_map, choose, list(examples), plain=wanted.plain_classes).channel_map
        if not wanted.blocks_may_go or not channel_map.branches.found:
            return channel_map
        shallow = True  # with all blocks gone that may go

    with paused_garbage_collection():
        return run_trial(model, channel_map, choose, list(examples), plain=wanted.plain_classes).channel_map


def _networks(
    model: nn.Module, channel_map: ChannelMap, keeps: Sequence[Keep], transform: Transform
) -> Iterator[Network]:
    """Yield networks that are cut out of the model on demand; their outlines on the meta device copy no weights."""
    outline = with_tensors(model, {name: tensor.detach().to("meta") for name, tensor in named_tensors(model)})

    def cut(whole: nn.Module, keep: Keep) -> nn.Module:
        return transform(compact(whole, Plan(channel_map, keep, {})))

    for index, keep in enumerate(keeps):
        share = channel_map.macs_left(keep)
        name = f"profile: network {index + 1} of {len(keeps)}, {share:.0%} of the MACs"
        yield Network(name, cut(outline, keep), partial(cut, model, keep))


def _predicted(
    channel_map: ChannelMap, samples: Sequence[TimedNetwork], setting: Mapping[str, Any]
) -> tuple[NetworkPrediction, ...]:
    """Return the times of all networks, predicted by a table that was fitted without those held out."""
    held_out = set(range(HELD_OUT - 1, len(samples), HELD_OUT))
    rest = fit_latency_table(channel_map, [one for index, one in enumerate(samples) if index not in held_out], setting)
    return tuple(
        NetworkPrediction(
            rest.at(channel_map, sample.keep),
            sample.whole_ms(rest.dense_ms),
            channel_map.macs_left(sample.keep),
            index in held_out,
        )
        for index, sample in enumerate(samples)
    )


LAYER_COLUMNS = ("module", "dense_ms", "share", "constant_ms", "steps", "changes_at", "error")
NETWORK_COLUMNS = ("predicted_ms", "measured_ms", "macs_left", "held_out", "error")


@dataclass(frozen=True)
class ProfileRun:
    """A finished profile.

    Attributes:
        folder: with `profile.json`, `profile.csv` (layers), `networks.csv` (predictions), `fits.json` (times of layers
            with their fits), and the result of `finish`.
        result: the profile.
        metrics: what `profile.json` holds.
    """

    folder: Path
    result: Profile
    metrics: dict[str, Any]


def profile_job(
    job: JobSettings,
    *,
    networks: int = Effort.networks,
    again: bool = False,
    log: Log = stage,
    finish: Finish | None = write_report,
    own: Own = RECIPE_ONLY,
) -> ProfileRun:
    """Profile a job's dense model, which need not be trained, on the job's `prune.target`."""
    require_report()
    layer_setting(job.prune.target)  # raises if the runtime is missing
    text = run_recipe(job, own)
    prepared = prepare(job, own)
    example = prepared.example_inputs
    chart = trace(prepared.model, example)
    inputs_like(example)  # raises if the model cannot be timed
    transform = transform_of(prepared.model, example, job.deploy)
    with run_folder(job.output / job.name, "profile", log, text, finish) as run:
        machine = describe_machine()
        result = profile(
            prepared.model,
            example,
            settings=job.prune,
            channel_map=chart,
            networks=networks,
            again=again,
            transform=transform,
            log=run.log,
            progress=False,
        )
        run.log("; ".join((f"profile: {result.accuracy}", *result.notes)))
        machine |= {"clock_mhz_after": clock_mhz()}
        metrics = {"name": job.name, **result.summary(), "machine": machine, "environment": environment()}
        write_csv(run.path / "profile.csv", metrics["layers"], LAYER_COLUMNS)
        write_csv(run.path / "networks.csv", [found.row() for found in result.predictions], NETWORK_COLUMNS)
        write_json(run.path / "fits.json", {"layers": result.fits(prepared.model)})
        write_json(run.path / "profile.json", metrics)
    return ProfileRun(run.path, result, metrics)
