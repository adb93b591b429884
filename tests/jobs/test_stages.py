"""Stages of jobs: what each needs and gives."""

from __future__ import annotations

from typing import Any

import pytest

from prunekit.errors import RunError, UsageError
from prunekit.jobs.finetune import Stage, carry_out, require_stages

SUBJECT: Any = object()


def test_a_stage_gets_what_those_before_it_give_and_replaces_it() -> None:
    stages = [
        Stage("first", lambda run: (1, 2), (), ("one", "two")),
        Stage("sum", lambda run, one, two: one + two + run, ("one", "two"), ("one",)),
        Stage("last", lambda run, one: one * 10, ("one",), ("metrics",)),
    ]
    require_stages(stages, SUBJECT)
    assert carry_out(stages, 100) == {"metrics": 1030}


def test_a_stage_whose_need_comes_later_is_refused_before_anything_runs() -> None:
    ran = []
    stages = [
        Stage("plan", lambda run, inputs: ran.append(1), ("inputs",), ("plan",)),
        Stage("calibrate", lambda run: ran.append(2), (), ("inputs",)),
    ]
    with pytest.raises(RunError, match="stage 'plan' needs inputs, which no stage before it gives"):
        require_stages(stages, SUBJECT)
    assert ran == []


def test_what_a_stage_would_fail_of_is_raised_before_anything_runs() -> None:
    def refuse(subject: Any) -> None:
        raise UsageError("no such format")

    with pytest.raises(UsageError, match="no such format"):
        require_stages([Stage("export", lambda run: None, require=refuse)], SUBJECT)
