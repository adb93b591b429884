"""The trial of a plan: what differs is locked, and the plan is made again until masked and compact model agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from prunekit.channels.cut.slicing import KeptIndices, kept_indices, masked_indices, narrowed
from prunekit.channels.labels import Labels
from prunekit.channels.labels.branch import Branch, BranchLock, is_inside
from prunekit.channels.labels.constraints import LockRecord, Removal
from prunekit.channels.rewrite.source_rewriter import attribute_values, set_attributes
from prunekit.channels.rules.pointwise import MADE
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.channels.tracing.traced_run import TracedOperator, TracedRun
from prunekit.channels.trial.comparison import (
    Divergence,
    Reference,
    compare,
    failure_of,
    number_of,
    operators_by_key,
    record_reference,
)
from prunekit.channels.trial.float64 import (
    AS_DOUBLE,
    RUN_PRECISIONS,
    Float64WhileRunning,
    as_it_is,
    float64_copy,
    float64_inputs,
    to_double,
    with_zeros,
)
from prunekit.channels.trial.map_builder import (
    with_all_constraints,
    with_extra,
    with_sizes,
    with_staying,
    without_expressions,
)
from prunekit.channels.trial.size_search import BatchAxes, Failure, Outcome, ScaleSearch, SizeSearch, fields_at, within
from prunekit.channels.trial.tolerance import NOT_FINITE
from prunekit.channels.trial.untraced_methods import untraced_sizes
from prunekit.errors import ModelError, PlanError

MORE_EXAMPLES = "; no example runs this module, whose inputs may be pruned: give one that does as more_examples"
MAKE_IT = "make it in a method of a module, with its sizes as the arguments, where they can be set"
DIVIDES = (
    "what it is computed from is divided by zero where a channel is removed: add an eps to the divisor, or prune "
    "before such a factor is put on, or after it is merged into the weight"
)
SCALING = frozenset({"aten.mul", "aten.div"})
AGAIN = 4
"""How often the Python of modules of one class may fail before all of their channels are locked."""
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
        plain: whether all modules keep their classes: channels that would need explicit sizes in a class's Python, or
            another class, are locked.
    """
    while True:
        settled = _with_blocks(model, channel_map, choose, examples, plain)
        channel_map, keep = settled.channel_map, settled.keep
        trial = _PlanOnTrial(model, masked_indices(channel_map, keep), channel_map, keep, examples)
        failure = trial.failure_as_it_is(settled.compact)
        if failure is None:
            return settled
        locks = trial.locks_before(*failure)
        if not locks:
            raise PlanError(f"the compact model fails where no channel is pruned: {failure[0]}")
        channel_map = with_extra(channel_map, locks)


def _with_blocks(
    model: nn.Module,
    channel_map: ChannelMap,
    choose: Callable[[ChannelMap], Keep],
    examples: list[tuple[Any, ...]],
    plain: bool,
) -> TrialResult:
    """Return a plan that passed its trial with all positions of blocks, and then without those that it removes.

    A block that loses some runs narrow in the masked model too, so that the first trial alone compares what is inside.
    """
    while channel_map.blocks:
        whole = _settled(model, channel_map, partial(_with_positions, choose), examples, plain)
        settled = _settled(model, whole.channel_map, choose, examples, plain)
        if _known(settled.channel_map) == _known(whole.channel_map):
            return replace(settled, difference=max(whole.difference, settled.difference))
        channel_map = settled.channel_map
    return _settled(model, channel_map, choose, examples, plain)


