"""Stages of a job: what each needs of those before it, and gives to those after it; checked before any of them runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prunekit.errors import RunError
from prunekit.jobs.run.job_subject import JobSubject


@dataclass(frozen=True)
class Stage:
    """A stage of a job."""

    name: str  # as the terminal counts it
    # carries it out: takes the run of the job, and by name what the stage needs; returns what it gives
    work: Callable[..., Any]
    needs: tuple[str, ...] = ()  # names of results of stages before it
    # names of its results; one that a stage before it gave is replaced. `work` returns a tuple of several.
    gives: tuple[str, ...] = ()
    counted: bool = True  # whether the terminal counts it
    # raises for what this stage would fail of, before hours of work
    require: Callable[[JobSubject], object] = lambda subject: None


def require_stages(stages: Sequence[Stage], subject: JobSubject) -> None:
    """Raise if a stage needs what none before it gives, or if a job's subject is not one for it; nothing runs."""
    given: set[str] = set()
    for stage in stages:
        if missing := [name for name in stage.needs if name not in given]:
            raise RunError(f"stage {stage.name!r} needs {' and '.join(missing)}, which no stage before it gives")
        given |= {*stage.gives}
        stage.require(subject)


def carry_out(stages: Sequence[Stage], run: object) -> Mapping[str, Any]:
    """Carry out stages in order, each with what it needs, and return what the last one gives, by name.

    A result is dropped once no later stage needs it, as statistics of layers may fill the memory.
    """
    made: dict[str, Any] = {}
    for number, stage in enumerate(stages, 1):
        found = stage.work(run, **{name: made[name] for name in stage.needs})
        made |= zip(stage.gives, found if len(stage.gives) > 1 else (found,), strict=True)
        wanted = {name for later in stages[number:] for name in later.needs} or {*stage.gives}
        made = {name: value for name, value in made.items() if name in wanted}
        del found
    return made
