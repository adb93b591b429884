"""The staircase fit: from timed networks to a latency table, by least squares without negative coefficients.

Idea. A module's time is a sum of products of its widths, as its operators have them: t = sum of c_p * prod of s(w) over
the widths w of each product p, with c_p >= 0. Times by widths are stairs, as kernels compute in blocks: s(w) rounds w
up to a multiple of the block size that predicts best. Where kernels change at a width, a fit is cut in two there, if
each side by itself predicts clearly better. After the first round outliers among networks count less (Huber 1964).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product as combinations
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prunekit.channels.labels.label_flow import apart
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.channels.tracing.traced_run import TracedOperator
from prunekit.measure.latency_profile.network_timing import LayerTimes
from prunekit.planning.budgets.cost_model import Numbers, Span, round_up
from prunekit.planning.budgets.latency_table import LatencyTable, LatencyTerm, LayerLatency

MOST = 8
"""Largest number of products of a module; more are added up by their number of factors."""


@dataclass(frozen=True, eq=False)
class WidthProduct:
    """A weighted sum of products of widths; of a single product, unless a module has too many."""

    weights: tuple[float, ...]  # of the products
    factors: tuple[tuple[Labels, ...], ...]  # the labels of each width of the products, in the numbering of the trace


@dataclass(frozen=True, eq=False)
class ModuleFeatures:
    """The products of widths that a module's time may depend on."""

    module: str
    kind: str  # name of the operator that multiplies the most, or of the first if none multiplies
    signature: str  # equal for modules that do the same at different widths
    products: tuple[WidthProduct, ...]


@dataclass
class _ModuleProducts:
    """The products of one module while they are collected."""

    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    macs: dict[str, float] = field(default_factory=dict)
    products: dict[tuple[bytes, ...], list[Any]] = field(default_factory=dict)

    def add(self, weight: float, factors: tuple[Labels, ...]) -> None:
        if factors:
            found = self.products.setdefault(tuple(factor.tobytes() for factor in factors), [0.0, factors])
            found[0] += weight


def features_of(channel_map: ChannelMap) -> list[ModuleFeatures]:
    """Return the features of every module that runs on the first example, in that order."""
    trace = channel_map.traced.trace
    run = next(run for run in trace.runs if run.example == 0 and not run.training)
    batch = trace.flow.batch
    found: dict[str, _ModuleProducts] = {}
    for operator in run.operators:
        if operator.counted:
            products = found.setdefault(operator.module, _ModuleProducts())
            products.names.append(operator.name)
            products.arguments.append(_plain(operator.call[:2]))
            for weight, factors in written_elements(operator):
                products.add(weight / batch, factors)
    for term in trace.flow.macs:
        products = found.setdefault(term.module, _ModuleProducts())
        products.macs[term.operator] = products.macs.get(term.operator, 0.0) + term.constant * prod(
            map(len, term.factors)
        )
        products.add(term.constant, term.factors)
        if len(term.factors) > 1:
            for factor in term.factors:
                products.add(term.constant, (factor,))
    final = channel_map.traced.final
    return [_features(module, products, final) for module, products in found.items()]


def _features(module: str, found: _ModuleProducts, final: Labels) -> ModuleFeatures:
    kind = max(found.macs, key=lambda name: found.macs[name]) if found.macs else found.names[0]
    products = [WidthProduct((weight,), (factors,)) for weight, factors in found.products.values()]
    if len(products) > MOST:
        products = list(_added_up(products))
    widths = [[factor for factors in one.factors for factor in factors] for one in products]
    shape = [  # widths that no plan changes are numbers in it
        (round(sum(one.weights), 6), [None if final[factor].any() else factor.size for factor in factors])
        for one, factors in zip(products, widths, strict=True)
    ]
    return ModuleFeatures(module, kind, repr((found.names, found.arguments, shape)), tuple(products))


def _added_up(products: list[WidthProduct]) -> Iterator[WidthProduct]:
    for degree in sorted({len(one.factors[0]) for one in products}):
        alike = [one for one in products if len(one.factors[0]) == degree]
        yield WidthProduct(tuple(one.weights[0] for one in alike), tuple(one.factors[0] for one in alike))


def written_elements(operator: TracedOperator) -> Iterator[tuple[float, tuple[Labels, ...]]]:
    """Yield the number of elements of every result: a constant, and the labels of each width."""
    for shape, fields in zip(operator.call[2], operator.outputs, strict=True):
        factors, covered = apart(fields)
        yield float(prod(size for axis, size in enumerate(shape) if axis not in covered)), factors