def _settled(
    model: nn.Module,
    channel_map: ChannelMap,
    choose: Callable[[ChannelMap], Keep],
    examples: list[tuple[Any, ...]],
    plain: bool,
) -> TrialResult:
    divergence: Divergence | None = None
    failed = defaultdict[tuple[Any, ...], list[str]](list)
    batches = BatchAxes(model, channel_map.traced.trace, examples)
    scales = ScaleSearch(model, examples)
    if plain:
        channel_map = without_expressions(channel_map)
    before: tuple[int, ...] = ()
    while (known := _known(channel_map)) != before:
        before = known
        if channel_map.traced.stated and not _same_when_whole(model, channel_map, examples):
            channel_map = with_all_constraints(channel_map)
        turn = _turn(model, channel_map, choose, examples, plain, batches, scales, failed)
        if isinstance(turn, TrialResult):
            return turn
        channel_map, divergence = turn.channel_map, turn.divergence or divergence
    raise PlanError(f"no plan passed its trial, and further locks change nothing; the last to differ was {divergence}")


class _Turn(NamedTuple):
    """The map for the next turn of a trial, and what differed in this one, if nothing explained it."""

    channel_map: ChannelMap
    divergence: Divergence | None = None


def _turn(
    model: nn.Module,
    channel_map: ChannelMap,
    choose: Callable[[ChannelMap], Keep],
    examples: list[tuple[Any, ...]],
    plain: bool,
    batches: BatchAxes,
    scales: ScaleSearch,
    failed: dict[tuple[Any, ...], list[str]],
) -> TrialResult | _Turn:
    """Plan and compare once. The compact model and all results are dropped before the next turn makes its own."""
    keep = channel_map.completed(choose(channel_map))
    if broken := _not_in_steps(channel_map, keep):
        return _Turn(with_extra(channel_map, broken))
    kept = kept_indices(channel_map, keep)
    compact = narrowed(model, channel_map, keep, kept)
    if plain and (locks := _of_other_classes(model, compact, channel_map)):
        return _Turn(with_extra(channel_map, locks))
    trial = _PlanOnTrial(model, masked_indices(channel_map, keep), channel_map, keep, examples)
    difference, found = trial.compare(compact)
    if found is None:
        return TrialResult(channel_map, keep, compact, difference)
    gone = channel_map.branches.gone(keep)
    if gone:  # is it they that differ, or something else with them?
        keep = channel_map.completed(_with_branches(keep, gone))
        compact = narrowed(model, channel_map, keep, kept_indices(channel_map, keep))
        trial = _PlanOnTrial(model, masked_indices(channel_map, keep), channel_map, keep, examples)
        parted = found[0]
        difference, found = trial.compare(compact)
        if found is None:
            return _Turn(with_staying(channel_map, _staying(channel_map, gone, parted)))
    search = SizeSearch(model, compact, channel_map, keep, batches, scales, partial(trial.compare, compact), plain)
    sizes = search.after(found)
    if search.equal and _known(stricter := with_extra(channel_map, search.equal)) != _known(channel_map):
        return _Turn(stricter)
    channel_map = with_sizes(channel_map, sizes)
    if search.difference is not None and not gone:
        set_attributes(compact, attribute_values(model, channel_map, keep))
        return TrialResult(channel_map, keep, compact, search.difference)
    if sizes:
        return _Turn(channel_map)
    difference, found = trial.compare(compact, copies=True)
    if found is None and gone:
        return _Turn(with_staying(channel_map, _staying(channel_map, gone, parted)))
    if found is None:
        return TrialResult(channel_map, keep, compact, difference)
    divergence, run = found
    elsewhere = trial.elsewhere(divergence, compact)
    if elsewhere is not None and gone:
        return _Turn(with_staying(channel_map, _staying(channel_map, gone, parted)))
    if elsewhere is not None:
        return TrialResult(channel_map, keep, compact, elsewhere)
    kind = (type(model.get_submodule(divergence.module)), *divergence.key[1:])
    failed[kind].append(divergence.module)
    alike = _alike(model, divergence, run) if len(failed[kind]) > 1 else []
    alike = [where for where in alike if divergence.operator or where.module not in failed[kind]]
    again = not divergence.operator and len(failed[kind]) > AGAIN
    lock = trial.lock_for(divergence, run, again=again)
    if lock is None:
        hint = "" if divergence.module in channel_map.traced.trace.ran else MORE_EXAMPLES
        raise PlanError(f"the compact model fails where no channel is pruned: {divergence}{hint}")
    others = [trial.lock_for(where, run, there=True, again=again) for where in alike]
    same = [other for other in others if other is not None and other.only == lock.only]
    why = f"; {KEEPS_CLASS}" if search.withheld else ""
    locks = [replace(one, reason=one.reason + why) for one in (lock, *same)]
    return _Turn(with_extra(channel_map, locks), divergence)


