"""The whole fit: from the times of whole networks to a latency table, where a runtime cannot time single layers.

Idea. A module's time is a sum of five costs: that it runs at all, what it multiplies, the weights it reads, and the
elements it writes and reads. A handful of networks cannot tell the coefficients of all modules apart; so they are drawn
towards each other, those of one kind and shape the most, by a Gaussian process with a linear kernel (Rasmussen and
Williams 2006, chapter 2): the coefficient of a cost is that of all modules, changed by a deviation of the kind, one of
the kind at the number of positions, and one of the module. Widths count in the steps that make the times likeliest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.channels.tracing.traced_run import TracedOperator
from prunekit.measure.latency_profile.staircase_fit import (
    TimedNetwork,
    WidthColumns,
    WidthProduct,
    non_negative_fit,
    written_elements,
)
from prunekit.planning.budgets.cost_model import Numbers
from prunekit.planning.budgets.latency_table import LatencyTable, LatencyTerm, LayerLatency
from prunekit.utils.display import share

RUNS, MULTIPLIES, WEIGHTS, WRITES, READS, REST = "runs", "multiplies", "weights", "writes", "reads", "rest"
"""Costs of a module: the last is of what operators write that do not multiply, which runtimes often fuse."""
STEPS = (1, 4, 8, 12, 16, 24, 32)
"""Sizes of blocks that devices may compute in."""
DEVIATIONS = (8.0, 4.0, 1.0, 0.5)
"""Usual deviations of a coefficient from its first guess: of all modules, a kind, a kind at a size, and a module."""
NOISE = (0.001, 0.01, 0.02, 0.04, 0.08)
"""Shares of a network's time that its measurement, and what the costs leave out, may be off by."""
FLOOR, PULL, OUTSIDE = 0.3, 0.1, 0.05
"""Least part of an equal share that a cost has in the first guess, the pull towards equal shares, and the usual
deviation of the time that belongs to no module, as a share of the dense network's."""
Rows = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class _Cost:
    """One cost of a module, and what else shares its coefficient, from all modules down to this one."""

    module: str
    groups: tuple[Any, ...]  # a key for each of `DEVIATIONS`; the first is the cost's name
    product: WidthProduct | None  # None: 1 where the module is there


def _costs(channel_map: ChannelMap) -> Iterator[_Cost]:
    """Yield the costs of all modules, in the order in which they run."""
    trace = channel_map.traced.trace
    run = next(run for run in trace.runs if run.example == 0 and not run.training)
    together: dict[tuple[str, str], list[TracedOperator]] = {}
    for operator in run.operators:
        if operator.counted:
            together.setdefault((operator.module, operator.name), []).append(operator)
    for (module, name), operators in together.items():
        written = [each for operator in operators for each in written_elements(operator)]
        written = [(elements / trace.flow.batch, factors) for elements, factors in written if factors]
        terms = [term for term in trace.flow.macs if (term.module, term.operator) == (module, name) and term.factors]
        kind, size = "", 0.0
        found: dict[tuple[str, int], list[tuple[float, tuple[Labels, ...]]]] = {}
        for elements, factors in written:
            found.setdefault((WRITES if terms else REST, len(factors)), []).append((elements, factors))
        if terms:
            shapes = [shape for shape in operators[0].call[0] if isinstance(shape, torch.Size)]
            kind = repr((name, *(tuple(shape[2:]) for shape in shapes[1:2]), len(terms[0].factors)))
            size = sum(elements for elements, _ in written) or 1.0
            yield _Cost(module, (RUNS, (RUNS, kind), (RUNS, kind, size), (RUNS, module, name)), None)
        for term in terms:
            found.setdefault((MULTIPLIES, len(term.factors)), []).append((term.constant, term.factors))
            found.setdefault((WEIGHTS, len(term.factors)), []).append((term.constant / size, term.factors))
            if len(term.factors) > 1:
                found.setdefault((READS, 1), []).append((term.constant, term.factors[-1:]))
        for (cost, _), products in found.items():
            groups = (cost, (cost, kind), (cost, kind, size), (cost, module, name))
            yield _Cost(module, groups, WidthProduct(*zip(*products, strict=True)))


