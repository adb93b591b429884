"""From measured networks to a latency table: coefficients by least squares, none of them negative."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product as combinations
from typing import Any

import numpy as np

from prunekit.channels import ChannelMap
from prunekit.channels.labels import Labels
from prunekit.channels.map import Keep
from prunekit.measure.profile.features import ModuleFeatures, Product, features_of
from prunekit.measure.profile.layer_times import LayerTimes
from prunekit.measure.profile.leaves import grown, non_negative
from prunekit.planning.latency import LatencyTable, LatencyTerm, LayerLatency, Span, up
from prunekit.planning.terms import Numbers

STEPS = (1, 4, 8, 16, 32)
"""Blocks that kernels may work in: CPU vectors, tiles of tensor cores."""
ROUNDS = 2
"""Of fitting: after the first, networks that are far off count less."""
FAR = 2.0
"""Times the median error: where that begins (Huber 1964)."""
EPSILON = 1e-12
GAIN = 0.02
"""By how much of the residual blocks of several channels must fit better than single channels."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A network that was timed layer by layer, beside the dense one: what it keeps, (n_labels,), and its times."""

    keep: Keep
    times: LayerTimes

    def whole_ms(self, dense_ms: float) -> float:
        """Milliseconds at the speed that the machine has when the dense network takes `dense_ms`."""
        return self.times.whole_ms * dense_ms / self.times.dense_ms


def fit(channel_map: ChannelMap, samples: Sequence[Sample], setting: Mapping[str, Any]) -> LatencyTable:
    """A table of what every module takes by its widths.

    A module's time is a constant and a sum of products of widths, as operators multiply and write them, each width
    rounded up to a step that is found for each kind of operator; where kernels change at a width, each side has
    coefficients of its own. Modules that do the same at different widths share
    their coefficients. Every network's times are scaled by what the dense one took beside it: so it does not matter
    that clocks change. Errors are weighted as shares of each network's whole time; networks that something disturbed,
    and so are far off, count less.

    Args:
        channel_map: of the dense model, traced.
        samples: networks, at least as many as a module has products of widths; the more, the better.
        setting: noted in the table.
    """
    dense_ms = float(np.median([sample.times.dense_ms for sample in samples]))
    scale = np.array([dense_ms / sample.times.dense_ms for sample in samples])
    whole = np.array([sample.whole_ms(dense_ms) for sample in samples])
    kept = [sample.keep[channel_map.traced.final] for sample in samples]
    features = features_of(channel_map)
    counts = _Counts(kept)
    took = {
        one.module: scale * np.array([sample.times.modules_ms.get(one.module, 0.0) for sample in samples])
        for one in features
    }
    weights = 1 / whole
    for _ in range(ROUNDS):
        layers = _fitted(features, counts, took, weights)
        sums = np.array([sum(layer.at(one) for layer in layers) for one in kept])
        outside, factor = non_negative(np.stack([np.ones_like(sums), sums], axis=1) * weights[:, None], whole * weights)
        off = np.abs((outside + factor * sums) / whole - 1)
        weights = np.minimum(1, FAR * np.median(off) / np.maximum(off, 1e-12)) / whole
    return LatencyTable(dict(setting), layers, float(outside), float(factor), dense_ms)


def _fitted(
    features: Sequence[ModuleFeatures], counts: _Counts, took: Mapping[str, Numbers], weights: Numbers
) -> tuple[LayerLatency, ...]:
    """Every module, in order."""
    alike = _by(features, lambda one: one.signature)
    layers: dict[str, LayerLatency] = {}
    for kind in _by(features, lambda one: one.kind).values():
        signatures = list(_by(kind, lambda one: one.signature))
        best = _best_steps([alike[signature] for signature in signatures], counts, took, weights)
        for signature in signatures:
            layers |= _layers(alike[signature], best, counts, took, weights)
    return tuple(layers[one.module] for one in features)


_Steps = tuple[int, int, int]
"""Of the first width of a product, of its others, and of a width alone."""


class _Counts:
    """Products of widths on all networks; each is computed once for each of its steps.

    Args:
        kept: for each network which labels, in the numbering of the trace.
    """

    def __init__(self, kept: Sequence[Keep]) -> None:
        self.kept = kept
        self.widths: dict[bytes, Numbers] = {}
        self.columns: dict[tuple[Product, tuple[int, ...]], Numbers] = {}

    def width(self, factor: Any) -> Numbers:
        key = factor.tobytes()
        if key not in self.widths:
            self.widths[key] = np.array([np.count_nonzero(kept[factor]) for kept in self.kept])
        return self.widths[key]

    def design(self, one: ModuleFeatures, steps: _Steps) -> Numbers:
        """(networks, 1 + products): ones, and every product."""
        return np.stack([np.ones(len(self.kept)), *(self.column(product, steps) for product in one.products)], axis=1)

    def column(self, product: Product, steps: _Steps) -> Numbers:
        """(networks,) of a product, whose factors are as many in each that it adds up."""
        own = steps_of(product.factors[0], steps)
        if (product, own) not in self.columns:
            column = np.zeros(len(self.kept))
            for weight, factors in zip(product.weights, product.factors, strict=True):
                value = np.full(len(self.kept), weight)
                for factor, step in zip(factors, own, strict=True):
                    value = value * up(self.width(factor), step)
                column += value
            self.columns[product, own] = column
        return self.columns[product, own]


