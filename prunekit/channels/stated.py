"""Which of the sizes that stand in a class's Python change under a plan, over all its modules and all their calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import nn

from prunekit.channels.attributes import integers
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
        self._map, self._final, self._keep = channel_map, channel_map.traced.final, keep
        self._left_alone = {(size.module, size.name) for size in channel_map.sizes}
        self._asked = [part.labels for part in channel_map.traced.extra if isinstance(part, EqualParts)]
        self._found: dict[tuple[str, str, int | None], SizeAttribute] = {}
        self._changing: set[str] = set()
        self._reads: dict[str, str | None] = {}

    def note(self, module: str, sizes: Sequence[SizeExpression]) -> None:
        """Takes in the sizes of one expression when a module ran it once."""
        fewer = {str(size.place) for size in sizes if self._shrinks(size.labels)}
        beside = {str(size.place) for size in sizes if not size.place.is_number}
        self._changing |= fewer | (beside if fewer or any(self._shrinks(size.decides) for size in sizes) else set())
        for size in sizes:
            key = (module, str(size.place), size.position)
            self._reads[key[1]] = size.reads
            earlier = self._found.setdefault(key, SizeAttribute(*key, size.labels)).labels
            if not self._same(earlier, size.labels):
                self._clash(key, earlier, size.labels)

    def _shrinks(self, labels: Labels) -> bool:
        return not bool(self._keep[self._final[labels]].any(axis=1).all())

    def _same(self, left: Labels, right: Labels) -> bool:
        one, two = (np.sort(self._by_row(labels), axis=0) for labels in (left, right))
        return np.array_equal(one, two)

    def _by_row(self, labels: Labels) -> Labels:
        """What decides on each row: one label, as for a position in all heads, where it is the same all along."""
        final = self._final[labels]
        for choice in self._map.deciding(final):
            if choice.all() and (choice == choice[:, :1]).all():
                return choice[:, :1]
        return final

    def _clash(self, key: tuple[str, str, int | None], left: Labels, right: Labels) -> None:
        """Asks for equal numbers, of heads or of positions in the first one; where that was no help, gives up."""
        parts = np.stack([left[:, 0], right[:, 0]]) if len(left) == len(right) else None
        if parts is None or any(np.array_equal(parts, asked) for asked in self._asked):
            self._left_alone.add(key[:2])
        else:
            self.equal.append(EqualParts(parts))

    def changing(self) -> list[SizeAttribute]:
        """All sizes, of every module, in expressions that change in one of them."""
        found = [size for size in self._found.values() if (size.module, size.name) not in self._left_alone]
        return [size for size in found if size.name in self._changing]

    def as_attributes(self, model: nn.Module) -> list[SizeAttribute]:
        """The same, with attributes of integers in place of expressions that only read one: `self.num_heads`.

        Unless that would have to be two sizes at once.
        """
        read: dict[tuple[str, str], list[SizeAttribute]] = {}
        result = []
        for size in self.changing():
            attribute = _holder(size, self._reads[size.name], model)
            if attribute is None:
                result.append(size)
            else:
                read.setdefault(attribute, []).append(size)
        for (module, name), sizes in read.items():
            first = {size.position: size for size in reversed(sizes)}
            if all(self._same(size.labels, first[size.position].labels) for size in sizes):
                sizes = [replace(size, module=module, name=name) for size in first.values()]
            values = integers(vars(model.get_submodule(module)).get(name)) or []
            known = [
                size for size in sizes if (size.module, size.name) in self._left_alone or values[size.position or 0] < 0
            ]
            result += [size for size in sizes if size not in known]
        return result


def _holder(size: SizeAttribute, reads: str | None, model: nn.Module) -> tuple[str, str] | None:
    """The module and its attribute that an expression reads: the size itself, or -1 for what is left."""
    if reads is None:
        return None
    part, _, name = reads.rpartition(".")
    path = ".".join(filter(None, (size.module, part)))
    try:
        values = integers(vars(model.get_submodule(path)).get(name))
    except AttributeError:  # of something that is no module
        return None
    return (path, name) if values and values[size.position or 0] in (len(size.labels), -1) else None
