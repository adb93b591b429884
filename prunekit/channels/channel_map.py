"""The channel map: every label of a model resolved, its groups, its locks, and what it costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from prunekit.channels.constraints import NOT_JOINT, EqualParts, LockRecord, deciders
from prunekit.channels.labels import Field, Labels, MacTerm, Stored
from prunekit.channels.tracing.operators import Norm
from prunekit.channels.tracing.tracer import ActivationKey, Trace
from prunekit.errors import ModelError
from prunekit.utils.display import NOTHING, Displayed, Table, count, plural
from prunekit.utils.inputs import InputSpec

Keep = NDArray[np.bool_]
Slot = tuple[str, int]


@dataclass(frozen=True)
class Lock:
    """Channels that stay, and why: the module and the operator that need them."""

    reason: str
    module: str
    operator: str
    channels: int


@dataclass(frozen=True, eq=False)
class ChannelGroup:
    """Labels that lie on exactly the same parameter axes.

    `name` is a module path, the first that produces the channels; where one produces those of several groups, they
    are told apart as in `stem`, `stem#2`.
    """

    name: str
    labels: Labels
    slots: tuple[Slot, ...]

    @property
    def module(self) -> str:
        """The module path in its name."""
        return _group_name(self.slots)


@dataclass(frozen=True, eq=False)
class SizeAttribute:
    """An integer attribute of a module that is the size of a labeled axis, or one element of a list or tuple of such.

    `labels` has a row for each position of the axis, (size, n): a position is left if any of its labels is. Where
    `order` is given, (size,), what is meant is no size but from which position each one comes.
    """

    module: str
    name: str
    position: int | None
    labels: Labels
    order: Labels | None = None

    def kept(self, keep: Keep) -> int:
        """Return the size under a plan."""
        return int(np.count_nonzero(self._left(keep)))

    def value(self, keep: Keep) -> int | list[int]:
        """Return the size, or the order of what is left."""
        if self.order is None:
            return self.kept(keep)
        left = self._left(keep)
        return (np.cumsum(left) - 1)[self.order[left[self.order]]].tolist()  # type: ignore[no-any-return]

    def _left(self, keep: Keep) -> Keep:
        left: Keep = np.any(keep[self.labels], axis=1)
        return left


@dataclass(frozen=True, eq=False, repr=False)
class ChannelMap(Displayed):
    """Labels of every parameter and buffer axis; the one thing that knows how channels hang together.

    Attributes:
        labels: name -> one entry for each axis: int64 labels of shape (size,), 0 is locked; None for an axis of size 1.
        n_labels: labels run from 0 to n_labels - 1.
        shapes: name -> dense shape.
        groups: free labels by the set of axes they lie on, in the order of the model's parameters.
        locks: why the locked ones are locked.
        activations: (module path, "input" or "output", call) -> labels along that activation's channel axis.
        sizes: attributes of modules that a trial found to be sizes.
        norms: module path -> over which labels the module takes statistics; masked runs let it see kept ones only.
        joint: labels that two others decide on, which lie on the same axes: (n, 3), rows of the label itself, that of
            its whole head, and that of its position in all heads; it is kept if both are. They are in no group.
        stored: name -> how the model's file holds the tensor.
        divided: axes of tensors along which removed entries keep their values in a masked model: it divides by their
            norm, and multiplies by a factor that is zero.
        inputs: the tensors of the example that the model was traced on, the first of several.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> print(pk.trace(model, x))
        Channel map: 16 channels in 1 group, 10 more locked in 2 places; 160 MACs for
          one sample
        <BLANKLINE>
          group  channels  made by  read by
          0            16  0        2
        <BLANKLINE>
          locked at  channels  operator    reason
          0                 8  aten.addmm  meets an axis whose size no parameter decides, such as one of the input
          2                 2              output of the model
    """

    labels: Mapping[str, tuple[Labels | None, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    n_labels: int
    groups: tuple[ChannelGroup, ...]
    locks: tuple[Lock, ...]
    activations: Mapping[ActivationKey, Labels]
    mac_terms: tuple[MacTerm, ...]
    source: Resolved | None
    norms: Mapping[str, Norm] = field(default_factory=dict)
    sizes: tuple[SizeAttribute, ...] = ()
    joint: Labels = field(default_factory=NOT_JOINT.copy)
    stored: Mapping[str, Stored] = field(default_factory=dict)
    divided: frozenset[Slot] = frozenset()
    inputs: tuple[InputSpec, ...] = ()

    def completed(self, keep: Keep) -> Keep:
        """Return a choice among the labels of the groups, bool (n_labels,), with what follows from it for joint
        labels.
        """
        result = keep.copy()
        result[self.joint[:, 0]] = keep[self.joint[:, 1]] & keep[self.joint[:, 2]]
        return result

    def deciding(self, labels: Labels) -> list[Labels]:
        """Return the labels of the groups that decide on given ones: one array in their shape, or two where some are
        joint.

        0 in the second for labels that one decides on.
        """
        first, second = (choice[labels] for choice in self._choices)
        return [first, second] if second.any() else [first]

    @cached_property
    def _choices(self) -> tuple[Labels, Labels]:
        return deciders(self.n_labels, self.joint)

    def macs(self, keep: Keep | None = None) -> int:
        """Multiply-accumulates for one sample with the labels in `keep` (bool, (n_labels,)); dense without."""
        return round(sum(self._term(term, keep) for term in self.mac_terms))

    def layer_macs(self, keep: Keep | None = None) -> dict[str, int]:
        """Return multiply-accumulates for one sample by module path."""
        layers: dict[str, float] = {}
        for term in self.mac_terms:
            layers[term.module] = layers.get(term.module, 0.0) + self._term(term, keep)
        return {module: round(macs) for module, macs in layers.items()}

    def _term(self, term: MacTerm, keep: Keep | None) -> float:
        value = term.constant
        for factor in term.factors:
            value *= factor.size if keep is None else int(np.count_nonzero(keep[factor]))
        return value

    def parameters_kept(self, keep: Keep, names: Iterable[str]) -> int:
        """Return the number of entries of the named tensors that a plan keeps."""
        return sum(self._kept_size(name, keep) for name in names)

    def _kept_size(self, name: str, keep: Keep) -> int:
        sizes = [
            size if axis is None else int(np.count_nonzero(keep[axis]))
            for size, axis in zip(self.shapes[name], self.labels[name], strict=True)
        ]
        return int(np.prod(sizes, dtype=np.int64))

    def free_share(self, names: Iterable[str]) -> float:
        """Return the share of the named tensors' entries that lie on at least one free label."""
        free = total = 0.0
        for name in names:
            size = float(np.prod(self.shapes[name], dtype=np.float64))
            locked = size
            for axis_size, axis in zip(self.shapes[name], self.labels[name], strict=True):
                if axis is not None:
                    locked *= np.count_nonzero(axis == 0) / axis_size
            total, free = total + size, free + size - locked
        return free / total if total else 0.0

    @cached_property
    def group_of(self) -> Labels:
        """Index of each label's group; -1 for label 0."""
        result = np.full(self.n_labels, -1, dtype=np.int64)
        for index, group in enumerate(self.groups):
            result[group.labels] = index
        return result

    @property
    def traced(self) -> Resolved:
        """What the map was made from.

        Raises:
            ValueError: the map was read from a file.
        """
        if self.source is None:
            raise ValueError("a channel map read from a file has no trace: trace the model again")
        return self.source

    def require_plain_forward(self, what: str) -> None:
        """Checks that forward takes no gradients itself, as it does of forces.

        Args:
            what: runs it without recording gradients, in pieces.

        Raises:
            ModelError: it does.
        """
        if self.source is not None and any(run.gradients for run in self.source.trace.runs):
            raise ModelError(
                f"the model takes gradients inside its forward, which {what} cannot follow; prune on an example alone: "
                "prunekit.prune(model, (x,), ...), whose scores and trial need no images"
            )

    def resolve(self, field: Field) -> Labels:
        """Final labels of a field that the trace recorded."""
        return self.traced.final[field.labels]

    def rows(self) -> list[dict[str, Any]]:
        """Return every channel group, in the order of the model's parameters: its name, how many channels, which
        layers make them, and which read them; those inside a layer, such as heads, are both.
        """
        made, read, inside = self._users("output"), self._users("input"), defaultdict[int, list[str]](list)
        for term in self.mac_terms:
            for index in self._groups_on(*term.factors):
                if term.module not in inside[index]:
                    inside[index].append(term.module)
        return [
            {
                "group": group.name,
                "channels": group.labels.size,
                "made_by": made[index] or inside[index],
                "read_by": read[index] or inside[index],
            }
            for index, group in enumerate(self.groups)
        ]

    def _users(self, side: Literal["input", "output"]) -> defaultdict[int, list[str]]:
        """By a group's index the layers that have multiply-accumulates, and the group on a side."""
        found = defaultdict[int, list[str]](list)
        for module in dict.fromkeys(term.module for term in self.mac_terms):
            if (module, side, 0) in self.activations:
                for index in self._groups_on(self.activations[module, side, 0]):
                    found[index].append(module)
        return found

    def _groups_on(self, *labels: Labels) -> set[int]:
        """Return the indices of the groups that decide on labels."""
        deciding = [choice for each in labels for choice in self.deciding(each)]
        return set(self.group_of[np.concatenate(deciding, axis=None)].tolist()) - {-1} if deciding else set()

    def _headline(self) -> str:
        channels, locked = sum(group.labels.size for group in self.groups), sum(lock.channels for lock in self.locks)
        groups, places = plural(len(self.groups), "group"), plural(len(self.locks), "place")
        macs = f"{count(self.macs())} MACs for one sample"
        return f"{plural(channels, 'channel')} in {groups}, {locked:,} more locked in {places}; {macs}"

    def _parts(self) -> Iterator[str | Table]:
        yield f"Channel map: {self._headline()}"
        rows = self.rows()
        if rows:
            cells = [(row["group"], row["channels"], _few(row["made_by"]), _few(row["read_by"])) for row in rows]
            yield Table(("group", "channels", "made by", "read by"), cells, text=("made by", "read by"), most=30)
        if self.locks:
            locks = [(lock.module or "(root)", lock.channels, lock.operator, lock.reason) for lock in self.locks]
            headings = ("locked at", "channels", "operator", "reason")
            yield Table(headings, locks, text=("operator", "reason"), most=10, all_in=".locks")