def _plain(value: Any) -> str:
    """Return arguments as text, tensors as their sizes without the first two axes."""
    if isinstance(value, torch.Size):
        return str(tuple(value[2:]))
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_plain, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}={_plain(item)}' for key, item in value.items())}}}"
    return repr(value)


STEPS = (1, 4, 8, 16, 32)
"""Sizes of blocks that kernels may compute in: CPU vectors, tiles of tensor cores."""
ROUNDS = 2
"""Rounds of fitting: after the first, outliers among the networks count less."""
OUTLIER = 2.0
"""Error of an outlier, in multiples of the median error (Huber 1964)."""
EPSILON = 1e-12
STEP_GAIN = 0.02
"""Smallest share of the residual that blocks of several channels must save."""


@dataclass(frozen=True, eq=False)
class TimedNetwork:
    """A network that was timed layer by layer: which labels it keeps, (n_labels,), and its times."""

    keep: Keep
    times: LayerTimes

    def whole_ms(self, dense_ms: float) -> float:
        """Return the milliseconds at the speed of the machine when the dense network takes `dense_ms`."""
        return self.times.whole_ms * dense_ms / self.times.dense_ms


def fit_latency_table(
    channel_map: ChannelMap, samples: Sequence[TimedNetwork], setting: Mapping[str, Any]
) -> LatencyTable:
    """Return a table of the time of every module by its widths.

    A module's time is a constant and a sum of products of widths, as operators multiply and write them, each width
    rounded up to a step that is found for each kind of operator; where kernels change at a width, each side has
    coefficients of its own. Modules that do the same at different widths share their coefficients. Every network's
    times are scaled by the time of the dense one beside it, so that changes of the clock do not matter. Errors are
    weighted as shares of each network's whole time; outliers count less.
    """
    dense_ms = float(np.median([sample.times.dense_ms for sample in samples]))
    scale = np.array([dense_ms / sample.times.dense_ms for sample in samples])
    whole = np.array([sample.whole_ms(dense_ms) for sample in samples])
    kept = [sample.keep[channel_map.traced.final] for sample in samples]
    features = features_of(channel_map)
    columns = WidthColumns(kept, channel_map)
    took = {
        one.module: scale * np.array([sample.times.modules_ms.get(one.module, 0.0) for sample in samples])
        for one in features
    }
    weights = 1 / whole
    for _ in range(ROUNDS):
        layers = _fit_modules(features, columns, took, weights)
        there = [columns.present(layer.module) for layer in layers]
        sums = np.array(
            [
                sum(layer.at(one) for layer, present in zip(layers, there, strict=True) if present[index])
                for index, one in enumerate(kept)
            ]
        )
        outside, factor = non_negative_fit(
            np.stack([np.ones_like(sums), sums], axis=1) * weights[:, None], whole * weights
        )
        off = np.abs((outside + factor * sums) / whole - 1)
        weights = np.minimum(1, OUTLIER * np.median(off) / np.maximum(off, 1e-12)) / whole
    return LatencyTable(dict(setting), layers, float(outside), float(factor), dense_ms)


def _fit_modules(
    features: Sequence[ModuleFeatures], columns: WidthColumns, took: Mapping[str, Numbers], weights: Numbers
) -> tuple[LayerLatency, ...]:
    """Return the fits of all modules, in order."""
    alike = _by(features, lambda one: one.signature)
    layers: dict[str, LayerLatency] = {}
    for kind in _by(features, lambda one: one.kind).values():
        signatures = list(_by(kind, lambda one: one.signature))
        best = _best_steps([alike[signature] for signature in signatures], columns, took, weights)
        for signature in signatures:
            layers |= _fit_group(alike[signature], best, columns, took, weights)
    return tuple(layers[one.module] for one in features)


def _by(features: Sequence[ModuleFeatures], key: Any) -> dict[str, list[ModuleFeatures]]:
    groups: dict[str, list[ModuleFeatures]] = {}
    for one in features:
        groups.setdefault(key(one), []).append(one)
    return groups


_Steps = tuple[int, int, int]
"""Steps of the first width of a product, of its others, and of a width alone."""


