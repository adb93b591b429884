"""One process fails: all do, and one of them says why."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from process_group import together

from prunekit.distributed.process_group import from_main, one_for_all, rank, total
from prunekit.errors import DataError, PeerError, RunError


def ended(work: str, failing: int) -> tuple[str, str, int]:
    """How a piece of work ends in which process `failing` fails: the error's name, its text, its exit code."""
    try:
        with one_for_all(StopIteration), one_for_all():  # a job has one, and so has the command that runs it
            if rank() == failing:
                raise DataError("no images here")
            if work == "waiting":
                from_main(lambda: time.sleep(30))
            else:  # of a process that has gone: what gloo says then
                time.sleep(0.3)
                raise RuntimeError("Connection closed by peer")
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "exit_code", 1)
    return "nothing", "", 0


@pytest.mark.slow
@pytest.mark.parametrize(("work", "failing"), [("waiting", 0), ("exchanging", 0), ("exchanging", 1)])
def test_the_others_learn_who_failed_and_why(work: str, failing: int, tmp_path: Path) -> None:
    found = together(3, tmp_path, ended, work, failing)
    assert found.pop(failing) == ("DataError", "no images here", 2)
    assert found == [("PeerError", f"process {failing} of 3 failed: no images here", 2)] * 2


def all_ended() -> str:
    try:
        with one_for_all():
            raise RunError("the same everywhere")
    except RunError as error:
        return type(error).__name__


@pytest.mark.slow
def test_of_a_common_failure_one_speaks(tmp_path: Path) -> None:
    assert sorted(together(4, tmp_path, all_ended)) == ["PeerError"] * 3 + ["RunError"]


def interrupted() -> str:
    try:
        with one_for_all():
            raise KeyboardInterrupt
    except (KeyboardInterrupt, PeerError) as error:
        return type(error).__name__


def test_all_that_are_interrupted_are_interrupted(tmp_path: Path) -> None:
    assert together(2, tmp_path, interrupted) == ["KeyboardInterrupt"] * 2


def passed() -> float:
    if rank() == 1:
        with pytest.raises(StopIteration), one_for_all(StopIteration):
            raise StopIteration
    with one_for_all():
        return total(1)[0]


def test_what_is_no_failure_fails_nobody(tmp_path: Path) -> None:
    assert together(2, tmp_path, passed) == [2, 2]


def test_a_single_process_fails_as_it_would() -> None:
    with pytest.raises(KeyError), one_for_all():
        raise KeyError(1)
    assert not torch.distributed.is_initialized()