def steps_of(factors: Sequence[Any], steps: _Steps) -> tuple[int, ...]:
    """The steps of a product's widths."""
    first, others, alone = steps
    return (alone,) if len(factors) == 1 else (first, *[others] * (len(factors) - 1))


def _best_steps(
    groups: list[list[ModuleFeatures]], counts: _Counts, took: Mapping[str, Numbers], weights: Numbers
) -> _Steps:
    """The steps with which all modules of a kind fit best; none where they do not fit clearly better."""

    def residual(steps: _Steps) -> float:
        return sum(_solved(group, steps, counts, took, weights)[1] for group in groups)

    plain: _Steps = (1, 1, 1)
    several = any(len(product.factors[0]) > 1 for group in groups for product in group[0].products)
    multiplied = STEPS if several else (1,)
    found = {steps: residual(steps) for steps in combinations(multiplied, multiplied, STEPS)}
    best = min(found, key=lambda steps: found[steps])
    rounding = EPSILON * sum(float(((took[one.module] * weights) ** 2).sum()) for group in groups for one in group)
    return best if found[best] < (1 - GAIN) * found[plain] - rounding else plain


def _solved(
    group: list[ModuleFeatures], steps: _Steps, counts: _Counts, took: Mapping[str, Numbers], weights: Numbers
) -> tuple[Numbers, float]:
    """Coefficients that modules which do the same share, and the squared error."""
    design, wanted = _stacked(group, steps, counts, took, weights)
    found = non_negative(design, wanted)
    return found, float(((design @ found - wanted) ** 2).sum())


def _stacked(
    group: list[ModuleFeatures], steps: _Steps, counts: _Counts, took: Mapping[str, Numbers], weights: Numbers
) -> tuple[Numbers, Numbers]:
    """Of all modules, one after the other, and their networks: what times are fitted to, and the times."""
    design = np.concatenate([counts.design(one, steps) * weights[:, None] for one in group])
    return design, np.concatenate([took[one.module] * weights for one in group])


def _layers(
    group: list[ModuleFeatures], steps: _Steps, counts: _Counts, took: Mapping[str, Numbers], weights: Numbers
) -> dict[str, LayerLatency]:
    cut_at = _widths(group)
    design, wanted = _stacked(group, steps, counts, took, weights)
    widths = [np.concatenate([counts.width(factor) for factor in alike]) for alike in cut_at]
    leaves = grown(design, wanted, widths, np.tile(np.arange(len(counts.kept)), len(group)))
    constant = min(float(leaf.coefficients[0]) for leaf in leaves)
    result = {}
    for number, one in enumerate(group):
        terms: list[LatencyTerm] = []
        for leaf in leaves:
            spans = [Span(cut_at[index][number], *bounds) for index, bounds in leaf.bounds.items()]
            if all(span.low <= span.factor.size for span in spans):
                within = tuple(span for span in spans if span.low > 0 or span.high <= span.factor.size)
                terms += _terms(one, leaf.coefficients, constant, steps, within)
        layer, measured = LayerLatency(one.module, constant, tuple(terms)), took[one.module]
        found = np.array([layer.at(kept) for kept in counts.kept])
        error = float(np.median(np.abs(found / measured - 1))) if (measured > 0).all() else None
        result[one.module] = replace(layer, error=error)
    return result


def _terms(
    one: ModuleFeatures, coefficients: Numbers, constant: float, steps: _Steps, spans: tuple[Span, ...]
) -> Iterator[LatencyTerm]:
    """What a fit that holds within spans comes to beside a constant."""
    if coefficients[0] > constant:
        yield LatencyTerm(float(coefficients[0]) - constant, (), (), spans)
    for ms, product in zip(coefficients[1:], one.products, strict=True):
        if ms > 0:
            for weight, factors in zip(product.weights, product.factors, strict=True):
                yield LatencyTerm(float(ms) * weight, factors, steps_of(factors, steps), spans)


def _widths(group: Sequence[ModuleFeatures]) -> list[list[Labels]]:
    """The widths that a fit may be cut at, each once: its labels in every module of those that do the same."""
    found: dict[tuple[bytes, ...], list[Labels]] = {}
    for products in zip(*(one.products for one in group), strict=True):
        if all(len(product.factors) == 1 for product in products):
            for alike in zip(*(product.factors[0] for product in products), strict=True):
                found.setdefault(tuple(factor.tobytes() for factor in alike), list(alike))
    return list(found.values())


def _by(features: Sequence[ModuleFeatures], key: Any) -> dict[str, list[ModuleFeatures]]:
    groups: dict[str, list[ModuleFeatures]] = {}
    for one in features:
        groups.setdefault(key(one), []).append(one)
    return groups