class WidthColumns:
    """Products of widths in all networks, each computed once for each of its steps."""

    def __init__(self, kept: Sequence[Keep], channel_map: ChannelMap) -> None:
        self.kept = kept  # labels of each network, in the numbering of the trace
        self.channel_map = channel_map  # of the dense model
        self.widths: dict[bytes, Numbers] = {}
        self.columns: dict[tuple[WidthProduct, tuple[int, ...]], Numbers] = {}

    def width(self, factor: Any) -> Numbers:
        """Return (networks,) numbers of labels that are kept."""
        key = factor.tobytes()
        if key not in self.widths:
            self.widths[key] = np.array([np.count_nonzero(kept[factor]) for kept in self.kept])
        return self.widths[key]

    def design(self, one: ModuleFeatures, steps: _Steps) -> Numbers:
        """Return (networks, 1 + products): ones, and every product; all are 0 where the module is gone."""
        columns = [np.ones(len(self.kept)), *(self.column(product, steps) for product in one.products)]
        return np.stack(columns, axis=1) * self.present(one.module)[:, None]

    def present(self, module: str) -> Numbers:
        """Return (networks,) 1 where a module is there, else 0."""
        labels = self.channel_map.present_with(module)  # of which one is kept as long as the module is there
        if labels is None:
            return np.ones(len(self.kept))
        traced = np.flatnonzero(np.isin(self.channel_map.traced.final, labels))  # in the numbering of the trace
        return (self.width(traced) > 0).astype(np.float64)

    def column(self, product: WidthProduct, steps: _Steps) -> Numbers:
        """Return (networks,) values of a product."""
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
    groups: list[list[ModuleFeatures]], columns: WidthColumns, took: Mapping[str, Numbers], weights: Numbers
) -> _Steps:
    """Return the steps with which all modules of a kind fit best; steps of 1 if they are not clearly better."""

    def residual(steps: _Steps) -> float:
        return sum(_squared(*_stacked(group, steps, columns, took, weights)) for group in groups)

    plain: _Steps = (1, 1, 1)
    several = any(len(product.factors[0]) > 1 for group in groups for product in group[0].products)
    multiplied = STEPS if several else (1,)
    found = {steps: residual(steps) for steps in combinations(multiplied, multiplied, STEPS)}
    best = min(found, key=lambda steps: found[steps])
    rounding = EPSILON * sum(float(((took[one.module] * weights) ** 2).sum()) for group in groups for one in group)
    return best if found[best] < (1 - STEP_GAIN) * found[plain] - rounding else plain


def _stacked(
    group: list[ModuleFeatures], steps: _Steps, columns: WidthColumns, took: Mapping[str, Numbers], weights: Numbers
) -> tuple[Numbers, Numbers]:
    """Return the weighted design and times of all modules, one after the other."""
    design = np.concatenate([columns.design(one, steps) * weights[:, None] for one in group])
    return design, np.concatenate([took[one.module] * weights for one in group])


def _fit_group(
    group: list[ModuleFeatures], steps: _Steps, columns: WidthColumns, took: Mapping[str, Numbers], weights: Numbers
) -> dict[str, LayerLatency]:
    """Return the fits of modules that do the same."""
    cut_at = _widths(group)
    design, wanted = _stacked(group, steps, columns, took, weights)
    widths = [np.concatenate([columns.width(factor) for factor in alike]) for alike in cut_at]
    leaves = fit_tree(design, wanted, widths, np.tile(np.arange(len(columns.kept)), len(group)))
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
        there = columns.present(one.module) > 0
        found = np.array([layer.at(kept) for kept in columns.kept])
        known = bool(there.any()) and bool((measured[there] > 0).all())
        error = float(np.median(np.abs(found[there] / measured[there] - 1))) if known else None
        result[one.module] = replace(layer, error=error)
    return result


def _widths(group: Sequence[ModuleFeatures]) -> list[list[Labels]]:
    """Return the widths that a fit may be cut at, each once: its labels in every module of the group."""
    found: dict[tuple[bytes, ...], list[Labels]] = {}
    for products in zip(*(one.products for one in group), strict=True):
        if all(len(product.factors) == 1 for product in products):
            for alike in zip(*(product.factors[0] for product in products), strict=True):
                found.setdefault(tuple(factor.tobytes() for factor in alike), list(alike))
    return list(found.values())


def _terms(
    one: ModuleFeatures, coefficients: Numbers, constant: float, steps: _Steps, spans: tuple[Span, ...]
) -> Iterator[LatencyTerm]:
    """Yield the terms of a fit that holds within spans, without the constant."""
    if coefficients[0] > constant:
        yield LatencyTerm(float(coefficients[0]) - constant, (), (), spans)
    for ms, product in zip(coefficients[1:], one.products, strict=True):
        if ms > 0:
            for weight, factors in zip(product.weights, product.factors, strict=True):
                yield LatencyTerm(float(ms) * weight, factors, steps_of(factors, steps), spans)


