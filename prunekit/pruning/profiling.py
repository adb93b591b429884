"""Latency profiles: networks of many widths are timed, and each layer's time is fitted to its widths."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from prunekit.backends.session import Setting, inputs_like
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.channels.trial.trial import run_trial
from prunekit.compaction.compact_model import compact
from prunekit.deploy.deployment_transform import AS_IT_IS, Transform
from prunekit.errors import NotMeasuredError
from prunekit.hooks.model_copy import named_tensors, with_tensors
from prunekit.hooks.wrappers import unwrapped
from prunekit.measure.latency.comparison import choose_settings, devices
from prunekit.measure.latency_profile.network_timing import (
    LayerTimes,
    Network,
    has_layer_clock,
    read_times,
    sample_widths,
    time_networks,
    with_keys,
)
from prunekit.measure.latency_profile.staircase_fit import TimedNetwork, fit_latency_table
from prunekit.measure.measurement_effort import current_effort
from prunekit.modes.public_call import public_call
from prunekit.planning.budgets.cost_model import GroupPart, round_up
from prunekit.planning.budgets.latency_table import LatencyTable, LayerLatency
from prunekit.planning.candidates import free_parts
from prunekit.planning.depth_search import all_that_may_go, blocks_of
from prunekit.planning.plan import Plan
from prunekit.settings.pruning import PruneSettings, Target
from prunekit.utils.context import paused_garbage_collection
from prunekit.utils.display import NOTHING, Displayed, Table, share, shares_left
from prunekit.utils.files import StrPath, user_cache
from prunekit.utils.inputs import as_examples
from prunekit.utils.progress import Log, reporting, stage, tracked

HELD_OUT = 5
"""One network in so many is held out of a first fit, to test its predictions."""
FEWEST = 10
"""Networks, at least, that a table is fitted to."""
REMEDY = "prunekit.prune(..., remeasure=True) or `prunekit profile RECIPE --again`"


OUTPUTS, INPUTS, OTHERS = "output channels", "input channels", "channels"


@dataclass(frozen=True)
class NetworkPrediction:
    """The predicted and the measured time of a network, by a table that was fitted without those held out."""

    predicted_ms: float  # by the table
    measured_ms: float  # scaled, as the table is, by the time of the dense model beside it
    macs_left: float  # share of the dense model's; 1 for the dense model itself
    held_out: bool  # whether the table was not fitted to it

    @property
    def error(self) -> float:
        """The relative error; above 0 if the prediction is too slow."""
        return self.predicted_ms / self.measured_ms - 1

    def row(self) -> dict[str, Any]:
        """Return the prediction as plain data."""
        return asdict(self) | {"error": self.error}


@dataclass(frozen=True, eq=False, repr=False)
class Profile(Displayed):
    """A latency table with the networks that it was fitted to.

    Attributes:
        channel_map: of the model, after a trial; the samples are in its numbering.
        table: fitted to all networks.
        predictions: of every network, the dense one first, by a table that was fitted without those held out.
        samples: the networks, in the same order.
        notes: what to know about the figures.
        seconds: that the profiling took.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> found = pk.profile(model, torch.randn(4, 8), networks=10)
        >>> found
        <Profile: dense ... ms (eager, cpu, batch 1, threads 1, float32, contiguous); ... networks in ...>
        >>> sorted(row["module"] for row in found.rows())
        ['0', '1', '2']
    """

    channel_map: ChannelMap
    table: LatencyTable
    predictions: tuple[NetworkPrediction, ...]
    samples: tuple[TimedNetwork, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def checks(self) -> tuple[NetworkPrediction, ...]:
        """The networks that were held out."""
        return tuple(check for check in self.predictions if check.held_out)

    @property
    def error(self) -> float:
        """Median of the absolute relative errors on networks that were held out."""
        return float(np.median([abs(check.error) for check in self.checks]))

    @property
    def doubts(self) -> list[str]:
        """The first doubt about each network whose times support no claim."""
        return [sample.times.doubts[0] for sample in self.samples if sample.times.doubts]

    @property
    def noise(self) -> str:
        """The number of networks with doubtful times, in words."""
        were = "was" if len(self.doubts) == 1 else "were"
        of = f"of {len(self.samples)} networks {len(self.doubts)} {were}"
        return f"{of} timed on a machine too noisy to trust that figure"

    def summary(self) -> dict[str, Any]:
        """Return the errors of the table and the times of the dense model's layers as plain data."""
        return {
            "setting": dict(self.table.setting),
            "networks": len(self.samples),
            "seconds": self.seconds,
            "dense_ms": self.table.dense_ms,
            "error": self.error,
            "layers": self.rows(),
            "checks": [check.row() for check in self.checks],
            "notes": list(self.notes),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each module that takes time, the slowest first."""
        times = self.samples[0].times.modules_ms
        total = sum(times.values())
        return [
            {
                "module": layer.module,
                "dense_ms": times[layer.module],
                "share": times[layer.module] / total,
                "constant_ms": layer.constant,
                "steps": " ".join(map(str, sorted({step for term in layer.terms for step in term.steps}))),
                "changes_at": " ".join(map(str, sorted(_turns(layer)))),
                "error": layer.error,
            }
            for layer in self._slowest()
        ]

    def fits(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the times of every module in all networks, with the fit, by its widths; the slowest first.

        Args:
            model: that was profiled; its layers tell which width is of outputs and which of inputs.
        """
        final = self.channel_map.traced.final
        kept = [sample.keep[final] for sample in self.samples]
        scales = [self.table.dense_ms / sample.times.dense_ms for sample in self.samples]
        found = []
        for layer in self._slowest():
            free, terms = _in_free_widths(layer, final)
            times = [sample.times.modules_ms.get(layer.module, 0.0) for sample in self.samples]
            measured = [
                {"kept": [int(np.count_nonzero(one[width])) for width in free], "ms": scale * ms}
                for one, scale, ms in zip(kept, scales, times, strict=True)
            ]
            found.append(
                {
                    "module": layer.module,
                    "constant_ms": layer.constant,
                    "widths": [
                        {"name": _name(layer.module, final[width], model, self.channel_map), "channels": width.size}
                        for width in free
                    ],
                    "terms": terms,
                    "measured": measured,
                }
            )
        return found

    def _slowest(self) -> list[LayerLatency]:
        """Return the layers that take time, the slowest first."""
        times = self.samples[0].times.modules_ms
        taking = (layer for layer in self.table.layers if times.get(layer.module, 0.0) > 0)
        return sorted(taking, key=lambda layer: -times[layer.module])

    @property
    def accuracy(self) -> str:
        """The errors of the table in a sentence."""
        worst = max(abs(check.error) for check in self.checks)
        return (
            f"{len(self.samples)} networks in {self.seconds:.0f} s; the sum of the layers predicts those held out with "
            f"a median error of {share(self.error)}, at most {share(worst)}"
        )

    def _headline(self) -> str:
        named = {"batch", "threads"}
        where = [f"{key} {value}" if key in named else f"{value}" for key, value in self.table.setting.items()]
        return f"dense {self.table.dense_ms:.3f} ms ({', '.join(where)}); {self.accuracy}"

    def _parts(self) -> Iterator[str | Table]:
        yield "\n".join([f"Profile: {self._headline()}", *(f"Note: {note}" for note in self.notes)])
        cells = [
            (
                row["module"] or "(the model's own code)",
                f"{row['dense_ms']:.3f}",
                share(row["share"], 1),
                row["steps"] or NOTHING,
                row["changes_at"] or NOTHING,
                share(row["error"], 1),
            )
            for row in self.rows()
        ]
        how = ("widths in steps of", "changes at widths")
        yield Table(("module", "ms", "share", *how, "fit error"), cells, text=how)


def _in_free_widths(layer: LayerLatency, final: Labels) -> tuple[list[Labels], list[dict[str, Any]]]:
    """Return the widths of a layer that plans can change, each once, and the terms of its fit in them.

    A width is its labels in the numbering of the trace. A term is milliseconds for a product of 1 (with the widths that
    no plan changes), the numbers of the widths that are multiplied, the step of each, and the spans in which the term
    holds: number of a width, lower end, and upper end, None without one.
    """
    free: dict[bytes, Labels] = {}
    terms = []

    def number(factor: Labels) -> int:
        key = np.sort(final[factor]).tobytes()
        free.setdefault(key, factor)
        return list(free).index(key)

    for term in layer.terms:
        ms, widths, steps, spans = term.ms, [], [], []
        for factor, step in zip(term.factors, term.steps, strict=True):
            if final[factor].any():
                widths.append(number(factor))
                steps.append(step)
            else:
                ms *= round_up(factor.size, step)
        for span in term.spans:
            assert final[span.factor].any()  # spans end at widths that plans change
            spans.append([number(span.factor), span.low, span.high if span.high < np.inf else None])
        terms.append({"ms": ms, "widths": widths, "steps": steps, "spans": spans})
    return list(free.values()), terms


def _turns(layer: LayerLatency) -> set[int]:
    """Return the widths at which the fit changes."""
    ends = {end for term in layer.terms for span in term.spans for end in (span.low, span.high)}
    return {int(end) for end in ends if 0 < end < np.inf}


def _name(module: str, width: Labels, model: nn.Module, channel_map: ChannelMap) -> str:
    """Return whether a width is a module's outputs or inputs, by the axes of its weight."""
    axes = channel_map.labels.get(f"{module}.weight".lstrip("."), ())
    names = (INPUTS, OUTPUTS) if isinstance(model.get_submodule(module), _ConvTransposeNd) else (OUTPUTS, INPUTS)
    whole = np.sort(width)
    same = [
        name
        for name, axis in zip(names, axes, strict=False)
        if axis is not None and np.array_equal(np.sort(axis, None), whole)
    ]
    return same[0] if len(same) == 1 and len(axes) > 1 else OTHERS


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
        again: whether networks are measured anew whose cached times are from a machine that was too noisy. What is
            doubtful is measured a second time within `limit_s`, once all networks were.
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
    wanted = replace(settings, target=target, ratios={}).in_blocks
    given = list(as_examples(model, [example, *more_examples]))
    inputs = inputs_like(given[0])
    channel_map = _tried(model, channel_map or trace(model, *given), wanted, given)
    parts = _parts(channel_map, wanted)
    blocks = blocks_of(channel_map, parts, np.zeros(channel_map.n_labels), wanted)
    keeps = list(sample_widths(channel_map, parts, networks or effort.networks, blocks=blocks))
    made = _networks(model, channel_map, keeps, transform)
    kept_in = user_cache("latency") if cache is None else Path(cache)
    dense, rounds = transform(model), effort.network_rounds
    if measure:
        log(f"profile: {len(keeps)} networks of all widths, timed in {setting.runtime} with the dense one beside each")
        limit = math.inf if limit_s is None else limit_s

        def timing(asked: Iterable[Network]) -> Iterator[LayerTimes]:
            rest: dict[str, Any] = {"repeats": rounds, "cache": kept_in, "again": again, "log": log}
            return time_networks(dense, asked, inputs, setting, limit_s=limit / FEWEST, **rest)

        with reporting(progress, "profile"):
            timed = _settled_within(limit, tracked(made, "profile", total=len(keeps), unit="network"), timing, log)
            samples = tuple(TimedNetwork(keep, found) for keep, found in zip(keeps, timed, strict=False))
        if len(samples) < len(keeps):
            notes.append(
                f"{len(samples)} of {len(keeps)} networks were measured in the {limit:.0f} s that they may take; a "
                "larger target.limit_s, or an idle machine, makes predictions better"
            )
    else:
        keys = (key for _, key in with_keys(dense, made, inputs, setting, rounds))
        known = (read_times(kept_in / f"{key}.json") for key in keys)
        samples = tuple(
            TimedNetwork(keep, found) for keep, found in zip(keeps, known, strict=True) if found is not None
        )
        there = f"{len(samples)} of {len(keeps)} networks of the profile are in {kept_in}"
        if len(samples) < FEWEST:
            raise NotMeasuredError(f"{there}, at least {FEWEST} are needed: `prunekit profile RECIPE` measures them")
        notes += [f"{there}, measured before"]
    table = fit_latency_table(channel_map, samples, asdict(setting))
    predictions = _predicted(channel_map, samples, table.setting)
    found = Profile(channel_map, table, predictions, samples, tuple(notes), 0.0)
    if found.doubts:
        notes.append(f"{found.noise}; when it is quiet, {REMEDY} measures such networks again")
    return replace(found, notes=tuple(notes), seconds=time.perf_counter() - start)


def layer_setting(target: Target) -> tuple[Setting, list[str]]:
    """Return the setting in which a target's layers are timed, and notes on it; raise if the runtime lacks it."""
    settings = target.as_latency
    (wanted,), _ = choose_settings(settings, devices(target.device, settings))
    if has_layer_clock(target.runtime):
        return wanted, []
    note = f"{target.runtime} cannot tell how long each layer takes: the table is of eager, and plans are measured"
    return replace(wanted, runtime="eager"), [note]


def _settled_within(
    limit_s: float, networks: Iterable[Network], timing: Callable[[Iterable[Network]], Iterable[LayerTimes]], log: Log
) -> list[LayerTimes]:
    """Return the times of networks, until the limit and of `FEWEST` in any case, with doubtful ones timed twice."""
    over, found, number = time.perf_counter() + limit_s, dict[int, LayerTimes](), 0

    def asked() -> Iterator[Network]:
        nonlocal number
        given = list[Network]()
        for network in networks:
            number = len(given)
            given.append(network)
            yield network
        doubtful = [index for index, times in found.items() if times.doubts and not times.averaged]
        if doubtful and current_effort().heeds_doubts:
            left = "" if limit_s == math.inf else f", in at most {over - time.perf_counter():.0f} s"
            many, why = f"{len(doubtful)} of {len(found)} networks", found[doubtful[0]].doubts[0]
            log(f"profile: {many} are timed a second time{left}, as their times are doubtful: {why}")
            for number in tracked(doubtful, "profile, second pass", unit="network"):
                yield replace(given[number], before=found[number])

    for times in timing(asked()):
        found[number] = times
        if len(found) >= FEWEST and time.perf_counter() >= over:
            break
    return list(found.values())


def _parts(channel_map: ChannelMap, wanted: PruneSettings) -> list[GroupPart]:
    return free_parts(channel_map, np.zeros(channel_map.n_labels), wanted)


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

    for shallow in (False, True):  # at last with all blocks gone that may go
        if not shallow or (wanted.blocks_may_go and channel_map.branches.found):
            with paused_garbage_collection():
                tried = run_trial(model, channel_map, choose, list(examples), plain=wanted.plain_classes)
                channel_map = tried.channel_map
    return channel_map


def _networks(
    model: nn.Module, channel_map: ChannelMap, keeps: Sequence[Keep], transform: Transform
) -> Iterator[Network]:
    """Yield networks that are cut out of the model on demand; their outlines on the meta device copy no weights."""
    outline = with_tensors(model, {name: tensor.detach().to("meta") for name, tensor in named_tensors(model)})

    def cut(whole: nn.Module, keep: Keep) -> nn.Module:
        return transform(compact(whole, Plan(channel_map, keep, {})))

    for index, keep in enumerate(keeps):
        name = f"profile: network {index + 1} of {len(keeps)}, {shares_left({'macs': channel_map.macs_left(keep)})}"
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
