"""The channel map: every label of a model resolved, its groups, its locks, and what it costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from prunekit.channels.labels.branch import NO_BRANCHES, Branches, BranchLock, is_inside
from prunekit.channels.labels.constraint_solver import NOT_JOINT, deciders
from prunekit.channels.labels.constraints import (
    NO_EQUAL_WIDTHS,
    EqualParts,
    EqualWidths,
    Family,
    LockRecord,
    Removal,
    around,
    family_of,
)
from prunekit.channels.labels.label_flow import Field, MacTerm, WidthMultiple
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.channel_norms import ChannelNorm, NarrowBlock
from prunekit.channels.tracing.execution import ActivationKey
from prunekit.channels.tracing.kept_state import NO_STATE, KeptState
from prunekit.channels.tracing.tracer import Trace
from prunekit.errors import ModelError
from prunekit.utils.display import NOTHING, Displayed, Table, count, plural, share
from prunekit.utils.inputs import InputSpec
from prunekit.utils.outputs import ALL_READ, ReadOutputs

Keep = NDArray[np.bool_]
Slot = tuple[str, int]
T = TypeVar("T")
_KINDS = {Removal.POSITIONS: "positions in heads of", Removal.QUERIES: "query heads of"}


@dataclass(frozen=True)
class Lock:
    """Channels that stay, and why: the module and the operator that need them."""

    reason: str
    module: str
    operator: str
    channels: int


@dataclass(frozen=True)
class Stored:
    """Storage of a tensor in a model's file: bytes of one element, and whether it is a parameter or a buffer."""

    element_bytes: int
    parameter: bool


@dataclass(frozen=True, eq=False)
class ChannelGroup:
    """Labels that lie on exactly the same parameter axes."""

    name: str  # its module; where one makes the channels of several groups, they are named `stem`, `stem#2`
    labels: Labels
    slots: tuple[Slot, ...]

    @property
    def module(self) -> str:
        """The path of the first module that makes the channels, else of the first that has them."""
        producers = [name for name, axis in self.slots if axis == 0] or [self.slots[0][0]]
        return producers[0].rpartition(".")[0] or producers[0]


@dataclass(frozen=True, eq=False)
class SizeAttribute:
    """An integer attribute of a module that is the size of a labeled axis, or one element of a list of such."""

    module: str
    name: str
    position: int | None
    labels: Labels  # (size, n): a row for each position of the axis, which is kept if any label in the row is
    order: Labels | None = None  # (size,): the attribute is no size, but says from which position each one comes
    whole: bool = False  # these are positions of a tensor that keeps all of them; the labels are those of the result

    def renumbered(self, final: Labels) -> SizeAttribute:
        """Return the same with a map's labels in place of a trace's, given the map's label of each of these."""
        return replace(self, labels=final[self.labels])

    def kept(self, keep: Keep) -> int:
        """Return the size under a plan."""
        return int(np.count_nonzero(self._kept_positions(keep)))

    def value(self, keep: Keep) -> int | list[int]:
        """Return the size, or the order of the kept positions."""
        if self.order is None:
            return self.kept(keep)
        left = self._kept_positions(keep)
        if self.whole:
            return self.order[left].tolist()  # type: ignore[no-any-return]
        return (np.cumsum(left) - 1)[self.order[left[self.order]]].tolist()  # type: ignore[no-any-return]

    def _kept_positions(self, keep: Keep) -> Keep:
        kept: Keep = np.any(keep[self.labels], axis=1)
        return kept


