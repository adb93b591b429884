"""The trial of a plan: masked and compact model run side by side, and what differs is locked until nothing differs.

Labels say which channels belong together as far as they can be followed from operator to operator. What a model's own
Python makes of a width they cannot follow: `x.view(B, 12, 64)`, `scores / math.sqrt(x.shape[-1])`, `if width == 64`.
So no plan is trusted before it was tried, operator by operator:

    example ──┬── masked model: all sizes, zeros where the plan prunes ─── result 1 ── result 2 ── result 3 ── ...
              │                                                               │           │           │
              │                              the kept entries of each are compared:      same        same    differs
              │                                                               │           │           │
              └── compact model: narrow tensors ────────────────────────── result 1 ── result 2 ── result 3

    no operator differs                  the plan has passed
    operator i differs, or Python fails  `TACTICS` are tried in order; the first that has an answer changes the channel
                                         map, or accepts the plan; a changed map gets a new plan, in the next turn

Operator i agrees if max |compact_i - masked_i[kept]| <= 1e-9 max |masked_i[kept]| in float64, where a wrong label makes
differences of about 1 and rounding makes some 1e-15.

1. Only the first difference counts: those behind it may follow from it.
2. A turn changes the map, never the plan: `choose` makes a new plan for each map.
3. A turn that accepts nothing leaves fewer free labels, finer classes of labels, more known sizes or more branches that
   stay (`_known`). All four are bounded, so the trial ends.
4. What costs nothing is tried before what locks channels, and locks at one operator before locks of a whole module.
5. The compact model that is returned is the one that was compared last; it is run once more in its own precision, whose
   kernels may refuse strides that those of float64 take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from prunekit.channels import map_builder
from prunekit.channels.cut.slicing import kept_indices, masked_indices, narrowed
from prunekit.channels.labels.branch import Branch, BranchLock, is_inside
from prunekit.channels.rewrite.source_rewriter import attribute_values, set_attributes
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.channels.tracing.traced_run import Examples
from prunekit.channels.tracing.tracer import Trace
from prunekit.channels.trial import locks as locking
from prunekit.channels.trial.comparison import Comparison, Divergence, Failure, Outcome
from prunekit.channels.trial.size_search import BatchAxes, ScaleSearch, SizeSearch
from prunekit.channels.trial.untraced_methods import untraced_sizes
from prunekit.errors import PlanError

MORE_EXAMPLES = "; no example runs this module, whose inputs may be pruned: give one that does as more_examples"
Choice = Callable[[ChannelMap], Keep]
"""Makes the plan for a channel map."""
AGAIN = 4
"""How often the Python of modules of one class may fail before all of their channels are locked."""


@dataclass(frozen=True, eq=False)
class TrialResult:
    """The plan that passed its trial."""

    channel_map: ChannelMap  # the map, with the locks that were needed
    keep: Keep  # the plan made for it, bool (n_labels,)
    compact: nn.Module  # the compact model
    difference: float  # the largest relative difference of any operator between masked and compact model (float64)


def run_trial(
    model: nn.Module, channel_map: ChannelMap, choose: Choice, examples: Examples, *, plain: bool = False
) -> TrialResult:
    """Plan, compare, lock what differs, and plan again until masked and compact model agree everywhere.

    `plain` keeps the classes of all modules: channels that would need explicit sizes in a class's Python, or another
    class, are locked.
    """
    trial = _Trial(model, choose, examples, plain, channel_map.traced.trace)
    while True:
        settled = (_with_blocks if channel_map.blocks else _settled)(trial, channel_map)
        channel_map, keep = settled.channel_map, settled.keep
        failure = _comparison(model, channel_map, keep, examples).failure_as_it_is(settled.compact)
        if failure is None:
            return settled
        locks = locking.LockSearch(model, channel_map, keep).before_failure(*failure)
        if not locks:
            raise PlanError(f"the compact model fails where no channel is pruned: {failure[0]}")
        channel_map = map_builder.with_extra(channel_map, locks)


def _with_blocks(trial: _Trial, channel_map: ChannelMap) -> TrialResult:
    """Return a plan that passed its trial with all positions of blocks, and then without those that it removes."""
    while channel_map.blocks:
        # a block that loses some runs narrow in the masked model too, so the first trial alone compares what is inside
        whole = _settled(replace(trial, choose=partial(_with_positions, trial.choose)), channel_map)
        settled = _settled(trial, whole.channel_map)
        if _known(settled.channel_map) == _known(whole.channel_map):
            return replace(settled, difference=max(whole.difference, settled.difference))
        channel_map = settled.channel_map
    return _settled(trial, channel_map)


def _settled(trial: _Trial, channel_map: ChannelMap) -> TrialResult:
    """Take turns until a plan passes; failures are counted anew."""
    trial = replace(trial)
    if trial.plain:
        channel_map = map_builder.without_expressions(channel_map)
    before: tuple[int, ...] = ()
    while (known := _known(channel_map)) != before:
        before = known
        if channel_map.traced.stated and not _same_when_whole(trial.model, channel_map, trial.examples):
            channel_map = map_builder.with_all_constraints(channel_map)
        turn = _Turn(trial, channel_map)
        answers = (tactic.act(turn) for tactic in TACTICS if tactic.applies(turn))
        answer = next(one for one in answers if one is not None)  # the last tactic locks or raises
        del turn, answers  # with its models and their results, before the next turn makes its own
        if isinstance(answer, TrialResult):
            return answer
        channel_map = answer
    raise PlanError(
        f"no plan passed its trial, and further locks change nothing; the last to differ was {trial.last_locked}"
    )


def _known(channel_map: ChannelMap) -> tuple[int, ...]:
    """Return counts that every trial changes in one direction: free labels, their classes, sizes, and branches."""
    source = channel_map.traced
    free = int(np.count_nonzero(source.final))
    return free, channel_map.n_labels, len(channel_map.sizes), len(source.branches_stay)


@dataclass(eq=False)
class _Trial:
    """State that all turns of a trial share."""

    model: nn.Module  # the dense model; never changed
    choose: Choice
    examples: Examples
    plain: bool  # whether all modules keep their classes
    trace: Trace  # of the model
    # (class, operator, call) -> paths of the modules that differed or failed there, in all turns so far
    failed: dict[tuple[Any, ...], list[str]] = field(default_factory=lambda: defaultdict(list), init=False)
    last_locked: Divergence | None = field(default=None, init=False)  # the last that nothing but locks explained

    @cached_property
    def batches(self) -> BatchAxes:
        """The axes that grow with the batch."""
        return BatchAxes(self.model, self.trace, self.examples)


Answer = TrialResult | ChannelMap
"""The plan that passed, or the map that the next turn plans with."""


class _Turn:
    """One plan on trial. Tactics read it one after the other, and may replace the plan that the later ones read."""

    def __init__(self, trial: _Trial, channel_map: ChannelMap) -> None:
        self.trial, self.channel_map = trial, channel_map
        self.keep = channel_map.completed(trial.choose(channel_map))
        self.gone = channel_map.branches.gone(self.keep)  # branches that the plan, as it was chosen, removes
        self.parted: Divergence | None = None  # where the models differed without these; None unless they are back
        self.sizes_withheld = False  # whether sizes would have helped that only another class of a module can have

    @cached_property
    def compact(self) -> nn.Module:
        """The compact model of the plan."""
        return narrowed(self.trial.model, self.channel_map, self.keep, kept_indices(self.channel_map, self.keep))

    @cached_property
    def comparison(self) -> Comparison:
        """The masked model, to be compared with."""
        return _comparison(self.trial.model, self.channel_map, self.keep, self.trial.examples)

    @cached_property
    def outcome(self) -> Outcome:
        """The largest difference between the two, and where they part."""
        return self.comparison.compare(self.compact)

    @property
    def failure(self) -> Failure:
        """The place where the two models part, once it is known that they do."""
        _, failure = self.outcome
        assert failure is not None
        return failure

    def put_branches_back(self) -> None:
        """Go on with the plan that has all branches; the models of the other one are dropped."""
        self.parted = self.failure[0]
        for made in ("compact", "comparison", "outcome"):
            vars(self).pop(made)
        keep = self.keep.copy()
        for branch in self.gone:
            keep[branch.labels] = True
        self.keep = self.channel_map.completed(keep)

    def accepted(self, difference: float | None = None) -> Answer:
        """Return the plan as passed; where it has branches back, the map in which some of them stay.

        The difference is that of the outcome where no other is given.
        """
        if self.parted is not None:
            return map_builder.with_staying(self.channel_map, _staying(self.channel_map, self.gone, self.parted))
        return TrialResult(
            self.channel_map, self.keep, self.compact, self.outcome[0] if difference is None else difference
        )


class Tactic(NamedTuple):
    """One way to deal with a plan on trial; `act` returns None where it has no answer, and the next tactic is tried."""

    name: str
    applies: Callable[[_Turn], bool]
    act: Callable[[_Turn], Answer | None]


def _lock_uneven_widths(turn: _Turn) -> Answer | None:
    """Lock widths that are no multiple of what an operator takes: it would fail without naming the reason."""
    locks = locking.of_uneven_widths(turn.channel_map, turn.keep)
    return map_builder.with_extra(turn.channel_map, locks) if locks else None


def _lock_changed_classes(turn: _Turn) -> Answer | None:
    """Lock modules that only another class could replace, which is not wanted where classes are to stay plain."""
    locks = locking.of_other_classes(turn.trial.model, turn.compact, turn.channel_map)
    return map_builder.with_extra(turn.channel_map, locks) if locks else None


def _put_branches_back(turn: _Turn) -> Answer | None:
    """Ask whether the missing branches make the difference: if all agrees with them back, some have to stay."""
    # if not, later tactics look for the cause with them back, where the code around them runs as it is written
    turn.put_branches_back()
    return turn.accepted() if turn.outcome[1] is None else None


def _set_sizes(turn: _Turn) -> Answer | None:
    """Set sizes in the Python of the module that failed, found by trying: this costs no channels."""
    trial, channel_map = turn.trial, turn.channel_map
    attempt = partial(turn.comparison.compare, turn.compact)
    scales = ScaleSearch(trial.model, trial.examples)
    search = SizeSearch(trial.model, turn.compact, channel_map, turn.keep, trial.batches, scales, attempt, trial.plain)
    sizes = search.after(turn.failure)
    turn.sizes_withheld = search.withheld
    # a size that one expression states for several calls needs equal numbers of channels in all, as the next plan has
    if search.equal and _known(stricter := map_builder.with_extra(channel_map, search.equal)) != _known(channel_map):
        return stricter
    if not sizes:
        return None
    turn.channel_map = map_builder.with_sizes(channel_map, sizes)
    if search.difference is None or turn.parted is not None:
        return turn.channel_map
    # it passed with these sizes, so the plan need not be made again
    set_attributes(turn.compact, attribute_values(trial.model, turn.channel_map, turn.keep))
    return turn.accepted(search.difference)


def _compare_copies(turn: _Turn) -> Answer | None:
    """Compare whole copies in float64, which take more memory."""
    # a weight that another module than its owner uses was compared in its own precision, and may differ by that
    turn.outcome = turn.comparison.compare(turn.compact, copies=True)
    return turn.accepted() if turn.outcome[1] is None else None


def _allow_another_path(turn: _Turn) -> Answer | None:
    """Accept modules of one class that compute the same in another way: only what is inside of them differs."""
    # torch's attention takes another path where all query heads share one key
    difference = turn.comparison.elsewhere(turn.failure[0], turn.compact)
    return None if difference is None else turn.accepted(difference)


def _lock(turn: _Turn) -> Answer:
    """Lock what the plan pruned where the models part; the second time in a class, in all of its modules."""
    trial, (divergence, run) = turn.trial, turn.failure
    kind = (type(trial.model.get_submodule(divergence.module)), *divergence.key[1:])
    known = trial.failed[kind]
    known.append(divergence.module)
    trial.last_locked = divergence
    again = not divergence.operator and len(known) > AGAIN
    search = locking.LockSearch(trial.model, turn.channel_map, turn.keep)
    lock = search.at(divergence, run, again=again)
    if lock is None:
        hint = "" if divergence.module in turn.channel_map.traced.trace.ran else MORE_EXAMPLES
        raise PlanError(f"the compact model fails where no channel is pruned: {divergence}{hint}")
    alike = locking.same_place_elsewhere(trial.model, divergence, run) if len(known) > 1 else []
    alike = [where for where in alike if divergence.operator or where.module not in known]
    others = [search.at(where, run, there=True, again=again) for where in alike]
    same = [other for other in others if other is not None and other.only == lock.only]
    why = f"; {locking.KEEPS_CLASS}" if turn.sizes_withheld else ""
    return map_builder.with_extra(turn.channel_map, [replace(one, reason=one.reason + why) for one in (lock, *same)])


TACTICS = (
    Tactic(
        "lock widths that are no multiple",
        lambda turn: bool(turn.channel_map.traced.trace.flow.multiples),
        _lock_uneven_widths,
    ),
    Tactic("lock modules that would change class", lambda turn: turn.trial.plain, _lock_changed_classes),
    Tactic("accept what agrees", lambda turn: turn.outcome[1] is None, _Turn.accepted),
    Tactic("put branches back", lambda turn: bool(turn.gone), _put_branches_back),
    Tactic("set sizes in Python", lambda turn: True, _set_sizes),
    Tactic("compare whole copies", lambda turn: True, _compare_copies),
    Tactic("allow another path inside a class", lambda turn: True, _allow_another_path),
    Tactic("lock what was pruned where they part", lambda turn: True, _lock),
)
"""Tried in this order in every turn; from the fourth on, the models are known to part."""


def _comparison(model: nn.Module, channel_map: ChannelMap, keep: Keep, examples: Examples) -> Comparison:
    return Comparison(model, masked_indices(channel_map, keep), channel_map, keep, examples)


def _with_positions(choose: Choice, channel_map: ChannelMap) -> Keep:
    """Return a plan with all positions of blocks, which run as they are then."""
    keep = choose(channel_map).copy()
    for block in channel_map.blocks.values():
        keep[block.positions] = True
    return channel_map.completed(keep)


def _staying(channel_map: ChannelMap, gone: tuple[Branch, ...], divergence: Divergence) -> list[BranchLock]:
    """Return locks of branches that are gone where models differ, or else anywhere: one, then twice as many."""
    where = divergence.module
    around = [branch for branch in gone if is_inside(where, [branch.name]) or is_inside(branch.name, [where])]
    # a later layer may read the state of an earlier one that is gone
    found = (around if where and around else gone)[: len(channel_map.traced.branches_stay) + 1]
    return [BranchLock(branch.name, f"without it the models differ: {divergence.detail}") for branch in found]


def _same_when_whole(model: nn.Module, channel_map: ChannelMap, examples: Examples) -> bool:
    """Return whether a model with stated sizes and orders, and with all its channels, computes the same."""
    keep = np.ones(channel_map.n_labels, dtype=bool)
    return Comparison(model, {}, channel_map, keep, examples).compare(narrowed(model, channel_map, keep, {}))[1] is None


def with_untraced_sizes(
    model: nn.Module, settled: TrialResult, examples: Examples
) -> tuple[TrialResult, tuple[str, ...]]:
    """Return the result of a trial with sizes that only methods read which no example runs, and notes on them.

    They are set if the trial passes with them too.
    """
    chart, keep = settled.channel_map, settled.keep
    kept = kept_indices(chart, keep)
    found = untraced_sizes(model, settled.compact, chart, keep, kept, examples)
    if not found.sizes:
        return settled, found.notes
    chart = map_builder.with_sizes(chart, found.sizes)
    compact = narrowed(model, chart, keep, kept)
    difference, failure = _comparison(model, chart, keep, examples).compare(compact)
    if failure is None:
        return TrialResult(chart, keep, compact, max(difference, settled.difference)), found.notes
    names = ", ".join(sorted({f"{size.module}.{size.name}" for size in found.sizes}))
    return settled, (*found.notes, f"{names}: forward and methods that no example runs need different sizes here")
