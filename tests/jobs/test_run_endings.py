"""A run's folder says how the run ended, whatever ended it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from prunekit.errors import ResumeError, RunError
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


def _run_until(number: int, folder: Path, handler: object, children: bool) -> None:
    """Run in a process that gets a signal in the middle; a terminal that was closed takes no line of the log."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(number, handler)  # type: ignore[arg-type]

    def gone(message: str) -> None:
        if "has not finished" in message:
            raise OSError(5, "Input/output error")

    with run_folder(folder, "small", gone, "") as run:
        run.resume.mkdir()
        if children and os.fork() == 0:
            signal.raise_signal(number)
            os._exit(0)  # not reached: the child has the usual handler
        if children:
            os._exit(os.waitstatus_to_exitcode(os.wait()[1]) + 100)
        os.kill(os.getpid(), number)
        time.sleep(0.01)


def _ended(number: int, folder: Path, handler: object = signal.SIG_DFL, *, children: bool = False) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=_run_until, args=(number, folder, handler, children))
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.skipif(os.name != "posix", reason="other signals")
@pytest.mark.parametrize("number", runs.ENDING, ids=lambda number: signal.Signals(number).name)
def test_a_signal_that_ends_the_process_leaves_a_marked_folder(number: int, tmp_path: Path) -> None:
    assert _ended(number, tmp_path) == -number  # as whoever waits for the process expects
    found = state(tmp_path)
    assert (found["state"], found["error"]) == ("interrupted", signal.Signals(number).name)
    assert "has not finished; --resume" in next(tmp_path.rglob("log.txt")).read_text()


@pytest.mark.skipif(os.name != "posix", reason="other signals")
def test_a_signal_that_is_ignored_or_handled_is_left_to_the_process(tmp_path: Path) -> None:
    assert _ended(signal.SIGHUP, tmp_path / "nohup", signal.SIG_IGN) == 0
    assert state(tmp_path / "nohup")["state"] == "finished"
    assert _ended(signal.SIGTERM, tmp_path / "own", signal.default_int_handler) == 1
    assert "error" not in state(tmp_path / "own")
    assert state(tmp_path / "own")["state"] == "interrupted"


@pytest.mark.skipif(os.name != "posix", reason="other signals")
def test_a_forked_process_that_is_ended_marks_nothing(tmp_path: Path) -> None:
    assert _ended(signal.SIGTERM, tmp_path, children=True) == 100 - signal.SIGTERM
    assert state(tmp_path)["state"] == "running"


def _begun(folder: Path) -> Path:
    with suppress(KeyboardInterrupt), run_folder(folder, "small", ignore, "") as run:
        run.resume.mkdir()
        raise KeyboardInterrupt
    return run.path


@pytest.mark.parametrize("hard", [False, True], ids=["link", "hard link"])
def test_a_log_that_is_a_link_is_not_written_through(hard: bool, tmp_path: Path) -> None:
    path, outside = _begun(tmp_path), tmp_path / "outside.txt"
    outside.write_text("mine\n")
    log = path / "log.txt"
    log.unlink()
    os.link(outside, log) if hard else log.symlink_to(outside)
    with run_folder(tmp_path, "small", ignore, "", again=path) as run:
        run.log("of the run")
    assert outside.read_text() == "mine\n"
    assert log.read_text().endswith("of the run\n")
    assert log.read_text().startswith("mine\n") == hard


@pytest.mark.parametrize("name", ["checkpoints", "resume", "tensorboard/finetune"])
def test_a_folder_that_is_a_link_is_not_written_into(name: str, tmp_path: Path) -> None:
    path, outside = _begun(tmp_path), tmp_path / "outside"
    outside.mkdir()
    (outside / ".mine.tmp").touch()
    linked = path / name
    linked.parent.mkdir(exist_ok=True)
    if linked.exists():
        linked.rmdir()
    linked.symlink_to(outside)
    with (
        pytest.raises(ResumeError, match=rf"{name}: expected a folder, got a link to .*outside, where this run would"),
        run_folder(tmp_path, "small", ignore, "", again=path),
    ):
        pass
    assert [one.name for one in outside.iterdir()] == [".mine.tmp"]
    assert state(tmp_path)["state"] == "interrupted"


@pytest.mark.parametrize("status", ["{", "[]", '{"started": 3, "resumed": 4}', "{}"])
def test_a_run_whose_status_is_damaged_goes_on(status: str, tmp_path: Path) -> None:
    path = _begun(tmp_path)
    (path / "status.json").write_text(status)
    with run_folder(tmp_path, "small", ignore, "", again=path):
        pass
    assert state(tmp_path)["state"] == "finished"
