"""Equal widths: which groups of channels keep the same share, because layers repeat or a configuration says so."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

Family = frozenset[tuple[str, int]]
"""Parameter axes with `#` in place of the numbers in their paths, as a group has them in each of several layers."""

OF_KIND = -1
"""In place of an axis: what the channels are, heads or positions in them, which may lie on the same axes."""


@dataclass(frozen=True, eq=False)
class EqualWidths:
    """Families of groups that keep the same share together, and those that stay whole.

    Attributes:
        together: families of which each keeps the same share as the others.
        whole: families that stay whole, with the reason.
        multiples: families with the number that the count of what they keep has to be a multiple of.
    """

    together: tuple[frozenset[Family], ...] = ()
    whole: Mapping[Family, str] = field(default_factory=dict)
    multiples: Mapping[Family, int] = field(default_factory=dict)

    def holds_for(self, families: Set[Family]) -> bool:
        """Return whether all families that keep the same share are still among those of a model."""
        return all(each <= families for each in self.together)

    def with_family(self, family: Family) -> frozenset[Family]:
        """Return the families that keep the same share as one, with itself."""
        return next((each for each in self.together if family in each), frozenset({family}))


NO_EQUAL_WIDTHS = EqualWidths()


def family_of(slots: Iterable[tuple[str, int]], kind: str) -> Family:
    """Return the family of a group on some parameter axes, of channels of a kind.

    Example:
        >>> family_of([("layers.0.fc1.weight", 0)], "") == family_of([("layers.1.fc1.weight", 0)], "")
        True
    """
    axes = {(re.sub(r"(?<![^.])\d+(?![^.])", "#", name), axis) for name, axis in slots}
    return frozenset(axes | {(kind, OF_KIND)})


def family_name(family: Family) -> str:
    """Return the name of a family for messages: the first module that makes its channels, and their kind."""
    made = sorted(name for name, axis in family if axis == 0) or sorted(name for name, axis in family if axis > 0)
    kind = "".join(name for name, axis in family if axis == OF_KIND)
    return f"{kind} {made[0].rpartition('.')[0] or made[0]}".strip()