class _Design:
    """The costs of all modules in some networks, by the step of widths; the dense network is the last row."""

    def __init__(self, channel_map: ChannelMap, keeps: Sequence[Keep]) -> None:
        kept = [keep[channel_map.traced.final] for keep in (*keeps, np.ones(channel_map.n_labels, dtype=bool))]
        self.costs = list(_costs(channel_map))
        self._columns, self._by_step = WidthColumns(kept, channel_map), dict[int, Numbers]()
        self._there = {module: self._columns.present(module) for module in {cost.module for cost in self.costs}}
        levels = zip(*(cost.groups for cost in self.costs), strict=True)
        self.levels = [np.unique([str(key) for key in level], return_inverse=True)[1] for level in levels]

    def at(self, step: int) -> Numbers:
        """Return (networks + 1, costs)."""
        if step not in self._by_step:
            columns = self._columns
            values = [
                self._there[cost.module]
                * (1.0 if cost.product is None else columns.column(cost.product, (step, step, step)))
                for cost in self.costs
            ]
            self._by_step[step] = np.stack(values, axis=1)
        return self._by_step[step]

    def summed(self, values: Numbers, level: int) -> Numbers:
        """Return (rows, groups) sums of (rows, costs) by their groups on a level."""
        found = np.zeros((int(self.levels[level].max()) + 1, len(values)))
        np.add.at(found, self.levels[level], values.T)
        return found.T

    def guess(self, step: int, rows: Rows, took: Numbers) -> tuple[Numbers, float]:
        """Return first coefficients, (costs,), and the time outside: those that all modules share fit best so."""
        sums = self.summed(self.at(step), 0)
        shares = np.c_[sums / sums[-1], np.ones(len(sums))]  # of each cost, 1 for the dense network
        number = shares.shape[1]
        drawn = np.r_[shares[rows] / took[:, None], PULL * np.eye(number)]
        found = non_negative_fit(drawn, np.r_[np.ones(len(rows)), np.full(number, PULL / number)])
        found = np.maximum(found, FLOOR / number)
        return (found[:-1] / sums[-1])[self.levels[0]], float(found[-1])

    def expected(
        self, step: int, rows: Rows, took: Numbers, first: Numbers, outside: float
    ) -> tuple[Numbers, list[Numbers], Numbers]:
        """Return what first coefficients leave of times, the sums of costs by group on every level, and a covariance.

        All are as shares of the times: (rows,), (rows, groups) for every level, (rows, rows).
        """
        values = self.at(step)[rows] * first / took[:, None]
        sums = [usual * self.summed(values, level) for level, usual in enumerate(DEVIATIONS)]
        covariance = np.outer(OUTSIDE / took, OUTSIDE / took) + np.asarray(sum(one @ one.T for one in sums))
        return 1 - values.sum(1) - outside / took, sums, covariance


@dataclass(frozen=True, eq=False)
class _Fit:
    """Coefficients of all costs, as shares of the dense network's time."""

    step: int
    coefficients: Numbers
    outside: float

    def at(self, design: _Design) -> Numbers:
        """Return (networks + 1,) times."""
        return self.outside + design.at(self.step) @ self.coefficients


def _fit(design: _Design, rows: Rows, took: Numbers) -> _Fit:
    """Return the fit to the times of some networks, as shares of the dense one's, with the likeliest step and noise."""
    best = (-np.inf, 1, NOISE[0])
    for step in STEPS:
        off, _, covariance = design.expected(step, rows, took, *design.guess(step, rows, took))
        for noise in NOISE:
            whole = covariance + noise**2 * np.eye(len(rows))
            likelihood = -off @ np.linalg.solve(whole, off) - np.linalg.slogdet(whole)[1]
            best = max(best, (float(likelihood), step, noise))
    _, step, noise = best
    first, outside = design.guess(step, rows, took)
    while True:  # costs that would be negative are taken out
        off, sums, covariance = design.expected(step, rows, took, first, outside)
        pulls = np.linalg.solve(covariance + noise**2 * np.eye(len(rows)), off)
        changes = sum(
            (usual * one.T @ pulls)[level] for usual, one, level in zip(DEVIATIONS, sums, design.levels, strict=True)
        )
        found = first * (1 + changes)
        if (found >= 0).all():
            return _Fit(step, found, max(outside + OUTSIDE**2 * float(pulls @ (1 / took)), 0.0))
        first = np.where(found < 0, 0.0, first)


def fit_whole_table(
    channel_map: ChannelMap, samples: Sequence[TimedNetwork], setting: Mapping[str, Any]
) -> LatencyTable:
    """Return a table of the time of every module by its widths, from the times of whole networks alone.

    It is a table as `fit_latency_table` makes it, for runtimes that cannot tell how long each layer takes. Every
    network's time is scaled by that of the dense one beside it; errors count as shares of each network's time.
    """
    design, took, dense_ms = _timed(channel_map, samples)
    found = _fit(design, np.arange(len(samples)), took)
    constants, terms = dict[str, float](), dict[str, list[LatencyTerm]]()
    run = next(run for run in channel_map.traced.trace.runs if run.example == 0 and not run.training)
    for operator in run.operators:
        if operator.counted:
            constants[operator.module], terms[operator.module] = 0.0, []
    for cost, coefficient in zip(design.costs, dense_ms * found.coefficients, strict=True):
        if cost.product is None:
            constants[cost.module] += float(coefficient)
        elif coefficient > 0:
            for weight, factors in zip(cost.product.weights, cost.product.factors, strict=True):
                steps = (found.step,) * len(factors)
                terms[cost.module].append(LatencyTerm(float(coefficient) * weight, factors, steps))
    layers = tuple(LayerLatency(module, constants[module], tuple(terms[module])) for module in constants)
    return LatencyTable(dict(setting), layers, dense_ms * found.outside, 1.0, dense_ms)


