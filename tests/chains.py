"""Small nets whose plans can all be tried, scores for them, and latency tables drawn at random."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.measure.latency_profile.staircase_fit import features_of
from prunekit.planning.budgets.budget import Budgets
from prunekit.planning.budgets.cost_model import GroupPart, Span
from prunekit.planning.budgets.latency_table import LatencyTable, LatencyTerm, LayerLatency
from prunekit.planning.candidates import Scores
from prunekit.planning.plan import Plan


class Chain(nn.Module):
    """Convolutions in a row, each as wide as the next is deep; a shortcut around all but the first, or none."""

    def __init__(self, widths: list[int], kernels: list[int], shortcut: bool) -> None:
        super().__init__()
        between = zip([3, *widths[:-1]], widths, kernels, strict=True)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, kernel, padding=kernel // 2) for a, b, kernel in between)
        self.back = nn.Conv2d(widths[-1], widths[0], 1) if shortcut else None
        self.head = nn.Linear(widths[0] if shortcut else widths[-1], 4)

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.layers[0](x).relu()
        for layer in self.layers[1:]:
            x = layer(x if self.back is not None else nn.functional.avg_pool2d(x, 2)).relu()
        if self.back is not None:
            x = self.back(x) + first
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def scored(channel_map: ChannelMap, generator: np.random.Generator) -> Scores:
    """Scores of which some groups' are much larger than others'."""
    scores = np.full(channel_map.n_labels, np.inf)
    for group in channel_map.groups:
        scores[group.labels] = generator.lognormal(0, 1, group.labels.size) * generator.lognormal(0, 1)
    return scores


def kept(plan: Plan, scores: Scores) -> float:
    return float(sum(scores[g.labels][plan.keep[g.labels]].sum() for g in plan.channel_map.groups))


def chain(widths: list[int], *, shortcut: bool = True) -> ChannelMap:
    return trace(Chain(widths, [3] * len(widths), shortcut), (torch.zeros(1, 3, 16, 16),))


def random_chain(widths: list[int], shortcut: bool, generator: np.random.Generator) -> ChannelMap:
    kernels = [int(kernel) for kernel in generator.choice([1, 3], len(widths))]
    return trace(Chain(widths, kernels, shortcut), (torch.zeros(1, 3, 32, 32),))


def most_kept(parts: list[GroupPart], worth: Scores, budgets: Budgets) -> float:
    """The most of what labels are worth that any plan keeps within the budgets, by trying them all; 0 where none is."""
    every = np.stack(np.meshgrid(*[part.counts for part in parts], indexing="ij"), -1).reshape(-1, len(parts))
    each = sum(np.r_[0, np.cumsum(worth[part.labels])][every[:, i]] for i, part in enumerate(parts))
    return float((each * budgets.fits(every)).max())


def random_table(channel_map: ChannelMap, steps: tuple[int, ...], seed: int, turning: bool = False) -> LatencyTable:
    """A table with the features that a profile finds, and coefficients drawn at random.

    Args:
        turning: from a random width on, a module takes another random share of its time, as by another kernel.
    """
    final = channel_map.traced.final
    layers = []
    for one in features_of(channel_map):
        generator = np.random.default_rng([seed, *one.signature.encode()])  # alike for modules that do the same
        terms = []
        for product in one.products:
            ms = float(generator.lognormal(-8, 1)) / max(product.weights)
            own = [tuple(int(step) for step in generator.choice(steps, len(factors))) for factors in product.factors]
            terms += [
                LatencyTerm(ms * weight, factors, each)
                for weight, factors, each in zip(product.weights, product.factors, own, strict=True)
            ]
        free = [factor for term in terms for factor in term.factors if turning and final[factor].any()]
        if free:
            factor = free[int(generator.integers(len(free)))]
            at, share = float(generator.integers(2, factor.size + 1)), float(generator.uniform(0.3, 1.5))
            terms = [replace(term, spans=(Span(factor, 0, at),)) for term in terms] + [
                replace(term, ms=term.ms * share, spans=(Span(factor, at, np.inf),)) for term in terms
            ]
        layers.append(LayerLatency(one.module, float(generator.uniform(0, 0.01)), tuple(terms)))
    return LatencyTable({"runtime": "none"}, tuple(layers), 0.02, 1.1, 0.0)
