"""Where kernels change: a fit is cut in two at a width where each side by itself predicts clearly better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prunekit.channels.labels import Labels
from prunekit.planning.terms import Numbers

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
EPSILON = 1e-9
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
    """Fits by least squares without negative coefficients, one for each range of widths that needs its own.

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
    """The cut that leaves the least squared error."""
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
    """Whether a cut predicts networks that it was not fitted to clearly better than no cut does.

    And whether cutting does, each time where the others say: what is the best of many cuts by chance is not again.
    """
    folds = [networks % FOLDS == fold for fold in range(FOLDS)]
    most = (1 - CLEARLY) * sum(_off(design, wanted, held_out, None) for held_out in folds)
    if most <= EPSILON * np.abs(wanted).sum() or sum(_off(design, wanted, out, cut[2]) for out in folds) >= most:
        return False
    error = 0.0
    for held_out in folds:
        rest = ~held_out
        found = _best_cut(design[rest], wanted[rest], [one[rest] for one in widths])
        error += _off(design, wanted, held_out, None if found is None else widths[found[0]] >= found[1])
    return error < most


def _off(design: Numbers, wanted: Numbers, held_out: Points, above: Points | None) -> float:
    """The error, without signs, at the points that are held out: of a fit to the others, or of one on either side."""
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
