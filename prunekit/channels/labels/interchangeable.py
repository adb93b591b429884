"""Interchangeable positions: indices of axes that number the same things inside of one module, such as experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from prunekit.channels.labels import Labels, LabelUnion

TensorAxis = tuple[str, int]
"""The name of a tensor, and one of its axes."""


@dataclass(frozen=True)
class Interchangeable:
    """Axes of a module's tensors whose positions may change places, all together, without a change of its results.

    Attributes:
        module: its path.
        axes: of tensors inside of it.
        parts: into how many equal parts they fall; the same positions of all parts belong together.
        least: the fewest positions of a part with which the module runs.
        sizes: whole numbers to set: path and name of an attribute, and whether it is the size of one part.
    """

    module: str
    axes: tuple[TensorAxis, ...]
    parts: int
    least: int
    sizes: tuple[tuple[str, str, bool], ...]


@dataclass(frozen=True, eq=False)
class Positions:
    """Interchangeable positions with their labels, (size,), which no others lie between.

    Operators inside of the module do not lock them: the module runs narrow as a whole where some are removed.
    """

    known: Interchangeable
    labels: Labels

    def hold(self, labels: Labels) -> bool:
        """Return whether all of some labels are of these positions."""
        return bool(self.labels[0] <= labels.min() and labels.max() <= self.labels[-1])


def positions_of(found: Interchangeable, size: int, union: LabelUnion) -> Positions:
    """Return new labels for axes of a size, the same in each part."""
    return Positions(found, np.tile(union.new(size // found.parts), found.parts))


def around(path: str) -> Iterator[str]:
    """Yield a module's path and those of the modules around it, without the model's own."""
    while path:
        yield path
        path = path.rpartition(".")[0]