def _with_positions(choose: Callable[[ChannelMap], Keep], channel_map: ChannelMap) -> Keep:
    """Return a plan with all positions of blocks, which run as they are then."""
    keep = choose(channel_map).copy()
    for block in channel_map.blocks.values():
        keep[block.positions] = True
    return channel_map.completed(keep)


def _known(channel_map: ChannelMap) -> tuple[int, ...]:
    """Return counts that every trial changes in one direction: free labels, their classes, sizes, and branches."""
    source = channel_map.traced
    free = int(np.count_nonzero(source.final))
    return free, channel_map.n_labels, len(channel_map.sizes), len(source.branches_stay)


def _with_branches(keep: Keep, gone: tuple[Branch, ...]) -> Keep:
    """Return a plan with all channels of some branches."""
    keep = keep.copy()
    for branch in gone:
        keep[branch.labels] = True
    return keep


def _staying(channel_map: ChannelMap, gone: tuple[Branch, ...], divergence: Divergence) -> list[BranchLock]:
    """Return locks of branches that are gone where models differ, or else anywhere: one, and twice as many each time.

    A later layer may differ because an earlier one is gone, whose state it reads.
    """
    where = divergence.module
    around = [branch for branch in gone if is_inside(where, [branch.name]) or is_inside(branch.name, [where])]
    found = (around if where and around else gone)[: len(channel_map.traced.branches_stay) + 1]
    return [BranchLock(branch.name, f"without it the models differ: {divergence.detail}") for branch in found]


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
    skipping: frozenset[str] = frozenset()

    def elsewhere(self, divergence: Divergence, compact: nn.Module) -> float | None:
        """Return the largest difference outside of the modules that compute in another way; None if others differ too.

        A function may take another path at another width, as torch's attention does where all query heads share one
        key. What modules of the class return is still compared: it is what others read.
        """
        if not divergence.operator or isfinite(divergence.difference) or not divergence.module:
            return None
        cls = type(self.model.get_submodule(divergence.module))
        alike = frozenset(path for path, module in self.model.named_modules() if type(module) is cls)
        difference, found = replace(self, skipping=alike).compare(compact)
        return difference if found is None else None

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

    def failure_as_it_is(self, compact: nn.Module) -> Failure | None:
        """Return where the compact model raises in its own precision and the dense one does not.

        Kernels of narrower floats need strides that those of float64 do not, or that a conversion to it repairs.
        """
        run = self.channel_map.traced.trace.runs[0]
        example = float64_inputs(run.inputs(self.examples), None)
        with Float64WhileRunning(compact, as_it_is, borrowed=run.borrowed) as small:
            found = failure_of(small.model, example, run)
        if found is None:
            return None
        with Float64WhileRunning(self.model, as_it_is, borrowed=run.borrowed) as dense:
            return (found, run) if failure_of(dense.model, example, run) is None else None

    def _without_copies(self, compact: nn.Module, run: TracedRun) -> tuple[float, Divergence | None]:
        """Compare in float64 without copies, if that is possible."""
        example = float64_inputs(run.inputs(self.examples))
        try:
            if run not in self.references:
                convert = with_zeros(to_double, self.kept)
                whole = self.channel_map.narrow(self.keep)
                with Float64WhileRunning(self.model, convert, whole=whole, borrowed=run.borrowed) as masked:
                    self.references[run] = record_reference(
                        masked.model, self.channel_map, self.keep, example, run, AS_DOUBLE[0]
                    )
            with Float64WhileRunning(compact, to_double, borrowed=run.borrowed) as small:
                return compare(self.references[run], small.model, example, run, skipping=self.skipping)
        except ModelError:  # a module uses another's weights
            return self._with_copies(compact, run)

    def _with_copies(self, compact: nn.Module, run: TracedRun) -> tuple[float, Divergence | None]:
        """Compare in float64 with copies; if the model runs in no kind of float64, in its own precision."""
        for way in RUN_PRECISIONS:
            example = way.inputs(run.inputs(self.examples))
            masked = float64_copy(self.model, with_zeros(way.convert, self.kept))
            try:
                reference = record_reference(masked, self.channel_map, self.keep, example, run, way.precision)
            except ModelError:  # the model's code asks for another precision
                if way is RUN_PRECISIONS[-1]:
                    raise
                continue
            small = float64_copy(compact, way.convert)
            return compare(reference, small, example, run, way.tolerance, skipping=self.skipping)
        raise AssertionError("there is a last way")

    def lock_for(
        self, divergence: Divergence, run: TracedRun, *, there: bool = False, again: bool = False
    ) -> LockRecord | None:
        """Return a lock of all labels at the operator that differs, or at the last before a module's Python failed.

        If query heads or positions in heads are pruned there, they alone are locked at first. If nothing is pruned
        there, the lock is at an operator before, of the same module if Python failed, unless `there` is set; else at
        all operators of the module, as also where it fails again and again. None if nothing is pruned anywhere. A
        module that fails before it computes anything, as by an assertion on its input, may have no operators at all.
        """
        operators = operators_by_key(run)
        culprit = operators.get(divergence.key) if divergence.operator else None
        if culprit is not None:
            before = run.operators[: run.operators.index(culprit) + 1]
            summed = [] if again or not isfinite(divergence.difference) else self._summed_before(culprit, run)
            candidates = [summed, *([operator] for operator in reversed(before[-1:] if there else before))]
        else:
            inside = [operator for operator in run.operators if operator.module == divergence.module]
            parts = [[operator] for operator in within(divergence.module, run)]
            failed = [o for o in run.operators[divergence.after :][:1] if o.name == divergence.failed]
            earlier = [[operator] for operator in reversed(run.operators[: divergence.after])]
            ran = {id(operator) for (operator,) in earlier}
            part = self._lost(self.channel_map.traced.final[_labels_at(inside)])
            near = [] if again or part else [one for one in reversed(parts) if id(one[0]) in ran]
            candidates = [failed, *near, inside, *parts, *([] if there else [run.operators[-1:], *earlier])]
        for labels in (*self._of_tensors(divergence), *map(_labels_at, candidates)):
            final = self.channel_map.traced.final[labels]
            if not self.keep[final].all():
                reason = (
                    f"the trial found a difference: {divergence.detail}{divergence.line and f' at {divergence.line}'}"
                )
                if divergence.operator in MADE:
                    reason += f"; {MAKE_IT}"
                if NOT_FINITE in divergence.detail:
                    reason += f"; {DIVIDES}"
                part = self._lost(final)  # without these, whole heads may be pruned
                call = None if culprit is None else culprit.module_call
                return LockRecord(reason, divergence.module, divergence.operator, labels, only=part, call=call)
        return None

    def _summed_before(self, culprit: TracedOperator, run: TracedRun) -> list[TracedOperator]:
        """Return the operator whose sums over positions in heads a number multiplies; none of other operators.

        The number may be made of the width of a head, as attention's scale is, in a function that cannot be rewritten:
        whole heads may go then.
        """
        operator = culprit if culprit.name.removesuffix("_") in SCALING else None
        lost = None
        while operator is not None and lost is None:
            lost = self._lost(self.channel_map.traced.final[_labels_at([operator])])
            made_by = [number for number in operator.reads if number >= 0]
            found, operator = operator, run.operators[made_by[0]] if len(made_by) == 1 else None
        return [found] if lost == Removal.POSITIONS and found is not culprit else []

    def locks_before(self, divergence: Divergence, run: TracedRun) -> list[LockRecord]:
        """Return locks at the last operator that a failed one reads from and that prunes, in all modules of a class."""
        feeding = _feeding(run, number_of(run, divergence.started))
        last = next((operator for operator in feeding if self._prunes(_labels_at([operator]))), None)
        if last is None:
            return []
        reason = f"{divergence.detail}{divergence.line and f' at {divergence.line}'}"
        classes = {path: type(module) for path, module in self.model.named_modules()}
        by_module: dict[str, list[TracedOperator]] = {}
        for operator in run.operators:
            by_module.setdefault(operator.module, []).append(operator)
        index = by_module[last.module].index(last)
        alike = [
            own[index] for path, own in by_module.items() if classes[path] is classes[last.module] and index < len(own)
        ]
        locked = [last] if classes[last.module].__module__.startswith("torch.") else alike
        return [
            LockRecord(f"the compact model fails: {reason}", operator.module, operator.name, _labels_at([operator]))
            for operator in locked
            if operator.name == last.name
        ]

    def _prunes(self, labels: Labels) -> bool:
        return not self.keep[self.channel_map.traced.final[labels]].all()

    def _of_tensors(self, divergence: Divergence) -> list[Labels]:
        """Return the labels of the tensors of a module that failed in a method that another module called."""
        if divergence.owner in ("", divergence.module):
            return []
        traced = self.channel_map.traced.trace.labels.items()
        own = [axes for name, axes in traced if name.rpartition(".")[0] == divergence.owner]
        labels = [axis for axes in own for axis in axes if axis is not None]
        return [np.concatenate(labels)] if labels else []

    def _lost(self, final: Labels) -> Removal | None:
        """Return the last kind of channels in heads that a plan removes; None if it removes none, or whole heads."""
        _, *inside = self.channel_map.choices
        lost = [kind for kind, choice in enumerate(inside, 1) if not self.keep[choice[final]].all()]
        return Removal(lost[-1]) if lost else None


