"""The search for a plan: trace, score, plan, try it, measure it, and plan again.

Dry runs, `prunekit.prune`, `Pruner` and jobs all search with `PlanSearch`, whose methods stand in the order of their
use: `trace`, `require_reachable`, `find` (or `predict`), and `deliver`. For budgets of time
`prunekit.pruning.latency_budget_search.with_profile` makes a search that measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from torch import nn

from prunekit.channels.cut.model_match import require_model
from prunekit.channels.labels.branch import is_inside
from prunekit.channels.labels.constraints import NO_EQUAL_WIDTHS, EqualWidths, family_name
from prunekit.channels.map_builder import with_equal_widths
from prunekit.channels.trace import traced_map
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.channels.trial.comparison import shortened
from prunekit.channels.trial.trial import TrialResult, run_trial, with_untraced_sizes
from prunekit.criteria.criterion import CRITERIA
from prunekit.criteria.elimination import weighted_output_count
from prunekit.criteria.scoring import normalize, score
from prunekit.errors import PlanError, UsageError
from prunekit.hooks.wrappers import require_trainable, unwrapped
from prunekit.measure.model_size import count_memory
from prunekit.models.hugging_face import set_noted_config
from prunekit.modes.public_call import own_part
from prunekit.planning.candidates import WIDE, Scores
from prunekit.planning.plan import Plan
from prunekit.planning.sensitivity_curves import SensitivityCurve, cumulative_curves
from prunekit.planning.solver import feasible_plan, halved, make_plan
from prunekit.planning.stored_plan import LIBRARY_CONFIG
from prunekit.settings.pruning import PruneSettings, facts_of
from prunekit.utils.context import paused_garbage_collection, release_memory
from prunekit.utils.display import listed, plural, share
from prunekit.utils.files import json_values
from prunekit.utils.outputs import Outputs
from prunekit.utils.progress import Log, stage

if TYPE_CHECKING:
    from prunekit.pruning.latency.latency_target import Attempt, LatencyResult, LatencyTarget
    from prunekit.pruning.library_layout import LibraryModel
    from prunekit.repair.similar_layer_shares import ShareCheck
    from prunekit.statistics.channel_stats import ChannelStats
    from prunekit.statistics.gram_matrices import PatchStats
    from prunekit.statistics.taylor_terms import TaylorTerms

MEMORY = facts_of("memory_mb")
ATTEMPTS = 6
"""How many plans are made for a budget of memory, at most."""
NEAR = 0.005
"""Share of the budget of memory: a plan that leaves at most this much unused is not improved on."""
SMALL = 0.01
"""Share of the dense model below which an amount is noted: it may have been meant in another unit."""
LOCKED = 0.25
"""Share of the parameters that a layout locks, from which on it is noted what others pay for it."""
PAYS = 2.0
"""By how much more than the asked share these pay at least for that."""


@dataclass(frozen=True, eq=False)
class CriterionInputs:
    """Inputs of a criterion besides the weights; None for those that it does not need."""

    stats: ChannelStats | None = None  # channel statistics
    gradients: TaylorTerms | None = None  # Taylor terms
    patches: PatchStats | None = None  # Gram matrices of patches
    seed: int = 0  # of the random criterion
    check: ShareCheck | None = None  # of how like layers share a cut, for `elimination` of few samples


WEIGHTS_ALONE = CriterionInputs()


@dataclass(frozen=True, eq=False)
class PlanSearch:
    """The search for a plan that passes its trial and is within all budgets.

    `trace` makes one, `with_weights` returns a new one, and `find` returns the plan.
    """

    model: nn.Module  # the dense model; not changed
    # inputs, see `prunekit.utils.inputs.as_example`. Memory and time are measured on the first; the others run branches
    # of the model that the first does not.
    examples: tuple[tuple[Any, ...], ...]
    settings: PruneSettings  # criterion, scope, budgets and limits
    channel_map: ChannelMap  # of the model
    # predicts and measures the time of plans; None without a budget of time
    latency: LatencyTarget | None = field(default=None, init=False)
    log: Log = stage  # gets a line for each network of a profile and each plan that is timed
    log_plans: bool = False  # whether the log also gets a line for each plan that is made
    library: LibraryModel | None = None  # where a configuration of transformers has to say all widths

    @classmethod
    def trace(
        cls,
        model: nn.Module,
        example: tuple[Any, ...],
        settings: PruneSettings,
        *,
        more_examples: Sequence[tuple[Any, ...]] = (),
        channel_map: ChannelMap | None = None,
        outputs: Outputs | None = None,
        log: Log = stage,
        log_plans: bool = False,
    ) -> Self:
        """Begin a search: trace the model, unless its channel map is given.

        That was then traced on the same examples in the same order, with the same `outputs` read, see
        `prunekit.trace`. The other arguments become attributes.
        """
        model, examples = unwrapped(model), (example, *more_examples)
        require_trainable(model, "plan")
        if settings.budget.max_drop is not None:
            raise UsageError(
                "max_drop: a plan alone has no score that could fall; give it to prunekit.prune, `prunekit prune` or "
                "`prunekit finetune`, or give another budget, such as the macs that prunekit.frontier shows for it"
            )
        if channel_map is not None:
            require_model(channel_map, model, "the channel map")
        with paused_garbage_collection(), own_part():  # jobs may be called in other modes than torch's usual ones
            channel_map = channel_map or traced_map(model, list(examples), outputs)
        library = library_of(model, examples, settings)
        if library is not None:
            channel_map = library.with_layout(channel_map)
        traced = 1 + max(run.example for run in channel_map.traced.trace.runs)
        if traced > len(examples):
            raise UsageError(f"channel_map: traced on {traced} examples, got {len(examples)}; give the others too")
        return cls(model, examples, settings, channel_map, log=log, log_plans=log_plans, library=library)

    def with_weights(self, model: nn.Module) -> Self:
        """Return the search for the same network with other weights, as training changes no structure."""
        library = None if self.library is None else self.library.with_weights(model)
        return replace(self, model=model, library=library)

    def require_reachable(self) -> None:
        """Raise a `PlanError` if the budgets cannot be met, before anything is trained."""
        feasible_plan(self.channel_map, self.settings)

    def predict(self, inputs: CriterionInputs = WEIGHTS_ALONE) -> Planned:
        """Return a plan without measuring it: within budgets of time by prediction, or else the fastest one."""
        return self.find(inputs)

    def find(self, inputs: CriterionInputs = WEIGHTS_ALONE) -> Planned:
        """Return a plan within all budgets; budgets of time are met by measurement.

        The memory that a compact model takes is predicted exactly unless it runs other operators than the dense one:
        attention in its original class because all of its heads are kept, attention with one head, which needs no
        copies, or attention without a fused kernel because queries and values differ in width. Then the aim is
        corrected. A budget that cannot be met is a `PlanError`.
        """
        settings, channel_map = self.settings, self.channel_map
        if settings.schedule is not None and not settings.channels_stay and not settings.budget.measured:
            # plans of its steps may prune what the final one keeps; a measured one is within all of theirs
            some, examples = partial(halved, settings=settings), list(self.examples)
            channel_map = run_trial(self.model, channel_map, some, examples, plain=settings.plain_classes).channel_map
        if self.log_plans:
            by = "" if settings.criterion == "random" else f" by {settings.criterion}"  # a Pruner tries any plan
            self.log(f"plan{by}, and try it")
        asked = settings.budget.memory_mb
        if asked is None:
            return self.try_plan(settings, channel_map, inputs)
        aim, best, most = asked, None, 0.0
        low, high = 0.0, float("inf")  # aims whose plans were within the budget, and were not
        for _ in range(ATTEMPTS):
            try:
                aimed = replace(settings, budget=replace(settings.budget, memory_mb=aim))
                planned = self.try_plan(aimed, channel_map, inputs)
            except PlanError:
                if aim == asked:
                    raise
                break
            counted = self._megabytes(planned.compact)
            if most < counted <= asked:
                best, most = planned, counted
            binds = planned.plan.provenance["binding"] == "memory_mb"
            if counted <= asked and not (binds and counted < (1 - NEAR) * asked):
                break
            low, high = (max(low, aim), high) if counted <= asked else (low, min(high, aim))
            aim *= asked / counted * (1 - 1e-6)
            aim = aim if low < aim < high else (low + high) / 2
            channel_map = planned.plan.channel_map  # the trial's locks hold for the next attempt too
        if best is None:
            raise PlanError(
                f"budget memory_mb: at most {MEMORY.in_words(asked)} was asked for, but the narrowest plan that was "
                f"made for it takes {MEMORY.in_words(counted)}; raise the budget"
            )
        figures = {"asked": asked, "left": most, "dense": self._megabytes(self.model)}
        return self.as_asked(best, {"memory_mb": figures})

    def try_plan(self, settings: PruneSettings, channel_map: ChannelMap, inputs: CriterionInputs) -> Planned:
        """Score, plan, and try the plan until masked == compact: what differs is locked, and planned again.

        The settings have the budgets that are aimed at, and the map the locks that earlier trials added.
        """
        made, table = list[tuple[Plan, Scores]](), None if self.latency is None else self.latency.table
        library, layouts = self.library, list[EqualWidths]()
        grown = inputs if inputs.patches is not None and inputs.patches.parts else None
        if grown is not None and inputs.patches is not None:  # errors of the fit, unless held-out samples prefer others
            inputs = replace(inputs, patches=replace(inputs.patches, parts=()))

        def choose(chart: ChannelMap) -> Keep:
            stay = settings.channels_stay
            scores = np.zeros(chart.n_labels) if stay else importance(self.model, chart, settings, inputs)
            release_memory(self.model)
            planned = partial(make_plan, settings=settings, seed=inputs.seed, latency=table)
            if library is None and inputs.check is not None:
                said = inputs.check.note
                other = None if grown is None else partial(importance, self.model, chart, settings, grown)
                plan = inputs.check.best(scores, chart, partial(planned, chart), other)
                if inputs.check.note != said:
                    self.log(inputs.check.note)
            elif library is None:
                plan = planned(chart, scores)
            else:
                known = library.with_known_layout(chart, layouts)
                plan = library.sayable_plan(known, lambda chart: planned(chart, scores), scores)
                layouts.append(plan.channel_map.traced.equal_widths)
            made.append((plan, scores))
            return plan.keep

        whole, plain = list(self.examples), settings.plain_classes
        examples = [shortened(self.model, channel_map, example, example, at) for at, example in enumerate(whole)]

        def tried(chart: ChannelMap) -> TrialResult:
            """Return a plan that passes on short texts, where most differences show in less time, and on whole ones."""
            found = run_trial(self.model, chart, choose, examples, plain=plain)
            if all(short is example for short, example in zip(examples, whole, strict=True)):
                return found
            known, keep = found.channel_map, found.keep
            return run_trial(self.model, known, lambda now: keep if now is known else choose(now), whole, plain=plain)

        with paused_garbage_collection():
            settled, note = tried(channel_map), None
            while library is not None and note is None:
                chart = with_equal_widths(settled.channel_map, made[-1][0].channel_map.traced.equal_widths)
                plan = replace(made[-1][0], channel_map=chart)
                note, other = library.changes(settled.compact, plan)
                if note is None:
                    layouts.append(other)
                    settled = tried(chart)
            settled, unseen = with_untraced_sizes(self.model, settled, examples)
        release_memory(self.model)
        chart, known, notes = settled.channel_map, set(self.channel_map.locks), unseen
        if library is not None:
            chart = with_equal_widths(chart, made[-1][0].channel_map.traced.equal_widths)
        added = tuple(f"{lock.module} ({lock.operator}): {lock.reason}" for lock in chart.locks if lock not in known)
        plan, scores = made[-1]
        plan = replace(plan, channel_map=chart)  # with the locks of the last trial
        if note is not None:
            plan = replace(plan, provenance={**plan.provenance, LIBRARY_CONFIG: note})
            notes += tuple(_notes_on_layout(plan, scores, settings))
        set_noted_config(settled.compact, note)
        return Planned(plan, scores, settled.compact, settled.difference, added, notes + _uncounted(self.channel_map))

    def deliver(self, planned: Planned, model: nn.Module) -> LatencyResult | None:
        """Measure the final model beside the dense one in fresh processes; None without a budget of time.

        The model was compacted by the plan, and deployed as the profiled networks were.
        """
        return None

    def _megabytes(self, model: nn.Module) -> float:
        target = self.settings.target
        return count_memory(model, self.examples[0], target.batch, target.dtype) / MEMORY.per_unit

    def as_asked(self, planned: Planned, figures: Mapping[str, Mapping[str, float]]) -> Planned:
        """Return the plan with settings and budgets as they were given, not as they were aimed at."""
        origin = planned.plan.provenance
        budgets = {name: {**found, **figures.get(name, {})} for name, found in origin["budgets"].items()}
        provenance = {**origin, "prune": json_values(self.settings.noted), "budgets": budgets}
        return replace(planned, plan=replace(planned.plan, provenance=provenance))


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan that passed its trial."""

    plan: Plan  # which channels are kept
    scores: Scores  # importance of every label, float (n_labels,)
    compact: nn.Module  # the compact model, not fine-tuned
    max_relative_difference: float  # largest difference of any operator between masked and compact model (float64)
    locked_by_trial: tuple[str, ...]  # locks that the trial added, as text
    # in sentences, sizes that methods which no example runs may need, and MACs that no budget counts
    unseen: tuple[str, ...] = ()
    attempts: tuple[Attempt, ...] = ()  # the plans that were measured, in order, where a budget is one of time

    @property
    def notes(self) -> tuple[str, ...]:
        """`unseen`, and sentences on small budgets, and on channels that stay because of the trial."""
        notes = [*_small_amounts(self.plan), *self.unseen]
        if self.locked_by_trial:
            first, *others = self.locked_by_trial
            more = f"; and {plural(len(others), 'more place')}, see .plan.channel_map.locks" if others else ""
            notes.insert(0, f"more channels stay than the trace locks: {first.strip()}{more}")
        return tuple(notes)

    def curves(self, patches: PatchStats) -> dict[str, SensitivityCurve]:
        """Return the curves of `elimination` by group, convex hulls of its errors, from the plan's patches."""
        chart = self.plan.channel_map
        groups = {group.name: group for group in chart.groups}
        return {
            name: replace(curve, outputs=weighted_output_count(groups[name], chart, patches))
            for name, curve in cumulative_curves(chart, self.scores).items()
        }