@dataclass(frozen=True, eq=False)
class Resolved:
    """What a map was made from: the trace, what trials added in its numbering, and trace label -> final label.

    `ties` says that all constraints must hold; `stated` that some do not, as sizes and orders are told instead.
    """

    trace: Trace
    extra: tuple[LockRecord | EqualParts, ...]
    sizes: tuple[SizeAttribute, ...]
    final: Labels
    ties: bool = False
    stated: bool = False


def group_labels(
    labels: Mapping[str, tuple[Labels | None, ...]], n_labels: int, joint: Labels = NOT_JOINT
) -> tuple[ChannelGroup, ...]:
    """Group free labels by the set of (name, axis) on which they lie, by partition refinement.

    Where a label is joint, those that decide on it lie there, whole heads apart from positions in them.
    """
    alike: dict[bytes, tuple[Labels, list[Slot]]] = {}
    for name, axes in labels.items():
        for index, axis in enumerate(axes):
            if axis is not None:
                alike.setdefault(axis.tobytes(), (axis, []))[1].append((name, index))
    group = np.zeros(n_labels, dtype=np.int64)
    group[joint[:, 2]] = 1
    first, second = deciders(n_labels, joint)
    slots: list[tuple[Slot, ...]] = [(), ()]
    for axis, on in alike.values():
        members = np.union1d(first[axis], second[axis])
        old, position = np.unique(group[members], return_inverse=True)
        group[members] = len(slots) + position
        slots += [(*slots[which], *on) for which in old]
    group[0] = group[joint[:, 0]] = -1  # locked labels are in no group, whatever axes they lie on
    result: list[ChannelGroup] = []
    taken: Counter[str] = Counter()
    for which, _ in sorted(zip(*np.unique(group, return_index=True), strict=True), key=lambda pair: pair[1]):
        if which < 0:
            continue
        on = slots[which]
        name = _group_name(on)
        taken[name] += 1
        unique = name if taken[name] == 1 else f"{name}#{taken[name]}"
        result.append(ChannelGroup(unique, np.flatnonzero(group == which).astype(np.int64), on))
    return tuple(result)


def _few(modules: list[str]) -> str:
    """Return the first of several modules, and how many more there are."""
    return (modules[0] if modules else NOTHING) + (f", {len(modules) - 1} more" if len(modules) > 1 else "")


def _group_name(slots: tuple[Slot, ...]) -> str:
    """Return the first module that produces the group's channels; else the first that carries them."""
    producers = [name for name, axis in slots if axis == 0] or [slots[0][0]]
    return producers[0].rpartition(".")[0] or producers[0]