def _not_in_steps(channel_map: ChannelMap, keep: Keep) -> list[LockRecord]:
    """Return locks for widths of which a plan leaves no multiple of what an operator needs."""
    return [
        LockRecord(f"an operator takes these channels only in multiples of {one.number}", "", "", one.labels)
        for one in channel_map.traced.trace.flow.multiples
        if np.count_nonzero(keep[channel_map.traced.final[one.labels]]) % one.number
    ]


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
    found = [replace(divergence, module=key[0], key=key) for key in keys]
    return found if divergence.operator else [replace(one, after=_as_far(divergence, one.module, run)) for one in found]


def _as_far(divergence: Divergence, path: str, run: TracedRun) -> int:
    """Return how many operators of a run come before the place in a module that another of its class had reached."""
    number = {id(operator): index for index, operator in enumerate(run.operators)}
    reached = sum(number[id(operator)] < divergence.after for operator in within(divergence.module, run))
    last = within(path, run)[:reached][-1:]
    return number[id(last[0])] + 1 if last else 0


def _feeding(run: TracedRun, number: int | None) -> Iterator[TracedOperator]:
    """Yield an operator of a run and those whose results it was computed from, the last first."""
    waiting = set() if number is None else {number}
    while waiting:
        number = max(waiting)
        waiting.remove(number)
        yield run.operators[number]
        waiting.update(one for one in run.operators[number].reads if one >= 0)


def _labels_at(operators: list[TracedOperator]) -> Labels:
    fields = [labeled for operator in operators for labeled in fields_at(operator)]
    return np.concatenate([np.zeros(0, dtype=np.int64), *(field.labels.reshape(-1) for field in fields)])
