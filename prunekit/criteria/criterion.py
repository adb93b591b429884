"""Criteria by name: what each needs, and the function that scores every label."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from prunekit import known_names
from prunekit.errors import UsageError, nearest
from prunekit.utils.registry import Registry

if TYPE_CHECKING:
    from prunekit.channels.tracing.channel_map import ChannelMap
    from prunekit.statistics.channel_stats import ChannelStats
    from prunekit.statistics.gram_matrices import PatchStats
    from prunekit.statistics.taylor_terms import TaylorTerms

Scores = npt.NDArray[np.float64]
Need = Literal["weights", "stats", "patches", "gradients", "curvature", "labels"]
"""Evidence of a criterion: the weights; statistics of activations; Gram matrices of the patches that layers
read; gradients of a loss; products of its Hessian; and labels, which the loss needs."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """The evidence that a criterion scores channels by.

    Attributes:
        channel_map: which label every index of every parameter axis has, and the channel groups.
        modules: of the model, by path.
        parameters: of the model, by name, detached.
        stats: channel statistics of activations; None if they are neither needed nor given.
        gradients: of a loss on labeled images; likewise.
        seed: of random numbers.
        patches: Gram matrices of the patches that layers read; likewise.

    Example:
        >>> import prunekit as pk, numpy as np, torch
        >>> @pk.register_criterion("bias", measures="|bias| of the first layer")
        ... def by_bias(evidence):
        ...     scores = np.zeros(evidence.channel_map.n_labels)
        ...     for group in evidence.channel_map.groups:
        ...         scores[group.labels] = evidence.parameters["0.bias"].abs()
        ...     return scores
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> _ = model[0].bias.data.copy_(torch.arange(16))
        >>> pk.plan(model, torch.randn(4, 8), macs=0.5, criterion="bias").kept_indices["0.bias"]
        (array([ 8,  9, 10, 11, 12, 13, 14, 15]),)
    """

    channel_map: ChannelMap
    modules: Mapping[str, nn.Module]
    parameters: Mapping[str, Tensor]
    stats: ChannelStats | None
    gradients: TaylorTerms | None
    seed: int
    patches: PatchStats | None = None


ScoreFunction = Callable[[Evidence], Scores]


@dataclass(frozen=True)
class Criterion:
    """An importance score: a pure function from the evidence to one score for each label, shape (n_labels,)."""

    name: str  # in recipes and arguments
    function: ScoreFunction  # computes it
    needs: tuple[Need, ...]  # evidence that it looks at; it is label-free without "labels"
    measures: str = ""  # what it measures, in a few words
    paper: str = ""  # that introduced it; empty for a baseline
    # whether scores of different channel groups can be ranked together as they are; others are normalized first
    comparable: bool = False


CRITERIA: Registry[Criterion] = known_names.CRITERIA


def register_criterion(
    name: str, *, needs: tuple[Need, ...] = ("weights",), measures: str = "", paper: str = "", comparable: bool = False
) -> Callable[[ScoreFunction], ScoreFunction]:
    """Register an importance score under a name that Python, recipes and commands take from then on.

    Args:
        name: as in `prune.criterion`.
        needs: the evidence that the function looks at, see `Need`; a job collects it, and a call from Python asks for
            it. Weights are always there.
        measures: what it measures, in a few words, for `prunekit list criteria`.
        paper: that introduced it, with the year.
        comparable: whether scores of different channel groups can be ranked together as they are; else they are
            normalized first where that is needed.

    Returns:
        A decorator of the function, which gets `Evidence` and returns one score for each label, (n_labels,) float64;
        the lowest are removed first. `prunekit.criteria.scoring.mean_over_slices` makes scores of values of slices.

    Raises:
        ValueError: the name is taken, or there is no such need.

    Example:
        >>> import torch
        >>> import prunekit as pk
        >>> from prunekit.criteria.scoring import mean_over_slices
        >>> @pk.register_criterion("largest", measures="largest |w|")
        ... def largest(evidence):
        ...     def measure(found, name, weight, labels_of_axes):
        ...         for axis, labels in labels_of_axes.items():
        ...             found.add(labels, weight.abs().movedim(axis, 0).flatten(1).amax(1).numpy())
        ...     return mean_over_slices(evidence, measure)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> small = pk.prune(model, (torch.randn(1, 4),), channels=0.5, criterion="largest").model
        >>> small[0].out_features
        4
    """
    unknown = [need for need in needs if need not in get_args(Need)]
    if unknown:
        raise ValueError(f"criterion {name!r}: needs: {unknown[0]!r} is none; {nearest(unknown[0], get_args(Need))}")

    def register(function: ScoreFunction) -> ScoreFunction:
        CRITERIA.add(name, Criterion(name, function, needs, measures, paper, comparable), function)
        return function

    return register


def accept(reference: str, given: Any) -> Criterion:
    """Return the criterion of a function in the user's file: as it was registered, or one of the weights alone."""
    if not callable(given):
        text = "expected a function of prunekit.criteria.criterion.Evidence that returns one score for each label"
        raise UsageError(f"criterion {reference}: {text}, got {type(given).__name__}")
    known = (each for each in CRITERIA.imported if each.function is given)
    return next(known, None) or Criterion(reference, given, ("weights",))
