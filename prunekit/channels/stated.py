"""Which of the sizes that stand in a class's Python change under a plan, over all its modules and all their calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prunekit.channels.constraints import EqualParts
from prunekit.channels.expressions import SizeExpression
from prunekit.channels.labels import Labels
from prunekit.channels.map import ChannelMap, Keep, SizeAttribute


class StatedSizes:
    """Collects the sizes in a class's expressions.

    Attributes:
        equal: labels of which as many must stay, as one expression says how many of either there are.
    """

    def __init__(self, channel_map: ChannelMap, keep: Keep) -> None:
        self.equal: list[EqualParts] = []
        self._final, self._keep = channel_map.traced.final, keep
        self._left_alone = {(size.module, size.name) for size in channel_map.sizes}
        self._found: dict[tuple[str, str, int | None], SizeAttribute] = {}
        self._changing: set[str] = set()

    def note(self, module: str, sizes: Sequence[SizeExpression]) -> None:
        """Takes in the sizes of one expression when a module ran it once."""
        fewer = {str(size.place) for size in sizes if self._shrinks(size.labels)}
        beside = {str(size.place) for size in sizes if not size.place.is_number}
        self._changing |= fewer | (beside if fewer or any(self._shrinks(size.decides) for size in sizes) else set())
        for size in sizes:
            key = (module, str(size.place), size.position)
            earlier = self._found.setdefault(key, SizeAttribute(*key, size.labels)).labels
            if not self._same(earlier, size.labels):
                self._clash(key, earlier, size.labels)

    def _shrinks(self, labels: Labels) -> bool:
        return not bool(self._keep[self._final[labels]].any(axis=1).all())

    def _same(self, left: Labels, right: Labels) -> bool:
        one, two = (np.sort(self._final[labels], axis=0) for labels in (left, right))
        return np.array_equal(one, two)

    def _clash(self, key: tuple[str, str, int | None], left: Labels, right: Labels) -> None:
        if left.shape == right.shape and left.shape[1] == 1:
            self.equal.append(EqualParts(np.stack([left[:, 0], right[:, 0]])))
        else:
            self._left_alone.add(key[:2])

    def changing(self) -> list[SizeAttribute]:
        """All sizes, of every module, in expressions that change in one of them."""
        found = [size for size in self._found.values() if (size.module, size.name) not in self._left_alone]
        return [size for size in found if size.name in self._changing]