@dataclass(frozen=True, eq=False, repr=False)
class ChannelMap(Displayed):
    """Labels of every parameter and buffer axis: which channels are coupled, which are locked, and what they cost.

    Attributes:
        labels: name -> one entry for each axis: int64 labels of shape (size,), 0 is locked; None for an axis of size 1.
        n_labels: labels run from 0 to n_labels - 1.
        shapes: name -> dense shape.
        groups: free labels by the set of axes they lie on, in the order of the model's parameters.
        locks: why the locked ones are locked.
        activations: (module path, "input" or "output", call) -> labels along that activation's channel axis.
        mac_terms: multiply-accumulates of every operator, as products of widths.
        source: what the map was built from; None if it was read from a file.
        norms: module path -> the labels over which the module takes statistics; in masked runs it sees kept ones only.
        blocks: module path -> a module that runs narrow in masked runs, as a whole, where its positions are removed.
        sizes: attributes of modules that a trial found to be sizes.
        joint: labels that several others decide on, (n, 4): rows of the label itself, that of its whole head, that of
            its position in all heads, and that of its query head for all heads of keys, 0 for none; it is kept if all
            of them are. They are in no group. Files may have fewer columns.
        multiples: widths that operators take only in multiples of a number.
        stored: name -> how the model's file holds the tensor.
        divided: axes of tensors along which removed entries keep their values in a masked model: it divides by their
            norm, and multiplies by a factor that is zero.
        inputs: the tensors of the first example that the model was traced on.
        read: the outputs of the model that keep their sizes.
        branches: blocks, parts of the model that may go as a whole, and those that stay with the reason.
        state: what the model keeps between its calls in attributes that are no buffers.

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
    source: MapSource | None
    norms: Mapping[str, ChannelNorm] = field(default_factory=dict)
    blocks: Mapping[str, NarrowBlock] = field(default_factory=dict)
    sizes: tuple[SizeAttribute, ...] = ()
    joint: Labels = field(default_factory=NOT_JOINT.copy)
    stored: Mapping[str, Stored] = field(default_factory=dict)
    divided: frozenset[Slot] = frozenset()
    multiples: tuple[WidthMultiple, ...] = ()
    inputs: tuple[InputSpec, ...] = ()
    read: ReadOutputs = ALL_READ
    branches: Branches = NO_BRANCHES
    state: KeptState = NO_STATE

    def completed(self, keep: Keep) -> Keep:
        """Return a choice among the labels of the groups, bool (n_labels,), with the joint labels set to match.

        A branch that loses all channels of a group loses those of its other groups too.
        """
        keep = self.branches.tied(keep)
        result = keep.copy()
        result[self.joint[:, 0]] = keep[self.joint[:, 1:]].all(axis=1)
        return result

    def deciding(self, labels: Labels) -> list[Labels]:
        """Return the labels of the groups that decide on given ones, in their shape.

        There are several arrays where some are joint; all but the first have 0 for labels that one decides on.
        """
        first, *others = (choice[labels] for choice in self.choices)
        return [first, *(choice for choice in others if choice.any())]

    @cached_property
    def choices(self) -> list[Labels]:
        """By `Removal`, which label decides on each, (n_labels,), or 0; what one decides on alone is in the first."""
        return deciders(self.n_labels, self.joint)

    def macs(self, keep: Keep | None = None) -> int:
        """Return multiply-accumulates for one sample with the labels in `keep`, bool (n_labels,); all without it."""
        return round(sum(self._term(term, keep) for term in self.mac_terms))

    def macs_left(self, keep: Keep) -> float:
        """Return the share of multiply-accumulates that is left, 0..1; 1 of a model that has none."""
        dense = self.macs()
        return self.macs(keep) / dense if dense else 1.0

    def layer_macs(self, keep: Keep | None = None) -> dict[str, int]:
        """Return multiply-accumulates for one sample by module path."""
        layers: dict[str, float] = {}
        for term in self.mac_terms:
            layers[term.module] = layers.get(term.module, 0.0) + self._term(term, keep)
        return {module: round(macs) for module, macs in layers.items()}

    @cached_property
    def presence(self) -> dict[str, Labels]:
        """Labels of which one is kept as long as a module is there, by the paths of modules that may go."""
        return {path: branch.presence for branch in self.branches.found for path in branch.modules}

    def present_with(self, module: str) -> Labels | None:
        """Return labels of which one is kept as long as a module is there; None if it stays."""
        return next((self.presence[path] for path in around(module) if path in self.presence), None)

    def is_present(self, module: str, keep: Keep) -> bool:
        """Return whether a plan keeps a module."""
        labels = self.present_with(module)
        return labels is None or bool(keep[labels].any())

    def gone_tensors(self, keep: Keep) -> set[str]:
        """Return the names of tensors of modules that go under a plan."""
        gone = self.branches.gone(keep)
        return {name for name in self.shapes if any(branch.loses(name) for branch in gone)} if gone else set()

    def without_gone(self, keep: Keep, by_path: Mapping[str, T]) -> dict[str, T]:
        """Return entries by module path without those of modules that go, or whose code does, under a plan."""
        if not self.branches.found:
            return dict(by_path)
        left = self.branches.shortening(keep)
        gone = {body.module for body in left.bodies}
        return {path: one for path, one in by_path.items() if path not in gone and not is_inside(path, left.modules)}

    def _term(self, term: MacTerm, keep: Keep | None) -> float:
        value = term.constant
        if keep is not None and not self.is_present(term.module, keep):
            return 0.0
        for factor in term.factors:
            value *= factor.size if keep is None else int(np.count_nonzero(keep[factor]))
        return value

    def parameters_kept(self, keep: Keep, names: Iterable[str]) -> int:
        """Return the number of entries of the named tensors that a plan keeps."""
        gone, total = self.gone_tensors(keep), 0
        for name in names:
            if name not in gone:
                axes = zip(self.shapes[name], self.labels[name], strict=True)
                total += prod(size if axis is None else int(np.count_nonzero(keep[axis])) for size, axis in axes)
        return total

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

    def narrow(self, keep: Keep) -> dict[str, ChannelNorm]:
        """Return the modules that run narrow in a masked model: norms, and blocks that lose positions."""
        losing = {path: block for path, block in self.blocks.items() if not keep[block.positions].all()}
        return self.without_gone(keep, {**self.norms, **losing})

    @cached_property
    def least(self) -> Labels:
        """The fewest labels of each group that may be kept."""
        least = np.ones(len(self.groups), dtype=np.int64)
        for multiple in self.multiples:
            groups = np.unique(self.group_of[multiple.labels])
            np.maximum.at(least, groups[groups >= 0], multiple.least)
        return least

    @cached_property
    def steps(self) -> Labels:
        """Step of the number of kept labels of each group, so that widths are the multiples that operators need."""
        steps = np.ones(len(self.groups), dtype=np.int64)
        for multiple in self.multiples:
            deciding = self.deciding(multiple.labels)
            for labels in deciding:
                on_axis = np.bincount(self.group_of[labels] + 1, minlength=len(self.groups) + 1)[1:]
                for group in np.flatnonzero(on_axis):
                    channels = 1 if len(deciding) > 1 else max(1, on_axis[group] // self.groups[group].labels.size)
                    steps[group] = np.lcm(steps[group], multiple.number // np.gcd(multiple.number, channels))
        return steps

    @cached_property
    def group_of(self) -> Labels:
        """Index of each label's group; -1 for label 0."""
        result = np.full(self.n_labels, -1, dtype=np.int64)
        for index, group in enumerate(self.groups):
            result[group.labels] = index
        return result

    def kind_of(self, group: ChannelGroup) -> Removal:
        """Return which kind of channels a group holds: positions in heads, query heads, or any others."""
        for kind in reversed(range(2, self.joint.shape[1])):
            inside = self.joint[:, 1:kind].any(axis=1)
            if np.isin(group.labels, self.joint[inside, kind]).any():
                return Removal(kind - 1)
        return Removal.HEADS

    def family_of(self, group: ChannelGroup) -> Family:
        """Return the family of a group, which has one in each of several layers."""
        return family_of(group.slots, _KINDS.get(self.kind_of(group), ""))

    @cached_property
    def families(self) -> dict[Family, list[ChannelGroup]]:
        """Groups by family."""
        found: dict[Family, list[ChannelGroup]] = {}
        for group in self.groups:
            found.setdefault(self.family_of(group), []).append(group)
        return found

    @property
    def traced(self) -> MapSource:
        """The trace that the map was built from, with what trials added; a `ValueError` if it was read from a file."""
        if self.source is None:
            raise ValueError("a channel map read from a file has no trace: trace the model again")
        return self.source

    def require_plain_forward(self, what: str) -> None:
        """Raise a `ModelError` if forward itself takes gradients, as it does to compute forces.

        `what` is the method that runs forward in pieces, without recording gradients.
        """
        if self.source is not None and any(run.gradients for run in self.source.trace.runs):
            raise ModelError(
                f"the model takes gradients inside its forward, which {what} cannot follow; prune on an example alone: "
                "prunekit.prune(model, (x,), ...), whose scores and trial need no images"
            )

    def resolve(self, field: Field) -> Labels:
        """Return the map's labels of a field that the trace recorded."""
        return self.traced.final[field.labels]

    def rows(self) -> list[dict[str, Any]]:
        """Return every channel group: its name, its number of channels, and the layers that make and read them.

        In the order of the model's parameters. For channels inside a layer, such as heads, it is both.
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

    def block_rows(self) -> list[dict[str, Any]]:
        """Return every block, a residual branch that a plan may remove as a whole: its name, layers, channels and MACs.

        In order of execution. `layers` are those with multiply-accumulates, `macs` are for one sample, and `share` is
        theirs of the model's. `branches.locks` has those that stay.
        """
        blocks, total = self.branches.found, self.macs() or 1
        owner = np.full(self.n_labels, -1, dtype=np.int64)
        for index, block in enumerate(blocks):
            owner[block.labels] = index
        owner[self.joint[:, 0]] = owner[self.joint[:, 1]]
        by_presence = {id(block.presence): index for index, block in enumerate(blocks)}
        layers, macs = defaultdict[int, dict[str, None]](dict), Counter[int]()
        for term in self.mac_terms:
            inside = by_presence.get(id(self.present_with(term.module)))
            whole = (int(owner[factor[0]]) for factor in term.factors if np.unique(owner[factor]).size == 1)
            index = next((one for one in whole if one >= 0), -1) if inside is None else inside
            layers[index][term.module] = None
            macs[index] += round(self._term(term, None))
        return [
            {
                "block": block.name,
                "layers": list(layers[index]),
                "channels": block.labels.size,
                "macs": macs[index],
                "share": macs[index] / total,
            }
            for index, block in enumerate(blocks)
        ]

    def _users(self, side: Literal["input", "output"]) -> defaultdict[int, list[str]]:
        """Return by the index of a group the layers with multiply-accumulates that have the group on a side."""
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
        blocks = f"; {plural(len(self.branches.found), 'block')} may go" if self.branches.found else ""
        return f"{plural(channels, 'channel')} in {groups}, {locked:,} more locked in {places}; {macs}{blocks}"

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
        yield from self._block_tables()

    def _block_tables(self) -> Iterator[Table]:
        if self.branches.found:
            blocks = [
                (row["block"], len(row["layers"]), row["channels"], count(row["macs"]), share(row["share"]))
                for row in self.block_rows()
            ]
            headings = ("block that may go", "layers", "channels", "MACs", "share")
            yield Table(headings, blocks, most=30, all_in=".block_rows()")
        if self.branches.locks:
            staying = [(lock.name or "(root)", lock.reason) for lock in self.branches.locks]
            yield Table(("block that stays", "reason"), staying, ("reason",), most=10, all_in=".branches.locks")


@dataclass(frozen=True, eq=False)
class MapSource:
    """The trace that a map was built from, with what trials added."""

    trace: Trace
    extra: tuple[LockRecord | EqualParts, ...]  # further locks and constraints, in the trace's numbering
    sizes: tuple[SizeAttribute, ...]  # attributes that trials found to be sizes, in the trace's numbering
    final: Labels  # the label in the map of each label of the trace
    all_constraints: bool = False  # whether no constraint may be left out
    stated: bool = False  # whether some are left out, because sizes and orders are stated in a module's Python instead
    branches_stay: tuple[BranchLock, ...] = ()  # branches that a trial found to stay
    # which groups keep the same share, and which stay whole, where a library's configuration says so
    equal_widths: EqualWidths = NO_EQUAL_WIDTHS


def group_labels(
    labels: Mapping[str, tuple[Labels | None, ...]], n_labels: int, joint: Labels = NOT_JOINT
) -> tuple[ChannelGroup, ...]:
    """Group free labels by the set of (name, axis) on which they lie, by partition refinement.

    In place of a joint label count those that decide on it, whole heads and positions in them in separate groups.
    """
    alike: dict[bytes, tuple[Labels, list[Slot]]] = {}
    for name, axes in labels.items():
        for index, axis in enumerate(axes):
            if axis is not None:
                alike.setdefault(axis.tobytes(), (axis, []))[1].append((name, index))
    group = np.zeros(n_labels, dtype=np.int64)
    for kind, column in enumerate(joint.T[1:]):
        group[column] = kind
    choices = deciders(n_labels, joint)
    slots: list[tuple[Slot, ...]] = [()] * len(choices)
    for axis, on in alike.values():
        members = np.unique(np.concatenate([choice[axis] for choice in choices]))
        old, position = np.unique(group[members], return_inverse=True)
        group[members] = len(slots) + position
        slots += [(*slots[which], *on) for which in old]
    group[0] = group[joint[:, 0]] = -1  # locked labels are in no group, whatever axes they lie on
    result: list[ChannelGroup] = []
    taken: Counter[str] = Counter()
    for which, _ in sorted(zip(*np.unique(group, return_index=True), strict=True), key=lambda pair: pair[1]):
        if which < 0:
            continue
        found = ChannelGroup("", np.flatnonzero(group == which).astype(np.int64), slots[which])
        taken[found.module] += 1
        number = taken[found.module]
        result.append(replace(found, name=found.module if number == 1 else f"{found.module}#{number}"))
    return tuple(result)


def _few(modules: list[str]) -> str:
    """Return the first of several modules and the number of the others, in words."""
    return (modules[0] if modules else NOTHING) + (f", {len(modules) - 1} more" if len(modules) > 1 else "")
