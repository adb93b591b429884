"""Locks where a trial failed: which labels must stay so that the next plan does not fail there again.

Where an operator differs, some label that it reads or makes was removed wrongly: all labels at the operator that the
plan prunes are locked. Where a module's Python failed between two operators, there is no such operator, and the last
one before it with pruned labels is taken:

    operator 1 ── operator 2 ── operator 3 ── Python raises
                      │             └ nothing is pruned here: go on
                      └ the plan prunes labels here: lock these

1. A lock always holds a label that the plan removed: the next plan is another one.
2. Where only some heads, or positions in heads, were removed, these are locked first (`LockRecord.only`), so that whole
   heads may still go.
3. Modules of one class run the same Python. Once two of them failed at the same place, all are locked there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
from torch import nn

from prunekit.channels.float64 import NOT_FINITE
from prunekit.channels.labels.branch import is_inside
from prunekit.channels.labels.constraints import LockRecord, Removal
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.rules.rule import Trait
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.channels.tracing.traced_run import TracedOperator, TracedRun
from prunekit.channels.trial.comparison import Divergence, number_of, operators_by_key
from prunekit.channels.trial.size_search import by_module, fields_at, within

MAKE_IT = "make it in a method of a module, with its sizes as the arguments, where they can be set"
DIVIDES = (
    "what it is computed from is divided by zero where a channel is removed: add an eps to the divisor, or prune "
    "before such a factor is put on, or after it is merged into the weight"
)
KEEPS_CLASS = "plain_classes keeps its class as it is"


@dataclass(frozen=True, eq=False)
class LockSearch:
    """The search for labels to lock, under the plan that failed."""

    model: nn.Module
    channel_map: ChannelMap
    keep: Keep

    def at(
        self, divergence: Divergence, run: TracedRun, *, there: bool = False, again: bool = False
    ) -> LockRecord | None:
        """Return a lock of all labels at the operator that differs, or at the last before a module's Python failed.

        `there` means only that operator, or that module; else operators before it, of any module, are tried as well.
        `again`, where the place failed again and again, means all that the module computes, not one operator after
        another. None if nothing is pruned at any of these places.
        """
        operators = operators_by_key(run)
        culprit = operators.get(divergence.key) if divergence.operator else None
        if culprit is not None:
            places = self._up_to(culprit, divergence, run, there, again)
        else:
            places = self._before_python(divergence, run, there, again)
        for labels in (*self._of_tensors(divergence), *map(_labels_at, places)):
            final = self.channel_map.traced.final[labels]
            if not self.keep[final].all():
                reason = f"the trial found a difference: {_in_words(divergence)}"
                if divergence.operator in Trait.MAKES:
                    reason += f"; {MAKE_IT}"
                if NOT_FINITE in divergence.detail:
                    reason += f"; {DIVIDES}"
                part = self._lost(final)  # without these, whole heads may be pruned
                call = None if culprit is None else culprit.module_call
                return LockRecord(reason, divergence.module, divergence.operator, labels, only=part, call=call)
        return None

    def _up_to(
        self, culprit: TracedOperator, divergence: Divergence, run: TracedRun, there: bool, again: bool
    ) -> list[list[TracedOperator]]:
        """Return the operators at which to lock where one of them differs: it, and those before, the last first."""
        before = run.operators[: run.operators.index(culprit) + 1]
        summed = [] if again or not isfinite(divergence.difference) else self._summed_before(culprit, run)
        return [summed, *([operator] for operator in reversed(before[-1:] if there else before))]

    def _before_python(
        self, divergence: Divergence, run: TracedRun, there: bool, again: bool
    ) -> list[list[TracedOperator]]:
        """Return the operators at which to lock where a module's Python failed, in the order they are tried."""
        inside = [operator for operator in run.operators if operator.module == divergence.module]
        parts = [[operator] for operator in within(divergence.module, run)]
        failed = [o for o in run.operators[divergence.after :][:1] if o.name == divergence.failed]
        earlier = [[operator] for operator in reversed(run.operators[: divergence.after])]
        ran = {operator for (operator,) in earlier}
        # where positions in heads are gone, locking these in the whole module at once leaves whole heads free
        in_heads = self._lost(self.channel_map.traced.final[_labels_at(inside)])
        near = [] if again or in_heads else [one for one in reversed(parts) if one[0] in ran]
        # the one that failed in torch's code, the last in the module and its parts, all of its own, each of its parts',
        # those before: a module that fails at once, as by an assertion, may have none
        return [failed, *near, inside, *parts, *([] if there else [run.operators[-1:], *earlier])]

    def _summed_before(self, culprit: TracedOperator, run: TracedRun) -> list[TracedOperator]:
        """Return the operator that summed over positions in heads, if models part where a number multiplies it."""
        # attention's scale is made of the width of a head, perhaps in code that is not rewritten: heads may go whole
        operator = culprit if culprit.name in Trait.SCALES else None
        lost = None
        while operator is not None and lost is None:
            lost = self._lost(self.channel_map.traced.final[_labels_at([operator])])
            made_by = [number for number in operator.reads if number >= 0]
            found, operator = operator, run.operators[made_by[0]] if len(made_by) == 1 else None
        return [found] if lost == Removal.POSITIONS and found is not culprit else []

    def before_failure(self, divergence: Divergence, run: TracedRun) -> list[LockRecord]:
        """Return locks at the last operator that a failed one reads from and that prunes, in all modules of a class."""
        feeding = _feeding(run, number_of(run, divergence.started))
        final = self.channel_map.traced.final
        last = next((one for one in feeding if not self.keep[final[_labels_at([one])]].all()), None)
        if last is None:
            return []
        classes = {path: type(module) for path, module in self.model.named_modules()}
        cls, operators = classes[last.module], by_module(run)
        index = operators[last.module].index(last)
        alike = [own[index] for path, own in operators.items() if classes[path] is cls and index < len(own)]
        locked = [last] if cls.__module__.startswith("torch.") else [one for one in alike if one.name == last.name]
        reason = f"the compact model fails: {_in_words(divergence)}"
        return [LockRecord(reason, one.module, one.name, _labels_at([one])) for one in locked]

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