DEPTH = 2
"""Largest number of cuts within each other."""
FOLDS = 5
"""Folds of the networks, to test a cut on those that it was not fitted to."""
CUT_GAIN = 0.15
"""Smallest share of the mean absolute error that a cut must save on them."""
CUT_POINTS = 2
"""Points for each coefficient that each side of a cut needs."""
CUTS = 64
"""Cuts that are tried at most for each width."""
CUT_EPSILON = 1e-9
"""Error that counts as rounding, as a share of the sum of all times."""
Points = NDArray[np.bool_]
Cut = tuple[int, float, Points]
"""Index of a width, its lowest value above the cut, and the points above: bool (points,)."""


@dataclass(frozen=True, eq=False)
class LeafFit:
    """A fit of a leaf of the tree: it holds within bounds of the widths."""

    coefficients: Numbers  # (columns,), none of them negative
    # by the index of a width, from the first to below the second; only of widths that are bounded
    bounds: dict[int, tuple[float, float]] = field(default_factory=dict)


def fit_tree(
    design: Numbers, wanted: Numbers, widths: Sequence[Labels], networks: Labels, depth: int = DEPTH
) -> list[LeafFit]:
    """Fit non-negative least squares, one for each range of widths that needs its own; (points, columns) are weighted.

    Libraries choose kernels by shape: a convolution may take 28 % less time with 448 input channels than with 416,
    which no sum of products follows. So this is a model tree (Quinlan 1992): the cut with the least squared error is
    made if it also predicts networks better that it was not fitted to, by cross-validation (Stone 1974), where a cut
    that only fits a single disturbed network predicts worse.
    """
    whole = LeafFit(non_negative_fit(design, wanted))
    cut = _best_cut(design, wanted, widths) if depth else None
    if cut is None or not _predicts(design, wanted, widths, networks, cut):
        return [whole]
    index, low, above = cut
    found = []
    for side, inside in enumerate((~above, above)):
        for leaf in fit_tree(
            design[inside], wanted[inside], [one[inside] for one in widths], networks[inside], depth - 1
        ):
            least, most = leaf.bounds.get(index, (0.0, np.inf))
            bound = (max(least, low), most) if side else (least, min(most, low))
            found.append(LeafFit(leaf.coefficients, leaf.bounds | {index: bound}))
    return found


def _best_cut(design: Numbers, wanted: Numbers, widths: Sequence[Labels]) -> Cut | None:
    """Return the cut with the least squared error; None if there are too few points."""
    least, best = CUT_POINTS * design.shape[1], None
    for index, values in enumerate(widths):
        lows = np.unique(values)[1:]
        for low in lows[:: max(1, -(-lows.size // CUTS))]:  # evenly spaced
            above = values >= low
            if least <= np.count_nonzero(above) <= above.size - least:
                error = sum(_squared(design[side], wanted[side]) for side in (above, ~above))
                if best is None or error < best[0]:
                    best = error, (index, float(low), above)
    return None if best is None else best[1]


def _squared(design: Numbers, wanted: Numbers) -> float:
    """Return the squared error of the best fit."""
    return float(((design @ non_negative_fit(design, wanted) - wanted) ** 2).sum())


def _predicts(design: Numbers, wanted: Numbers, widths: Sequence[Labels], networks: Labels, cut: Cut) -> bool:
    """Return whether a cut predicts networks that it was not fitted to, and clearly better than no cut does."""
    folds = [networks % FOLDS == fold for fold in range(FOLDS)]
    most = (1 - CUT_GAIN) * sum(_off(design, wanted, held_out, None) for held_out in folds)
    if most <= CUT_EPSILON * np.abs(wanted).sum() or sum(_off(design, wanted, out, cut[2]) for out in folds) >= most:
        return False
    error = 0.0  # of the best cuts for the other folds, as one that is best by chance is not so again
    for held_out in folds:
        rest = ~held_out
        found = _best_cut(design[rest], wanted[rest], [one[rest] for one in widths])
        error += _off(design, wanted, held_out, None if found is None else widths[found[0]] >= found[1])
    return error < most


def _off(design: Numbers, wanted: Numbers, held_out: Points, above: Points | None) -> float:
    """Return the absolute error of a fit to the other points, or of one fit on each side, at held-out points."""
    error = 0.0
    for side in (np.ones_like(held_out),) if above is None else (above, ~above):
        tested, fitted = side & held_out, side & ~held_out
        error += float(np.abs(design[tested] @ non_negative_fit(design[fitted], wanted[fitted]) - wanted[tested]).sum())
    return error


def non_negative_fit(design: Numbers, wanted: Numbers) -> Numbers:
    """Return coefficients of which none is negative: columns are dropped one by one, the most negative one first."""
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
