"""The trial of a plan: what differs is locked, and the plan is made again until masked and compact model agree."""

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
from prunekit.channels.map_builder import with_all_constraints, with_extra, with_sizes, without_expressions
from prunekit.channels.rewrite.source_rewriter import attribute_values, set_attributes
from prunekit.channels.rules.pointwise import MADE
from prunekit.channels.tracing.traced_run import TracedOperator, TracedRun
from prunekit.channels.trial.comparison import Divergence, Reference, compare, operators_by_key, record_reference
from prunekit.channels.trial.float64 import (
    AS_DOUBLE,
    RUN_PRECISIONS,
    Float64WhileRunning,
    float64_copy,
    float64_inputs,
    to_double,
    with_zeros,
)
from prunekit.channels.trial.size_search import BatchAxes, Outcome, ScaleSearch, SizeSearch, fields_at, within
from prunekit.channels.trial.untraced_methods import untraced_sizes
from prunekit.errors import ModelError, PlanError

MAKE_IT = "make it in a method of a module, with its sizes as the arguments, where they can be set"
KEEPS_CLASS = "plain_classes keeps its class as it is"


@dataclass(frozen=True, eq=False)
class TrialResult:
    """The plan that passed its trial.

    Attributes:
        channel_map: the map, with the locks that were needed.
        keep: the plan made for it, bool (n_labels,).
        compact: the compact model.
        difference: the largest relative difference of any operator between masked and compact model (float64).
    """

    channel_map: ChannelMap
    keep: Keep
    compact: nn.Module
    difference: float


def run_trial(
    model: nn.Module,
    channel_map: ChannelMap,
    choose: Callable[[ChannelMap], Keep],
    examples: list[tuple[Any, ...]],
    *,
    plain: bool = False,
) -> TrialResult:
    """Plan, compare, lock what differs, and plan again until masked and compact model agree everywhere.

    It ends because each time fewer channels are free, or more sizes are known.

    Args:
        model: the dense model; not changed.
        channel_map: its map.
        choose: returns `keep` (bool, (n_labels,)) for a map; called again after each lock.
        examples: inputs as for the trace.
        plain: whether all modules keep their classes: channels that would need explicit sizes in a class's Python, or
            another class, are locked.

    Raises:
        PlanError: the models differ where no channel is pruned, or further locks change nothing.
    """
    divergence: Divergence | None = None
    failed: set[tuple[Any, ...]] = set()
    batches = BatchAxes(model, channel_map.traced.trace, examples)
    scales = ScaleSearch(model, examples)
    if plain:
        channel_map = without_expressions(channel_map)
    before: tuple[int, ...] = ()
    while (known := _known(channel_map)) != before:
        before = known
        if channel_map.traced.stated and not _same_when_whole(model, channel_map, examples):
            channel_map = with_all_constraints(channel_map)
        keep = channel_map.completed(choose(channel_map))
        kept = kept_indices(channel_map, keep)
        compact = narrowed(model, channel_map, keep, kept)
        if plain and (locks := _of_other_classes(model, compact, channel_map)):
            channel_map = with_extra(channel_map, locks)
            continue
        trial = _PlanOnTrial(model, masked_indices(channel_map, keep), channel_map, keep, examples)
        difference, found = trial.compare(compact)
        if found is None:
            return TrialResult(channel_map, keep, compact, difference)
        search = SizeSearch(model, compact, channel_map, keep, batches, scales, partial(trial.compare, compact), plain)
        sizes = search.after(found)
        if search.equal:
            channel_map = with_extra(channel_map, search.equal)
            continue
        channel_map = with_sizes(channel_map, sizes)
        if search.difference is not None:
            set_attributes(compact, attribute_values(model, channel_map, keep))
            return TrialResult(channel_map, keep, compact, search.difference)
        if not sizes:
            difference, found = trial.compare(compact, copies=True)
            if found is None:
                return TrialResult(channel_map, keep, compact, difference)
            divergence, run = found
            kind = (type(model.get_submodule(divergence.module)), *divergence.key[1:])
            alike = _alike(model, divergence, run) if kind in failed else []
            failed.add(kind)
            lock = trial.lock_for(divergence, run)
            if lock is None:
                raise PlanError(f"the compact model fails where no channel is pruned: {divergence}")
            others = [trial.lock_for(where, run, there=True) for where in alike]
            same = [other for other in others if other is not None and other.positions == lock.positions]
            why = f"; {KEEPS_CLASS}" if search.withheld else ""
            channel_map = with_extra(channel_map, [replace(one, reason=one.reason + why) for one in (lock, *same)])
    raise PlanError(f"no plan passed its trial, and further locks change nothing; the last to differ was {divergence}")


