"""Latency profiles: networks of many widths are timed, and each layer's time is fitted to its widths."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.deploy.deployment_transform import AS_IT_IS, Transform
from prunekit.errors import NotMeasuredError
from prunekit.measure.latency_profile.network_timing import (
    LayerTimes,
    Network,
    read_times,
    time_networks,
    with_keys,
)
from prunekit.measure.latency_profile.staircase_fit import TimedNetwork, fit_latency_table
from prunekit.measure.latency_profile.whole_fit import check_whole_fit, fit_whole_table
from prunekit.measure.measurement_effort import current_effort
from prunekit.modes.public_call import public_call
from prunekit.planning.budgets.cost_model import round_up
from prunekit.planning.budgets.latency_table import LatencyTable, LayerLatency
from prunekit.pruning.latency.device_clock import FEWEST, DeviceClock
from prunekit.pruning.latency.profiled_networks import asked_networks
from prunekit.settings.deployment import Target
from prunekit.settings.pruning import PruneSettings
from prunekit.utils.display import NOTHING, Displayed, Table, share
from prunekit.utils.files import StrPath, user_cache
from prunekit.utils.progress import Log, reporting, stage, tracked

HELD_OUT = 5
"""One network in so many is held out of a first fit, to test its predictions."""
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
        times = self._dense_ms
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

        There are none where networks were timed as a whole.

        Args:
            model: that was profiled; its layers tell which width is of outputs and which of inputs.
        """
        final = self.channel_map.traced.final
        kept = [sample.keep[final] for sample in self.samples]
        scales = [self.table.dense_ms / sample.times.dense_ms for sample in self.samples]
        found = []
        for layer in self._slowest() if self.samples[0].times.modules_ms else ():
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
        times = self._dense_ms
        taking = (layer for layer in self.table.layers if times.get(layer.module, 0.0) > 0)
        return sorted(taking, key=lambda layer: -times[layer.module])

    @property
    def _dense_ms(self) -> Mapping[str, float]:
        """Milliseconds of the dense model's modules: measured, or by the table where networks were timed as a whole."""
        whole = np.ones(self.channel_map.traced.final.size, dtype=bool)
        return self.samples[0].times.modules_ms or {layer.module: layer.at(whole) for layer in self.table.layers}

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
                NOTHING if row["error"] is None else share(row["error"], 1),
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
    start, target = time.perf_counter(), target or (settings or PruneSettings()).target
    asked = asked_networks(model, example, target, settings, channel_map, more_examples, networks, transform)
    channel_map, keeps, notes = asked.channel_map, asked.keeps, list(asked.notes)
    kept_in = user_cache("latency") if cache is None else Path(cache)
    dense, rounds = transform(asked.model), current_effort().network_rounds
    if target.elsewhere:
        with reporting(progress, "profile"):
            clock = DeviceClock(target, log)
            times = clock.times(asked.kit, measure=measure, again=again)
        known = clock.layer_times(asked.kit, times)
        samples = tuple(TimedNetwork(keep, one) for keep, one in zip(keeps, known, strict=True) if one)
        notes += [f"measured on {target.device}: {times.described}", *times.doubts]
        if len(samples) < FEWEST:
            raise NotMeasuredError(f"{len(samples)} networks ran on {target.device}, at least {FEWEST} are needed")
    elif measure:
        where = asked.setting.runtime
        log(f"profile: {len(keeps)} networks of all widths, timed in {where} with the dense one beside each")
        limit = math.inf if limit_s is None else limit_s

        def timing(wanted: Iterable[Network]) -> Iterator[LayerTimes]:
            rest: dict[str, Any] = {"repeats": rounds, "cache": kept_in, "again": again, "log": log}
            return time_networks(dense, wanted, asked.inputs, asked.setting, limit_s=limit / FEWEST, **rest)

        with reporting(progress, "profile"):
            made = tracked(asked.networks, "profile", total=len(keeps), unit="network")
            timed = _settled_within(limit, made, timing, log)
            samples = tuple(TimedNetwork(keep, found) for keep, found in zip(keeps, timed, strict=False))
        if len(samples) < len(keeps):
            notes.append(
                f"{len(samples)} of {len(keeps)} networks were measured in the {limit:.0f} s that they may take; a "
                "larger target.limit_s, or an idle machine, makes predictions better"
            )
    else:
        keys = (key for _, key in with_keys(dense, asked.networks, asked.inputs, asked.setting, rounds))
        before = (read_times(kept_in / f"{key}.json") for key in keys)
        samples = tuple(
            TimedNetwork(keep, found) for keep, found in zip(keeps, before, strict=True) if found is not None
        )
        there = f"{len(samples)} of {len(keeps)} networks of the profile are in {kept_in}"
        if len(samples) < FEWEST:
            raise NotMeasuredError(f"{there}, at least {FEWEST} are needed: `prunekit profile RECIPE` measures them")
        notes += [f"{there}, measured before"]
    named = asdict(asked.setting)
    layered = not target.elsewhere or bool(samples[0].times.modules_ms)
    if layered:
        predictions = tuple(_predicted(channel_map, samples, named))
        found = Profile(channel_map, fit_latency_table(channel_map, samples, named), predictions, samples, (), 0.0)
    if target.elsewhere:  # whose layers are timed otherwise than its networks, if at all
        check, whole = check_whole_fit(channel_map, samples), fit_whole_table(channel_map, samples, named)
        if not layered or check.error < found.error:
            pairs = zip(samples, check.predicted_ms, strict=True)
            predictions = tuple(_prediction(channel_map, *pair, whole.dense_ms, held_out=True) for pair in pairs)
            samples = tuple(replace(one, times=replace(one.times, modules_ms={})) for one in samples)
            found = Profile(channel_map, whole, predictions, samples, (), 0.0)
            notes.append(check.more_would_help)
    if found.doubts:
        notes.append(f"{found.noise}; when it is quiet, {REMEDY} measures such networks again")
    return replace(found, notes=tuple(notes), seconds=time.perf_counter() - start)


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


def _predicted(
    channel_map: ChannelMap, samples: Sequence[TimedNetwork], setting: Mapping[str, Any]
) -> Iterator[NetworkPrediction]:
    """Yield the times of all networks, predicted by a table that was fitted without those held out."""
    held_out = set(range(HELD_OUT - 1, len(samples), HELD_OUT))
    rest = fit_latency_table(channel_map, [one for index, one in enumerate(samples) if index not in held_out], setting)
    for index, sample in enumerate(samples):
        predicted_ms = rest.at(channel_map, sample.keep)
        yield _prediction(channel_map, sample, predicted_ms, rest.dense_ms, held_out=index in held_out)


def _prediction(
    channel_map: ChannelMap, sample: TimedNetwork, predicted_ms: float, dense_ms: float, *, held_out: bool
) -> NetworkPrediction:
    left = channel_map.macs_left(sample.keep)
    return NetworkPrediction(predicted_ms, sample.whole_ms(dense_ms), left, held_out)