def _small_amounts(plan: Plan) -> Iterator[str]:
    """Yield a sentence on each budget, such as `size_mb=0.1`, that allows next to nothing of the dense model."""
    for name, found in plan.provenance["budgets"].items():
        facts = facts_of(name)
        allowed = facts.left_of(found["asked"], found["dense"]) if found["dense"] else 1.0
        if not facts.share and allowed < SMALL:
            dense = facts.in_words(found["dense"])
            asked = f"{name}={found['asked']:.4g}"
            yield f"{asked} is {share(allowed, 2)} of the dense model's {dense}: next to nothing stays"


def _notes_on_layout(plan: Plan, scores: Scores, settings: PruneSettings) -> Iterator[str]:
    """Yield sentences on uneven shares and widths that a configuration forces, with what a plan without it keeps."""
    chart, whole = plan.channel_map, plan.channel_map.traced.equal_widths.whole
    locked = np.ones(chart.n_labels, dtype=bool)
    for group in (group for family in chart.families.keys() - whole.keys() for group in chart.families[family]):
        locked[group.labels] = False
    locked = chart.completed(locked)
    sizes = {name: chart.parameters_kept(np.ones_like(locked), [name]) for name in chart.shapes}
    free = [name for name in sizes if chart.free_share([name])]
    stay = sum(sizes[name] for name in free if chart.parameters_kept(locked, [name]) == sizes[name])
    stays, (least, width) = stay / max(1, sum(map(sizes.get, free))), _narrowest(plan)  # type: ignore[arg-type]
    budgets = ((facts_of(name), found) for name, found in plan.provenance["budgets"].items())
    asked = min(
        (facts.left_of(found["asked"], found["dense"]) for facts, found in budgets if found["dense"]), default=1.0
    )
    entries = plan.provenance[LIBRARY_CONFIG]["config"].items()
    wide = {size for _, size in plan.widths().values() if size >= 8 * WIDE and size % WIDE == 0}
    if odd := [f"{name} {value}" for name, (dense, value) in entries if dense in wide and value % WIDE]:
        yield f"no multiple of {WIDE}, which kernels are faster for: {', '.join(odd)}; round_to={WIDE} makes them so"
    if stays >= LOCKED and 1 - least > PAYS * (1 - asked):
        given = ""
        with suppress(PlanError):
            other = replace(settings, layout="equal")
            left = _narrowest(make_plan(with_equal_widths(chart, NO_EQUAL_WIDTHS), scores, other))[0]
            given = f"; layout='equal' or 'free' would keep {share(left)} of each, or more"
        names = sorted(family_name(family) for family in chart.families.keys() & whole.keys())
        yield (
            f"layout={settings.layout!r}: no configuration says other widths of {listed(names, 3)}, {share(stays)} of "
            f"the parameters that could go, so that others pay for it: {width} keeps {share(least)}, where "
            f"{share(asked)} was asked for{given}"
        )


