"""Width features: the products of widths, of what a module multiplies and writes, that its time may depend on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from prunekit.channels.labels import Labels, apart
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.channels.tracing.traced_run import TracedOperator

MOST = 8
"""Largest number of products of a module; more are added up by their number of factors."""


@dataclass(frozen=True, eq=False)
class WidthProduct:
    """A weighted sum of products of widths; of a single product, unless a module has too many.

    Attributes:
        weights: of the products.
        factors: the labels of each width of the products, in the numbering of the trace.
    """

    weights: tuple[float, ...]
    factors: tuple[tuple[Labels, ...], ...]


@dataclass(frozen=True, eq=False)
class ModuleFeatures:
    """The products of widths that a module's time may depend on.

    Attributes:
        kind: name of the operator that multiplies the most, or of the first if none multiplies.
        signature: equal for modules that do the same at different widths.
    """

    module: str
    kind: str
    signature: str
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
            for weight, factors in _written(operator):
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
    shape = [
        (round(sum(one.weights), 6), [_fixed(factor, final) for factors in one.factors for factor in factors])
        for one in products
    ]
    return ModuleFeatures(module, kind, repr((found.names, found.arguments, shape)), tuple(products))


def _fixed(factor: Labels, final: Labels) -> int | None:
    """Return a width that no plan changes; None for one that plans change."""
    return None if final[factor].any() else factor.size


def _added_up(products: list[WidthProduct]) -> Iterator[WidthProduct]:
    for degree in sorted({len(one.factors[0]) for one in products}):
        alike = [one for one in products if len(one.factors[0]) == degree]
        yield WidthProduct(tuple(one.weights[0] for one in alike), tuple(one.factors[0] for one in alike))


def _written(operator: TracedOperator) -> Iterator[tuple[float, tuple[Labels, ...]]]:
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
