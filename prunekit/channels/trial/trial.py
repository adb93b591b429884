"""The trial: a plan is tried, what differs is locked, and the plan is made again until masked == compact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from prunekit.channels.channel_map import ChannelMap, Keep
from prunekit.channels.constraints import LockRecord
from prunekit.channels.cut.slicing import KeptIndices, kept_indices, masked_indices, narrowed
from prunekit.channels.labels import Labels
from prunekit.channels.resolution import with_constraints, with_locks, with_plain, with_sizes, with_ties
from prunekit.channels.rewrite.rewriter import attribute_values, set_attributes
from prunekit.channels.tracing.dispatch_modes import AS_DOUBLE
from prunekit.channels.tracing.operators import Operator, Run
from prunekit.channels.trial.comparison import Divergence, Reference, check, keyed, record
from prunekit.channels.trial.float64 import WAYS, DoubledWhileRunning, as_double, doubled, to_double, with_zeros
from prunekit.channels.trial.size_search import BatchAxes, Scales, SizeSearch, Trial, fields_at, within
from prunekit.channels.trial.untraced_methods import unseen_sizes
from prunekit.errors import ModelError, PlanError

PLAIN = "plain_classes keeps its class as it is"


@dataclass(frozen=True, eq=False)
class Settled:
    """What the trial agreed to.

    Attributes:
        channel_map: with the locks that were needed.
        keep: the plan made for it, bool (n_labels,).
        compact: the compact model.
        difference: the largest relative difference of any operator between masked and compact model (float64).
    """

    channel_map: ChannelMap
    keep: Keep
    compact: nn.Module
    difference: float


def settle(
    model: nn.Module,
    channel_map: ChannelMap,
    choose: Callable[[ChannelMap], Keep],
    examples: list[tuple[Any, ...]],
    *,
    plain: bool = False,
) -> Settled:
    """Plans, tries, locks what differs, and plans again until masked and compact model agree everywhere.

    As often as it takes: each time fewer channels are free, or more sizes known.

    Args:
        choose: makes `keep` (bool, (n_labels,)) for a map; called again after each lock.
        examples: inputs as for the trace.
        plain: whether all modules keep their classes: what would need explicit sizes in a class's Python, or another
            class, is locked.

    Raises:
        PlanError: the models differ where no channel is pruned, or where what was locked changes nothing.
    """
    divergence: Divergence | None = None
    failed: set[tuple[Any, ...]] = set()
    batches = BatchAxes(model, channel_map.traced.trace, examples)
    scales = Scales(model, examples)
    if plain:
        channel_map = with_plain(channel_map)
    before: tuple[int, ...] = ()
    while (known := _known(channel_map)) != before:
        before = known
        if channel_map.traced.stated and not _same_when_whole(model, channel_map, examples):
            channel_map = with_ties(channel_map)
        keep = channel_map.completed(choose(channel_map))
        kept = kept_indices(channel_map, keep)
        compact = narrowed(model, channel_map, keep, kept)
        if plain and (locks := _of_other_classes(model, compact, channel_map)):
            channel_map = with_locks(channel_map, locks)
            continue
        trial = _Trial(model, masked_indices(channel_map, keep), channel_map, keep, examples)
        difference, found = trial.of(compact)
        if found is None:
            return Settled(channel_map, keep, compact, difference)
        search = SizeSearch(model, compact, channel_map, keep, batches, scales, partial(trial.of, compact), plain)
        sizes = search.after(found)
        if search.equal:
            channel_map = with_constraints(channel_map, search.equal)
            continue
        channel_map = with_sizes(channel_map, sizes)
        if search.difference is not None:
            set_attributes(compact, attribute_values(model, channel_map, keep))
            return Settled(channel_map, keep, compact, search.difference)
        if not sizes:
            difference, found = trial.of(compact, sure=True)
            if found is None:
                return Settled(channel_map, keep, compact, difference)
            divergence, run = found
            kind = (type(model.get_submodule(divergence.module)), *divergence.key[1:])
            alike = _alike(model, divergence, run) if kind in failed else []
            failed.add(kind)
            lock = trial.lock_for(divergence, run)
            if lock is None:
                raise PlanError(f"the compact model fails where no channel is pruned: {divergence}")
            others = [trial.lock_for(where, run, there=True) for where in alike]
            same = [other for other in others if other is not None and other.positions == lock.positions]
            why = f"; {PLAIN}" if search.withheld else ""
            channel_map = with_locks(channel_map, [replace(one, reason=one.reason + why) for one in (lock, *same)])
    raise PlanError(f"no plan passed its trial, and further locks change nothing; the last to differ was {divergence}")


def _known(channel_map: ChannelMap) -> tuple[int, ...]:
    """Return what every trial changes, in one direction: free labels, how many go apart, and sizes."""
    return int(np.count_nonzero(channel_map.traced.final)), channel_map.n_labels, len(channel_map.sizes)


def with_unseen_sizes(
    model: nn.Module, settled: Settled, examples: list[tuple[Any, ...]]
) -> tuple[Settled, tuple[str, ...]]:
    """Return what a trial agreed to, with sizes that only methods read which no example runs; and what is to be said of
    them.

    They are set where the trial passes with them too.
    """
    chart, keep = settled.channel_map, settled.keep
    kept = kept_indices(chart, keep)
    found = unseen_sizes(model, settled.compact, chart, keep, kept, examples)
    if not found.sizes:
        return settled, found.notes
    chart = with_sizes(chart, found.sizes)
    compact = narrowed(model, chart, keep, kept)
    difference, failure = _Trial(model, masked_indices(chart, keep), chart, keep, examples).of(compact)
    if failure is None:
        return Settled(chart, keep, compact, max(difference, settled.difference)), found.notes
    names = ", ".join(sorted({f"{size.module}.{size.name}" for size in found.sizes}))
    return settled, (*found.notes, f"{names}: forward and methods that no example runs need different sizes here")


@dataclass(eq=False)
class _Trial:
    """A plan on trial: the masked model, run once, against one or several compact ones."""

    model: nn.Module
    kept: KeptIndices
    channel_map: ChannelMap
    keep: Keep
    examples: list[tuple[Any, ...]]
    references: dict[Run, Reference] = field(default_factory=dict)

    def of(self, compact: nn.Module, *, sure: bool = False) -> Trial:
        """Compare on every example in eval mode, and in train mode if that differs.

        A difference without copies of the models may be that of weights which another module than their owner uses;
        with copies it is `sure`.
        """
        worst = 0.0
        for run in self.channel_map.traced.trace.runs:
            if run.repeats:
                continue
            difference, divergence = self._sure(compact, run) if sure else self._quick(compact, run)
            worst = max(worst, difference)
            if divergence is not None:
                return worst, (divergence, run)
        return worst, None

    def _quick(self, compact: nn.Module, run: Run) -> tuple[float, Divergence | None]:
        """In float64 without copies, where that is possible."""
        example = as_double(self.examples[run.example])
        try:
            if run not in self.references:
                convert = with_zeros(to_double, self.kept)
                whole = self.channel_map.norms
                with DoubledWhileRunning(self.model, convert, whole=whole, borrowed=run.borrowed) as masked:
                    self.references[run] = record(masked.model, self.channel_map, self.keep, example, run, AS_DOUBLE[0])
            with DoubledWhileRunning(compact, to_double, borrowed=run.borrowed) as small:
                return check(self.references[run], small.model, example, run)
        except ModelError:  # a module uses another's weights
            return self._sure(compact, run)

    def _sure(self, compact: nn.Module, run: Run) -> tuple[float, Divergence | None]:
        """In float64 with copies; where that fails in every way, in the model's precision."""
        for way in WAYS:
            example = way.inputs(self.examples[run.example])
            masked = doubled(self.model, with_zeros(way.convert, self.kept))
            try:
                reference = record(masked, self.channel_map, self.keep, example, run, way.precision)
            except ModelError:  # the model's code asks for another precision
                if way is WAYS[-1]:
                    raise
                continue
            return check(reference, doubled(compact, way.convert), example, run, way.tolerance)
        raise AssertionError("there is a last way")

    def lock_for(self, divergence: Divergence, run: Run, *, there: bool = False) -> LockRecord | None:
        """Locks all labels at the operator that differs, or at every operator of the module whose Python failed.

        Where positions in heads are pruned there, these alone at first.

        Where nothing is pruned there, at the last operator before, or at the first of the module's parts, unless only
        `there` will do.
        """
        operators = keyed(run)
        culprit = operators.get(divergence.key) if divergence.operator else None
        if culprit is not None:
            before = run.operators[: run.operators.index(culprit) + 1]
            candidates = [[operator] for operator in reversed(before[-1:] if there else before)]
        else:
            inside = [operator for operator in run.operators if operator.module == divergence.module]
            parts = [[operator] for operator in within(divergence.module, run)]
            candidates = [inside, *parts, *([] if there else [run.operators[-1:]])]
        for labels in (*self._of_tensors(divergence), *map(_labels_at, candidates)):
            final = self.channel_map.traced.final[labels]
            if not self.keep[final].all():
                reason = (
                    f"the trial found a difference: {divergence.detail}{divergence.line and f' at {divergence.line}'}"
                )
                first = self._loses_positions(final)  # heads may then be no problem
                call = None if culprit is None else culprit.module_call
                return LockRecord(reason, divergence.module, divergence.operator, labels, positions=first, call=call)
        return None

    def _of_tensors(self, divergence: Divergence) -> list[Labels]:
        """Return the labels of the tensors of a module that failed in a method which another module called."""
        if divergence.owner in ("", divergence.module):
            return []
        traced = self.channel_map.traced.trace.labels.items()
        own = [axes for name, axes in traced if name.rpartition(".")[0] == divergence.owner]
        labels = [axis for axes in own for axis in axes if axis is not None]
        return [np.concatenate(labels)] if labels else []

    def _loses_positions(self, final: Labels) -> bool:
        _, *positions = self.channel_map.deciding(final)
        return not all(self.keep[labels].all() for labels in positions)


