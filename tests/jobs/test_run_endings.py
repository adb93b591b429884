"""A run's folder says how the run ended, whatever ended it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from prunekit.errors import RunError
from prunekit.jobs.run import run_folder as runs
from prunekit.jobs.run.run_folder import RunFolder, run_folder


def ignore(message: str) -> None:
    """A log that nobody reads."""


def state(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(next(folder.rglob("status.json")).read_text())
    return found


def test_the_folder_is_named_at_once(tmp_path: Path) -> None:
    messages: list[str] = []
    with run_folder(tmp_path, "small", messages.append, "name: small\n") as run:
        assert messages == [f"run: {run.path}"]
        assert state(tmp_path)["state"] == "running"
    assert state(tmp_path)["state"] == "finished"


def test_what_failed_is_in_the_status_and_in_the_log(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="odd"), run_folder(tmp_path, "small", ignore, ""):
        raise ValueError("odd")
    assert (state(tmp_path)["state"], state(tmp_path)["error"]) == ("failed", "ValueError: odd")
    assert next(tmp_path.rglob("log.txt")).read_text().endswith(" ValueError: odd\n")


def test_ctrl_c_while_the_folder_is_filled_is_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "environment", interrupted)
    with pytest.raises(KeyboardInterrupt), run_folder(tmp_path, "small", ignore, ""):
        pass
    assert state(tmp_path)["state"] == "interrupted"


def test_a_second_ctrl_c_does_not_lose_the_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, handler = RunFolder.mark, signal.getsignal(signal.SIGINT)

    def disturbed(run: RunFolder, state: str, **facts: str) -> None:
        if state == "interrupted":
            signal.raise_signal(signal.SIGINT)
        mark(run, state, **facts)

    monkeypatch.setattr(RunFolder, "mark", disturbed)
    with pytest.raises(KeyboardInterrupt), run_folder(tmp_path, "small", ignore, ""):
        raise KeyboardInterrupt
    assert state(tmp_path)["state"] == "interrupted"
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_disk_too_full_for_the_mark_does_not_hide_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = RunFolder.mark

    def full(run: RunFolder, state: str, **facts: str) -> None:
        if state == "failed":
            raise OSError(28, "No space left on device")
        mark(run, state, **facts)

    monkeypatch.setattr(RunFolder, "mark", full)
    with pytest.raises(RunError, match="the loss"), run_folder(tmp_path, "small", ignore, ""):
        raise RunError("the loss")
    assert state(tmp_path)["state"] == "running"
