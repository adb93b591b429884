"""Whether a mask of single weights has a pattern."""

from torch import Tensor

from prunekit.planning.patterns.pattern import Pattern


def holds(pattern: Pattern, mask: Tensor) -> bool:
    """Return whether a mask (o, i, t) has a pattern."""
    if pattern.kept_of is not None:
        kept, of = pattern.kept_of
        counts = mask.view(mask.shape[0], mask.shape[1] // of, of, -1).sum(2)
        return bool((counts <= kept).all())
    units = pattern.units(mask.double())
    return bool(((units == 0) | (units == units.max())).all()) if mask.any() else True