def _timed(channel_map: ChannelMap, samples: Sequence[TimedNetwork]) -> tuple[_Design, Numbers, float]:
    """Return the design of networks, their times as shares of the dense one's, and its milliseconds."""
    dense_ms = float(np.median([sample.times.dense_ms for sample in samples]))
    return (
        _Design(channel_map, [one.keep for one in samples]),
        np.array([one.whole_ms(1.0) for one in samples]),
        dense_ms,
    )


def informative(channel_map: ChannelMap, keeps: Sequence[Keep], number: int) -> list[int]:
    """Return which networks to measure, the first one always: those that together say the most about the table.

    Each is the one whose time is the least certain after those before it, which makes the determinant of their
    covariance large (D-optimal design; Rasmussen and Williams 2006, section 8.3).

    Args:
        channel_map: of the dense model.
        keeps: labels that networks keep, each bool (n_labels,); many more than are wanted.
        number: of networks; all if there are not so many.
    """
    left = uncertainty(channel_map, keeps)
    chosen = [0]
    while len(chosen) < min(number, len(keeps)):
        last = left[:, chosen[-1]] / np.sqrt(left[chosen[-1], chosen[-1]] + NOISE[2] ** 2)
        left = left - np.outer(last, last)
        rest = np.diag(left).copy()
        rest[chosen] = -np.inf
        chosen.append(int(np.argmax(rest)))
    return chosen


def uncertainty(channel_map: ChannelMap, keeps: Sequence[Keep]) -> Numbers:
    """Return (networks, networks) the covariance of the networks' times before any is measured, as shares of them."""
    design = _Design(channel_map, keeps)
    first, outside = design.guess(STEPS[2], np.zeros(0, dtype=np.intp), np.zeros(0))
    took = outside + design.at(STEPS[2])[:-1] @ first
    return design.expected(STEPS[2], np.arange(len(keeps)), took, first, outside)[2]


MORE = 8
"""Networks more, of which is said how much better they would make a table."""
GAIN, GOOD = 0.1, 0.015
"""Share of the error that more networks must save to be worth it, and an error as of measured times themselves."""


@dataclass(frozen=True)
class WholeCheck:
    """The errors of a whole fit on networks that it was not fitted to."""

    predicted_ms: tuple[float, ...]  # of each network, by a fit to all others
    error: float  # median of the absolute relative errors of these
    error_of_half: float  # the same by fits to half of the networks

    @property
    def more_would_help(self) -> str:
        """A sentence on how much more networks would help: errors fall by a power of the number (Cortes 1994)."""
        number = len(self.predicted_ms)
        if self.error <= GOOD:
            return f"more networks are not needed: the median error is {share(self.error)}"
        power = np.clip(np.log2(self.error_of_half / max(self.error, 1e-12)), 0.0, 1.0)
        expected = self.error * (number / (number + MORE)) ** power
        if expected < (1 - GAIN) * self.error:
            to = f"from {share(self.error)} to some {share(expected, 0 if expected >= 0.02 else 1)}"
            return f"about {MORE} more networks would bring the median error {to}"
        half = f"half as many predict with a median error of {share(self.error_of_half)}"
        return f"more networks would hardly help: {half}, all with {share(self.error)}"


def check_whole_fit(channel_map: ChannelMap, samples: Sequence[TimedNetwork]) -> WholeCheck:
    """Return how well fits predict the networks that they leave out: each of them, and halves (Stone 1974)."""
    design, took, dense_ms = _timed(channel_map, samples)
    every = np.arange(len(samples))
    predicted = np.array([_fit(design, every[every != one], took[every != one]).at(design)[one] for one in every])
    off = list[Numbers]()
    for seed in range(2):
        shuffled = np.random.default_rng(seed).permutation(every)
        for half in (shuffled[::2], shuffled[1::2]):
            rest = np.setdiff1d(every, half)
            off.append(np.abs(_fit(design, half, took[half]).at(design)[rest] / took[rest] - 1))
    error = float(np.median(np.abs(predicted / took - 1)))
    return WholeCheck(tuple(dense_ms * predicted), error, float(np.median(np.concatenate(off))))