def _known(channel_map: ChannelMap) -> tuple[int, ...]:
    """Return counts that every trial changes in one direction: free labels, classes of labels, and sizes."""
    return int(np.count_nonzero(channel_map.traced.final)), channel_map.n_labels, len(channel_map.sizes)


def with_untraced_sizes(
    model: nn.Module, settled: TrialResult, examples: list[tuple[Any, ...]]
) -> tuple[TrialResult, tuple[str, ...]]:
    """Return the result of a trial with sizes that only methods read which no example runs, and notes on them.

    They are set if the trial passes with them too.
    """
    chart, keep = settled.channel_map, settled.keep
    kept = kept_indices(chart, keep)
    found = untraced_sizes(model, settled.compact, chart, keep, kept, examples)
    if not found.sizes:
        return settled, found.notes
    chart = with_sizes(chart, found.sizes)
    compact = narrowed(model, chart, keep, kept)
    difference, failure = _PlanOnTrial(model, masked_indices(chart, keep), chart, keep, examples).compare(compact)
    if failure is None:
        return TrialResult(chart, keep, compact, max(difference, settled.difference)), found.notes
    names = ", ".join(sorted({f"{size.module}.{size.name}" for size in found.sizes}))
    return settled, (*found.notes, f"{names}: forward and methods that no example runs need different sizes here")