def _of_other_classes(model: nn.Module, compact: nn.Module, channel_map: ChannelMap) -> list[LockRecord]:
    """Locks for modules whose class a compact model has exchanged, and for others of the same class."""
    classes = {path: type(module) for path, module in model.named_modules()}
    changed = {classes[path] for path, module in compact.named_modules() if type(module) is not classes[path]}
    records = []
    for path, cls in classes.items():
        own = path + "." * bool(path)
        axes = [
            axis for name, every in channel_map.traced.trace.labels.items() if name.startswith(own) for axis in every
        ]
        labels = [axis for axis in axes if axis is not None]
        if cls in changed and labels:
            reason = f"{cls.__name__} cannot express the sizes that would be left; {PLAIN}"
            records.append(LockRecord(reason, path, "", np.concatenate(labels)))
    return records


def _same_when_whole(model: nn.Module, channel_map: ChannelMap, examples: list[tuple[Any, ...]]) -> bool:
    """Return whether a model with stated sizes and orders, and with all its channels, is what it was."""
    keep = np.ones(channel_map.n_labels, dtype=bool)
    compact = narrowed(model, channel_map, keep, {})
    return _Trial(model, {}, channel_map, keep, examples).of(compact)[1] is None


def _alike(model: nn.Module, divergence: Divergence, run: Run) -> list[Divergence]:
    """Return the same place in all other modules of a class of the model's own: where two of them failed, the others
    will.
    """
    cls = type(model.get_submodule(divergence.module))
    if cls.__module__.partition(".")[0] == "torch":  # a linear layer fails for reasons of the code around it
        return []
    places = keyed(run).keys() if divergence.operator else {(o.module, *divergence.key[1:]) for o in run.operators}
    others = [path for path, module in model.named_modules() if type(module) is cls and path != divergence.module]
    keys = [(path, *divergence.key[1:]) for path in others if (path, *divergence.key[1:]) in places]
    return [replace(divergence, module=key[0], key=key) for key in keys]


def _labels_at(operators: list[Operator]) -> Labels:
    fields = [labeled for operator in operators for labeled in fields_at(operator)]
    return np.concatenate([np.zeros(0, dtype=np.int64), *(field.labels.reshape(-1) for field in fields)])
