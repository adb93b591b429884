"""From measured networks to a latency table: coefficients by least squares, none of them negative.

Where kernels change: a fit is cut in two at a width where each side by itself predicts clearly better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product as combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunekit.channels.channel_map import ChannelMap, Keep
from prunekit.channels.labels import Labels
from prunekit.measure.latency_profile.layer_times import LayerTimes
from prunekit.measure.latency_profile.width_features import ModuleFeatures, Product, features_of
from prunekit.planning.costs import Numbers
from prunekit.planning.latency_table import LatencyTable, LatencyTerm, LayerLatency, Span, round_up

DEPTH = 2
"""Of cuts, one within the other."""
FOLDS = 5
"""That networks are dealt into, to test a cut on those that it was not fitted to."""
CLEARLY = 0.15
"""By how much of the mean error, without signs, a cut must predict them better."""
LEAST = 2
"""Points for each coefficient on either side of a cut."""
CUTS = 64
"""That are tried of each width, spread over those that there are."""
EPSILON_leaves = 1e-9
"""Of all that is fitted to: a smaller error is rounding."""

Points = NDArray[np.bool_]
Cut = tuple[int, float, Points]
"""Number of a width, from where on it is above, and which points are: bool (points,)."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """A fit that holds within bounds.

    Attributes:
        coefficients: (columns,), none of them negative.
        bounds: by the number of the width: from the first to below the second; of widths that are not bounded none.
    """

    coefficients: Numbers
    bounds: dict[int, tuple[float, float]] = field(default_factory=dict)


def grown(
    design: Numbers, wanted: Numbers, widths: Sequence[Labels], networks: Labels, depth: int = DEPTH
) -> list[Leaf]:
    """Fit by least squares without negative coefficients, one for each range of widths that needs its own.

    Libraries choose kernels by shape: a convolution may take 28 % less time with 448 input channels than with 416.
    No sum of products follows that. So this is a model tree (Quinlan 1992): of all cuts that which leaves the least
    squared error is kept if it also predicts networks that it was not fitted to, by cross-validation (Stone 1974);
    what a single disturbed network would gain by a cut is lost there.

    Args:
        design: (points, columns), weighted.
        wanted: (points,), weighted.
        widths: that may be cut at, (points,) each.
        networks: (points,) of which network each is.
    """
    whole = Leaf(non_negative(design, wanted))
    cut = _best_cut(design, wanted, widths) if depth else None
    if cut is None or not _predicts(design, wanted, widths, networks, cut):
        return [whole]
    index, low, above = cut
    found = []
    for side, inside in enumerate((~above, above)):
        for leaf in grown(design[inside], wanted[inside], [one[inside] for one in widths], networks[inside], depth - 1):
            least, most = leaf.bounds.get(index, (0.0, np.inf))
            bound = (max(least, low), most) if side else (least, min(most, low))
            found.append(Leaf(leaf.coefficients, leaf.bounds | {index: bound}))
    return found


def _best_cut(design: Numbers, wanted: Numbers, widths: Sequence[Labels]) -> Cut | None:
    """Return the cut that leaves the least squared error."""
    least, best = LEAST * design.shape[1], None
    for index, values in enumerate(widths):
        for low in _spread(np.unique(values)[1:]):
            above = values >= low
            if least <= np.count_nonzero(above) <= above.size - least:
                error = sum(_squared(design[side], wanted[side]) for side in (above, ~above))
                if best is None or error < best[0]:
                    best = error, (index, float(low), above)
    return None if best is None else best[1]


def _spread(values: Labels) -> Labels:
    """At most `CUTS` of them."""
    chosen: Labels = values[:: -(-values.size // CUTS)] if values.size else values
    return chosen


def _squared(design: Numbers, wanted: Numbers) -> float:
    return float(((design @ non_negative(design, wanted) - wanted) ** 2).sum())


def _predicts(design: Numbers, wanted: Numbers, widths: Sequence[Labels], networks: Labels, cut: Cut) -> bool:
    """Return whether a cut predicts networks that it was not fitted to clearly better than no cut does.

    And whether cutting does, each time where the others say: what is the best of many cuts by chance is not again.
    """
    folds = [networks % FOLDS == fold for fold in range(FOLDS)]
    most = (1 - CLEARLY) * sum(_off(design, wanted, held_out, None) for held_out in folds)
    if most <= EPSILON_leaves * np.abs(wanted).sum() or sum(_off(design, wanted, out, cut[2]) for out in folds) >= most:
        return False
    error = 0.0
    for held_out in folds:
        rest = ~held_out
        found = _best_cut(design[rest], wanted[rest], [one[rest] for one in widths])
        error += _off(design, wanted, held_out, None if found is None else widths[found[0]] >= found[1])
    return error < most


def _off(design: Numbers, wanted: Numbers, held_out: Points, above: Points | None) -> float:
    """Return the error, without signs, at the points that are held out: of a fit to the others, or of one on either
    side.
    """
    error = 0.0
    for side in (np.ones_like(held_out),) if above is None else (above, ~above):
        tested, fitted = side & held_out, side & ~held_out
        error += float(np.abs(design[tested] @ non_negative(design[fitted], wanted[fitted]) - wanted[tested]).sum())
    return error


def non_negative(design: Numbers, wanted: Numbers) -> Numbers:
    """Least squares with no negative coefficient: columns leave one at a time, the most negative one first."""
    size = np.linalg.norm(design, axis=0)
    used = np.flatnonzero(size > 0)
    result = np.zeros(design.shape[1])
    while used.size:
        found = np.linalg.lstsq(design[:, used] / size[used], wanted, rcond=None)[0]
        if found.min() >= 0:
            result[used] = found / size[used]
            break
        used = np.delete(used, int(np.argmin(found)))
    return result


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
        """Return milliseconds at the speed that the machine has when the dense network takes `dense_ms`."""
        return self.times.whole_ms * dense_ms / self.times.dense_ms


def fit(channel_map: ChannelMap, samples: Sequence[Sample], setting: Mapping[str, Any]) -> LatencyTable:
    """Return a table of what every module takes by its widths.

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
    """Return every module, in order."""
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
                    value = value * round_up(self.width(factor), step)
                column += value
            self.columns[product, own] = column
        return self.columns[product, own]


def steps_of(factors: Sequence[Any], steps: _Steps) -> tuple[int, ...]:
    """Return the steps of a product's widths."""
    first, others, alone = steps
    return (alone,) if len(factors) == 1 else (first, *[others] * (len(factors) - 1))


def _best_steps(
    groups: list[list[ModuleFeatures]], counts: _Counts, took: Mapping[str, Numbers], weights: Numbers
) -> _Steps:
    """Return the steps with which all modules of a kind fit best; none where they do not fit clearly better."""

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
    """Return coefficients that modules which do the same share, and the squared error."""
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
    """Yield what a fit that holds within spans comes to beside a constant."""
    if coefficients[0] > constant:
        yield LatencyTerm(float(coefficients[0]) - constant, (), (), spans)
    for ms, product in zip(coefficients[1:], one.products, strict=True):
        if ms > 0:
            for weight, factors in zip(product.weights, product.factors, strict=True):
                yield LatencyTerm(float(ms) * weight, factors, steps_of(factors, steps), spans)


def _widths(group: Sequence[ModuleFeatures]) -> list[list[Labels]]:
    """Return the widths that a fit may be cut at, each once: its labels in every module of those that do the same."""
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