@dataclass(eq=False)
class _PlanOnTrial:
    """A plan that is compared: the masked model, run once on each example, with one or several compact models."""

    model: nn.Module
    kept: KeptIndices
    channel_map: ChannelMap
    keep: Keep
    examples: list[tuple[Any, ...]]
    references: dict[TracedRun, Reference] = field(default_factory=dict)

    def compare(self, compact: nn.Module, *, copies: bool = False) -> Outcome:
        """Compare on every example in eval mode, and in train mode if that differs.

        Without float64 copies of the models it takes less memory, but weights that another module than their owner
        uses may make a difference.
        """
        worst = 0.0
        for run in self.channel_map.traced.trace.runs:
            if run.repeats:
                continue
            difference, divergence = self._with_copies(compact, run) if copies else self._without_copies(compact, run)
            worst = max(worst, difference)
            if divergence is not None:
                return worst, (divergence, run)
        return worst, None

    def _without_copies(self, compact: nn.Module, run: TracedRun) -> tuple[float, Divergence | None]:
        """Compare in float64 without copies, if that is possible."""
        example = float64_inputs(self.examples[run.example])
        try:
            if run not in self.references:
                convert = with_zeros(to_double, self.kept)
                whole = self.channel_map.norms
                with Float64WhileRunning(self.model, convert, whole=whole, borrowed=run.borrowed) as masked:
                    self.references[run] = record_reference(
                        masked.model, self.channel_map, self.keep, example, run, AS_DOUBLE[0]
                    )
            with Float64WhileRunning(compact, to_double, borrowed=run.borrowed) as small:
                return compare(self.references[run], small.model, example, run)
        except ModelError:  # a module uses another's weights
            return self._with_copies(compact, run)

    def _with_copies(self, compact: nn.Module, run: TracedRun) -> tuple[float, Divergence | None]:
        """Compare in float64 with copies; if the model runs in no kind of float64, in its own precision."""
        for way in RUN_PRECISIONS:
            example = way.inputs(self.examples[run.example])
            masked = float64_copy(self.model, with_zeros(way.convert, self.kept))
            try:
                reference = record_reference(masked, self.channel_map, self.keep, example, run, way.precision)
            except ModelError:  # the model's code asks for another precision
                if way is RUN_PRECISIONS[-1]:
                    raise
                continue
            return compare(reference, float64_copy(compact, way.convert), example, run, way.tolerance)
        raise AssertionError("there is a last way")

    def lock_for(self, divergence: Divergence, run: TracedRun, *, there: bool = False) -> LockRecord | None:
        """Return a lock of all labels at the operator that differs, or at all operators of a module that failed.

        If positions in heads are pruned there, they alone are locked at first. If nothing is pruned there, the lock is
        at the last operator before or at the first of the module's parts, unless `there` is set. None without any.
        A module that fails before it computes anything, as by an assertion on its input, may have no operators at all.
        """
        operators = operators_by_key(run)
        culprit = operators.get(divergence.key) if divergence.operator else None
        if culprit is not None:
            before = run.operators[: run.operators.index(culprit) + 1]
            candidates = [[operator] for operator in reversed(before[-1:] if there else before)]
        else:
            inside = [operator for operator in run.operators if operator.module == divergence.module]
            parts = [[operator] for operator in within(divergence.module, run)]
            failed = [o for o in run.operators[divergence.after :][:1] if o.name == divergence.failed]
            earlier = [[operator] for operator in reversed(run.operators[: divergence.after])]
            candidates = [failed, inside, *parts, *([] if there else [run.operators[-1:], *earlier])]
        for labels in (*self._of_tensors(divergence), *map(_labels_at, candidates)):
            final = self.channel_map.traced.final[labels]
            if not self.keep[final].all():
                reason = (
                    f"the trial found a difference: {divergence.detail}{divergence.line and f' at {divergence.line}'}"
                )
                if divergence.operator in MADE:
                    reason += f"; {MAKE_IT}"
                positions = self._loses_positions(final)  # without these, whole heads may be pruned
                call = None if culprit is None else culprit.module_call
                return LockRecord(
                    reason, divergence.module, divergence.operator, labels, positions=positions, call=call
                )
        return None

    def _of_tensors(self, divergence: Divergence) -> list[Labels]:
        """Return the labels of the tensors of a module that failed in a method that another module called."""
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
    """Return locks for modules whose class a compact model exchanges, and for others of the same class."""
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
            reason = f"{cls.__name__} cannot express the sizes that would be left; {KEEPS_CLASS}"
            records.append(LockRecord(reason, path, "", np.concatenate(labels)))
    return records


def _same_when_whole(model: nn.Module, channel_map: ChannelMap, examples: list[tuple[Any, ...]]) -> bool:
    """Return whether a model with stated sizes and orders, and with all its channels, computes the same."""
    keep = np.ones(channel_map.n_labels, dtype=bool)
    compact = narrowed(model, channel_map, keep, {})
    return _PlanOnTrial(model, {}, channel_map, keep, examples).compare(compact)[1] is None


def _alike(model: nn.Module, divergence: Divergence, run: TracedRun) -> list[Divergence]:
    """Return the same place in all other modules of a class of the model's own, where they will fail as well."""
    cls = type(model.get_submodule(divergence.module))
    if cls.__module__.partition(".")[0] == "torch":  # a linear layer fails for reasons of the code around it
        return []
    places = (
        operators_by_key(run).keys()
        if divergence.operator
        else {(o.module, *divergence.key[1:]) for o in run.operators}
    )
    others = [path for path, module in model.named_modules() if type(module) is cls and path != divergence.module]
    keys = [(path, *divergence.key[1:]) for path in others if (path, *divergence.key[1:]) in places]
    return [replace(divergence, module=key[0], key=key) for key in keys]


def _labels_at(operators: list[TracedOperator]) -> Labels:
    fields = [labeled for operator in operators for labeled in fields_at(operator)]
    return np.concatenate([np.zeros(0, dtype=np.int64), *(field.labels.reshape(-1) for field in fields)])