def of_uneven_widths(channel_map: ChannelMap, keep: Keep) -> list[LockRecord]:
    """Return locks for widths of which a plan leaves no multiple of what an operator needs."""
    return [
        LockRecord(f"an operator takes these channels only in multiples of {one.number}", "", "", one.labels)
        for one in channel_map.traced.trace.flow.multiples
        if np.count_nonzero(keep[channel_map.traced.final[one.labels]]) % one.number
    ]


def of_other_classes(model: nn.Module, compact: nn.Module, channel_map: ChannelMap) -> list[LockRecord]:
    """Return locks for modules whose class a compact model exchanges, and for others of the same class."""
    classes = {path: type(module) for path, module in model.named_modules()}
    changed = {classes[path] for path, module in compact.named_modules() if type(module) is not classes[path]}
    traced = channel_map.traced.trace.labels.items()
    records = []
    for path, cls in classes.items():
        inside = [axes for name, axes in traced if not path or is_inside(name, [path])]
        labels = [axis for axes in inside for axis in axes if axis is not None]
        if cls in changed and labels:
            reason = f"{cls.__name__} cannot express the sizes that would be left; {KEEPS_CLASS}"
            records.append(LockRecord(reason, path, "", np.concatenate(labels)))
    return records


def same_place_elsewhere(model: nn.Module, divergence: Divergence, run: TracedRun) -> list[Divergence]:
    """Return the same place in all other modules of a class of the model's own, where they will fail as well."""
    cls = type(model.get_submodule(divergence.module))
    if cls.__module__.partition(".")[0] == "torch":  # a linear layer fails for reasons of the code around it
        return []
    others = [path for path, module in model.named_modules() if type(module) is cls and path != divergence.module]
    keys = [(path, *divergence.key[1:]) for path in others]
    found = [replace(divergence, module=key[0], key=key) for key in keys]
    if divergence.operator:
        operators = operators_by_key(run)
        return [one for one in found if one.key in operators]
    ran = by_module(run)
    return [replace(one, after=_as_far(divergence, one.module, run)) for one in found if one.module in ran]


def _as_far(divergence: Divergence, path: str, run: TracedRun) -> int:
    """Return how far a run was when a module had run as many operators as the one of its class that failed."""
    number = {operator: index for index, operator in enumerate(run.operators)}
    reached = sum(number[operator] < divergence.after for operator in within(divergence.module, run))
    last = within(path, run)[:reached][-1:]
    return number[last[0]] + 1 if last else 0


def _in_words(divergence: Divergence) -> str:
    return f"{divergence.detail}{divergence.line and f' at {divergence.line}'}"


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