def _narrowest(plan: Plan) -> tuple[float, str]:
    """Return the least share that a group keeps, and its name."""
    return min(((kept / size, name) for name, (kept, size) in plan.widths().items()), default=(1.0, ""))


def library_of(model: nn.Module, examples: Sequence[tuple[Any, ...]], settings: PruneSettings) -> LibraryModel | None:
    """Return the model of transformers whose configuration has to say all widths; None in other layouts."""
    if not settings.as_configuration:
        return None
    from prunekit.pruning.library_layout import LibraryModel

    return LibraryModel.of(model, examples, settings.layout)


def _uncounted(channel_map: ChannelMap) -> tuple[str, ...]:
    """Return a sentence on the multiply-accumulates of the traced pass that no budget counts, if there are any."""
    trace = channel_map.traced.trace
    parts = [part for part in trace.fused_away if any(is_inside(term.module, [part]) for term in trace.flow.macs)]
    if not parts:
        return ()
    return (f"MACs do not count {', '.join(parts)}: the model's own fuse() takes them out of the deployed model",)


def ranked(scores: Scores, channel_map: ChannelMap, settings: PruneSettings) -> Scores:
    """Return scores as plans rank them: normalized within groups, unless that changes no rank."""
    as_it_is = settings.scope == "uniform" or CRITERIA.get(settings.criterion).comparable
    return scores if as_it_is else normalize(scores, channel_map)


def importance(model: nn.Module, channel_map: ChannelMap, settings: PruneSettings, inputs: CriterionInputs) -> Scores:
    """Return the scores of the criterion as plans rank them."""
    found = score(
        settings.criterion,
        model,
        channel_map,
        stats=inputs.stats,
        gradients=inputs.gradients,
        patches=inputs.patches,
        seed=inputs.seed,
    )
    return ranked(found, channel_map, settings)
