"""Schedules: how much of a model is pruned when, by the settings and the length of the training."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import get_args

import numpy as np

from prunekit.errors import UsageError, nearest
from prunekit.settings.pruning import (
    BudgetSettings,
    PruneSettings,
    ScheduleKind,
    ScheduleSettings,
    facts_of,
    schedule_contradictions,
)

ROUNDS = {"oneshot": 1, "iterative": 3, "linear": 10, "exponential": 10, "cubic": 10}
"""How often a schedule prunes by default."""
FROM_BEGIN = ("oneshot", "iterative")
"""Kinds that prune at their beginning; the others remove nothing there."""


def share_kept(kind: ScheduleKind, progress: float, final: float) -> float:
    """Return the share of a resource that is left at some progress toward a final share.

    With s = 1 - kept, `cubic` is s_t = s_f + (s_i - s_f) (1 - progress)^3 with s_i = 0 (Zhu & Gupta 2017, "To prune,
    or not to prune", equation 1), and `linear` the same to the power of 1. `exponential` and `iterative` keep the
    same share of the rest each time, as in Han et al. 2015 and Frankle & Carbin 2019.
    """
    if progress >= 1 or final >= 1:
        return final
    match kind:
        case "oneshot":
            return 1.0
        case "linear":
            return 1 - (1 - final) * progress
        case "cubic":
            return float(final + (1 - final) * (1 - progress) ** 3)
        case "exponential" | "iterative":
            return float(final**progress)


@dataclass(frozen=True)
class ScheduleStep:
    """A step of a schedule: one change of the plan, between two training steps."""

    step: int  # number of training steps before it
    progress: float  # 0..1, see `share_kept`
    elapsed: float = 1.0  # 0..1, the share of the steps from the schedule's begin to its last change that are over


@dataclass(frozen=True)
class Timeline:
    """A schedule laid over a training; made by `timeline`."""

    settings: ScheduleSettings  # of the schedule
    steps: int  # number of steps in an epoch
    epochs: int  # number of epochs of the training
    # begin, end: number of steps before the curve begins, and before the budget is met
    begin: int
    end: int
    pruning_steps: tuple[ScheduleStep, ...]  # every change of the plan, in order; the last is final

    @property
    def total(self) -> int:
        """Number of steps of the training."""
        return self.steps * self.epochs

    def share_at(self, step: float, final: float) -> float:
        """Return the share that the curve of the schedule leaves after some steps, between its changes too."""
        if self.settings.kind in FROM_BEGIN:
            progress = max((each.progress for each in self.pruning_steps if each.step <= step), default=0.0)
        else:
            progress = (step - self.begin) / max(1, self.end - self.begin)
        return share_kept(self.settings.kind, min(max(progress, 0.0), 1.0), final)

    def restarts(self) -> tuple[int, ...]:
        """Return the steps before which the learning-rate schedule is restarted."""
        return tuple(each.step for each in self.pruning_steps if each.step) if self.settings.rewind_lr else ()

    def rows(self, final: Mapping[str, float]) -> Iterator[dict[str, float]]:
        """Yield for each pruning step its training step, its epoch, and the share of each resource that it leaves."""
        for each in self.pruning_steps:
            left = {name: share_kept(self.settings.kind, each.progress, share) for name, share in final.items()}
            yield {"step": each.step, "epoch": each.step / self.steps, **left}


def timeline(settings: ScheduleSettings, *, epochs: int, steps: int, called: str = "prune.schedule") -> Timeline:
    """Lay a schedule over a training."""
    problems = [f"{called}.{key}: {text}" for key, text in schedule_contradictions(asdict(settings))]
    if problems:
        raise UsageError("; ".join(problems))
    unit = steps if settings.unit == "epoch" else 1
    total, begin = epochs * steps, round(settings.begin * unit)
    end = _end(settings, begin, total, unit)
    last = end if settings.freeze is None else round(settings.freeze * unit)
    for key, at in (("begin", begin), ("end", end), ("freeze", last)):
        if at >= total:
            raise UsageError(
                f"{called}.{key}: expected less than the {epochs} epochs of finetune ({total} steps), so that "
                f"something is left to train under the final masks, got {at / unit:g} {settings.unit}s; lower it, or "
                "raise finetune.epochs"
            )
    if not begin <= end <= last or (begin == end and settings.kind not in FROM_BEGIN):
        order = ", ".join(f"{key} {at}" for key, at in (("begin", begin), ("end", end), ("freeze", last)))
        raise UsageError(f"{called}: expected begin before end, and freeze not before it, got (in steps) {order}")
    if settings.score == "movement" and settings.kind in FROM_BEGIN and begin == 0:
        raise UsageError(
            f"{called}.begin: expected at least one step before the first pruning, because score is 'movement' "
            f"and nothing has moved yet, got {settings.begin:g}"
        )
    return Timeline(settings, steps, epochs, begin, end, tuple(_stages(settings, begin, end, last, unit)))


def schedule_in_steps(
    schedule: ScheduleKind | ScheduleSettings, steps: int | None, begin: int
) -> tuple[ScheduleSettings, tuple[ScheduleStep, ...]]:
    """Return a schedule whose unit is training steps, and its pruning steps, for a training loop of unknown length."""
    kinds = get_args(ScheduleKind)
    if not isinstance(schedule, ScheduleSettings):
        if schedule not in kinds:
            raise UsageError(
                f"schedule: expected {', '.join(kinds)} or ScheduleSettings, got {schedule!r}; "
                f"{nearest(str(schedule), kinds)}"
            )
        schedule = ScheduleSettings(schedule)
    placed = [key for key in ("begin", "end", "every", "freeze") if getattr(schedule, key)]
    if schedule.unit == "epoch" and placed:
        raise UsageError(
            f"schedule.unit: expected 'step', because {placed[0]} is given and a pruner doesn't know your loop's "
            "epochs, got 'epoch'; give steps of the optimizer"
        )
    if schedule.rewind_lr:
        raise UsageError(
            "schedule.rewind_lr: expected false, because your loop sets the learning rate and may rewind it itself"
        )
    for key, value, at in (("steps", steps, schedule.end), ("begin", begin or None, schedule.begin or None)):
        if value is not None and at is not None:
            name = "end" if key == "steps" else key
            raise UsageError(
                f"{key}: expected nothing beside schedule.{name}, which means the same, got {value} and {at:g}"
            )
        if value is not None and (not isinstance(value, int) or value < (1 if key == "steps" else 0)):
            raise UsageError(f"{key}: expected a number of optimizer steps, at least 1, got {value!r}")
    once = schedule.kind == "oneshot"
    if once and steps is not None:
        raise UsageError(
            f"steps: expected none, because schedule is 'oneshot', which prunes once, at begin; got {steps}: "
            f"begin={steps} prunes then"
        )
    end = schedule.end if steps is None else steps
    if end is None and not once:
        raise UsageError(
            f"steps: expected how many steps of the optimizer the schedule {schedule.kind!r} takes, such as "
            "steps=1000; got none"
        )
    laid = replace(schedule, unit="step", begin=begin or schedule.begin, end=end)
    if end is not None and laid.begin >= end:
        raise UsageError(f"begin: expected less than the schedule's end of {end:g} steps, got {laid.begin:g}")
    longest = int(max(laid.begin, laid.end or 0, laid.freeze or 0)) + 2
    found = timeline(laid, epochs=1, steps=longest, called="schedule").pruning_steps
    return laid, tuple(each for each in found if each.progress > 0)


def _end(settings: ScheduleSettings, begin: int, total: int, unit: int) -> int:
    if settings.kind == "oneshot":
        return begin
    if settings.end is not None:
        return round(settings.end * unit)
    if settings.kind != "iterative":
        return (begin + total) // 2
    if settings.every is not None:
        return max(begin, total - max(1, round(settings.every * unit)))
    rounds = settings.rounds or ROUNDS["iterative"]
    return begin + (total - begin) * (rounds - 1) // rounds


def _stages(settings: ScheduleSettings, begin: int, end: int, last: int, unit: int) -> Iterator[ScheduleStep]:
    """Yield every change of the plan; of several in one step, the last."""
    places = _places(settings, begin, end, unit)
    after = [] if last == end else _later(settings, places, end, last, unit)
    found: dict[int, float] = {}
    for index, place in enumerate(places, 1):
        step = round(place)
        found[step] = index / len(places) if settings.kind in FROM_BEGIN else (step - begin) / (end - begin)
    found |= dict.fromkeys(after, 1.0)
    for step, progress in sorted(found.items()):
        yield ScheduleStep(step, progress, (step - begin) / (last - begin) if last > begin else 1.0)


def _places(settings: ScheduleSettings, begin: int, end: int, unit: int) -> list[float]:
    """Return the steps at which is pruned until the end, not rounded."""
    first = 0 if settings.kind in FROM_BEGIN else 1
    if settings.every is None or settings.kind == "oneshot":
        rounds = settings.rounds or ROUNDS[settings.kind]
        return [float(at) for at in np.linspace(begin, end, rounds + first)[first:]]
    every = settings.every * unit
    found = [begin + every * index for index in range(first, math.floor((end - begin) / every + 1e-9) + 1)]
    missed = settings.kind != "iterative" and (not found or round(found[-1]) != end)
    return [*found, float(end)] if missed else found


def _later(settings: ScheduleSettings, places: list[float], end: int, last: int, unit: int) -> list[int]:
    """Return the steps after the end in which masks of the same size are chosen again, at the same distances."""
    even = places[-1] - places[-2] if len(places) > 1 else places[-1]
    every = max(1.0, even if settings.every is None else settings.every * unit)
    found = [round(end + every * index) for index in range(1, math.floor((last - end) / every + 1e-9) + 1)]
    return sorted({*found, last})


def settings_at_step(settings: PruneSettings, step: ScheduleStep, dense: Mapping[str, float]) -> PruneSettings:
    """Return the settings of a pruning step: its budgets and ratios lie between the dense model and the final ones."""
    assert settings.schedule is not None
    kind = settings.schedule.kind
    budget = {name: _figure_at(step, kind, name, dense[name], asked) for name, asked in settings.budget.given.items()}
    ratios = {glob: share_kept(kind, step.progress, share) for glob, share in settings.ratios.items()}
    return replace(settings, budget=BudgetSettings(**budget), ratios=ratios)


def _figure_at(step: ScheduleStep, kind: ScheduleKind, name: str, dense: float, asked: float) -> float:
    if step.progress >= 1:
        return asked
    facts = facts_of(name)
    return facts.loosened(dense, share_kept(kind, step.progress, facts.left_of(asked, dense)))
