"""What long calls show and log: nothing where nobody looks on, and nothing is left of it."""

from __future__ import annotations

import inspect
import io
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

import prunekit
from prunekit.errors import ModelError
from prunekit.jobs.finetune import prune_job
from prunekit.repair.repair_model import repair
from prunekit.settings.calibration import RepairSettings
from prunekit.tasks.classification import TOP1
from prunekit.training.loop import ProgressBar
from prunekit.utils.progress import LOGGER, StageCounter, reporting, stage, tracked, wanted

LONG = [
    prunekit.prune,
    prunekit.calibrate,
    prunekit.calibrate_thresholds,
    prunekit.collect_gradients,
    prunekit.recalibrate_batchnorm,
    prunekit.sensitivity,
    prunekit.profile,
    prunekit.finetune,
    prune_job,
    repair,
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Within a test: pytest sets its own stderr between a fixture and a test."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    return found


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 3)
    ).eval()


def images() -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.randn(32, 3, 6, 6).split(8))


def pruned(**more: Any) -> Any:
    return prunekit.prune(net(), calibration=images(), channels=0.6, repair=RepairSettings(joint_steps=0), **more)


def through(**more: Any) -> None:
    model = net()
    prunekit.calibrate(model, images(), **more)
    prunekit.recalibrate_batchnorm(model, images(), **more)
    prunekit.calibrate_thresholds(model, images(), ["2"], target=0.6, **more)
    prunekit.collect_gradients(model, [(images()[0], torch.arange(8) % 3)], nn.functional.cross_entropy, **more)
    prunekit.sensitivity(model, images(), measured_on=images(), **more)
    repair(model, pruned(**more).plan, torch.cat(images()), **more)


def test_every_long_call_says_whether_it_shows_bars() -> None:
    for function in LONG:
        assert inspect.signature(function).parameters["progress"].default is None, function


@pytest.mark.slow
def test_nothing_is_shown_where_nobody_looks_on(capsys: pytest.CaptureFixture[str]) -> None:
    through()
    assert capsys.readouterr() == ("", "")


class Clock:
    """A time that a test sets, and a thread that writes a line when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.threads = 0.0, list[Callable[[], None]]()
        monkeypatch.setattr("prunekit.utils.progress.perf_counter", lambda: self.now)
        monkeypatch.setattr("prunekit.utils.progress.Thread", self.thread)

    def thread(self, target: Any, daemon: bool) -> Any:
        """Return what starts the writing of lines."""
        assert daemon  # it keeps no process from ending
        return SimpleNamespace(start=lambda: self.threads.append(target.__self__.write))

    def tick(self) -> None:
        """Let the threads write."""
        for write in self.threads:
            write()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock in the place of the real one."""
    return Clock(monkeypatch)


def test_a_long_call_says_its_stage_where_no_bars_are_shown(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """The one that runs; none where `progress=False` says that no line is wanted."""
    expected = "prune [10 s]: running\nprune [20 s]: trace\nprune [30 s]: trace\nprune [40 s]: repair\n"
    for asked, said in ((None, expected), (False, "")):
        clock.now, clock.threads = 0.0, []
        with reporting(asked, "prune"):
            for stages in ([], ["trace"], [], ["plan", "repair"]):
                for text in stages:
                    stage(text)
                clock.now += 10
                clock.tick()
        assert capsys.readouterr().err == said


def test_a_thread_says_what_runs_until_the_call_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("prunekit.utils.progress.QUIET_S", 0.001)
    before = threading.active_count()
    with suppress(KeyError), reporting(None, "prune"):
        stage("trace")
        said = ""
        while "s]: trace\n" not in said:
            said += capsys.readouterr().err
        raise KeyError
    while threading.active_count() > before:
        time.sleep(0.001)


def test_a_long_loop_says_how_far_it_is_where_no_bars_are_shown(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    for total, left in ((8, " of 8, about {} s left"), (None, "")):
        clock.now, clock.threads = 0.0, []
        with reporting(None, "prune"):
            for place, _ in enumerate(tracked((group for group in range(8)), "elimination", total=total, unit="group")):
                if place in (2, 4):
                    clock.tick()
                clock.now += 5
            clock.tick()
        last = "running" if total else "elimination: group 8"  # which of a loop without an end nobody knows
        assert capsys.readouterr().err.splitlines() == [
            f"prune [10 s]: elimination: group 2{left.format(30)}",
            f"prune [20 s]: elimination: group 4{left.format(20)}",
            f"prune [40 s]: {last}",
        ]


def test_what_was_done_before_a_run_was_resumed_counts_for_no_rate(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    for begun, said in ((0, "25 of 1000, about 195 s left"), (500, "525 of 1000, about 95 s left")):
        clock.now, clock.threads = 0.0, []
        with reporting(None, "finetune"):
            bar = ProgressBar("pruned", 1000, dict, False, TOP1)
            clock.now = 5.0  # compiled meanwhile
            bar.begin(begun)
            for step in range(1, 26):
                clock.now = 5.0 + step / 5
                bar.step(lambda: 0.0, lambda: None, 0.0)
            clock.tick()
        assert capsys.readouterr().err == f"finetune [10 s]: pruned: batch {said}\n"
    shown = ProgressBar("pruned", 1000, dict, True, TOP1)
    shown.begin(500)
    shown.bar.update(10)
    assert (shown.bar.n, shown.bar.format_dict["initial"]) == (510, 500)  # a rate is that of the difference
    shown.bar.close()


@pytest.mark.parametrize("process", [0, 1])
def test_of_several_processes_the_main_one_tells(
    process: int, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("prunekit.distributed.process_group.rank", lambda: process)
    for asked in (None, True):
        with reporting(asked, "finetune"):
            for _ in tracked(range(3), "gradients"):
                clock.now += 20
                clock.tick()
        assert bool(capsys.readouterr().err) == (process == 0), asked


@pytest.mark.parametrize("asked", [None, False, True])
def test_an_item_is_let_go_before_the_next_is_made(asked: bool | None) -> None:
    """A batch may take as much memory as a model."""
    alive: list[bool] = []

    def made() -> Iterator[Tensor]:
        last: Any = lambda: None  # noqa: E731
        for _ in range(3):
            alive.append(last() is not None)
            batch = torch.zeros(1)
            last = weakref.ref(batch)
            yield batch
            del batch

    with reporting(asked, "prune"):
        for batch in tracked(made(), "batches"):
            del batch
    assert alive == [False, False, False]


def test_batches_that_do_not_know_their_number_are_counted_all_the_same() -> None:
    class Unknown(list[int]):
        def __len__(self) -> int:
            raise NotImplementedError

    with reporting(None, "prune"):
        assert [*tracked(Unknown((1, 2)), "batches")] == [1, 2]


def test_nothing_is_shown_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    through(progress=False)
    assert terminal.getvalue() == ""


def test_a_terminal_sees_stages_and_bars_and_nothing_is_left_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    through()
    shown = terminal.getvalue()
    for text in ("prune: trace", "prune: plan by elimination", "patch statistics: ", "gains: ", "elimination: "):
        assert text in shown
    for text in ("calibration: ", "recalibration: ", "threshold search: ", "gradients: ", "repair: ", "sensitivity: "):
        assert text in shown
    assert not tqdm._instances
    *_, last, behind = shown.split("\r")  # the last line is overwritten by blanks
    assert (last.strip(), behind) == ("", "")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_or_an_interrupt_clears_the_bars(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)

    def broken() -> Iterator[Tensor]:
        yield from images()[:2]
        raise error

    with pytest.raises(error):
        prunekit.calibrate(net(), broken())
    assert "calibration: " in terminal.getvalue()
    assert not tqdm._instances

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    with pytest.raises(ModelError if error is ValueError else error):
        prunekit.calibrate(Broken(), images())
    assert not tqdm._instances


def test_bars_are_shown_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not wanted(None)
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert wanted(None)
    assert not wanted(False)
    shell.config = {"TerminalIPythonApp": {}}
    assert not wanted(None)
    assert wanted(True)
    monkeypatch.setattr(sys, "stderr", None)  # a program without one
    assert not wanted(None)


def test_a_notebook_without_widgets_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cursor goes up there: each step of a second bar would be a new line."""
    terminal = watched(monkeypatch)
    monkeypatch.setitem(
        sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(config={"IPKernelApp": {}}))
    )
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with reporting(None, "job"):
        stage("one")
        assert list(tracked("abc", "letters")) == ["a", "b", "c"]
    assert "job: one" in terminal.getvalue()
    assert "letters" not in terminal.getvalue()
    assert "\n" not in terminal.getvalue()
    assert not tqdm._instances


def test_the_outermost_call_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    with reporting(False, "outer"), reporting(True, "inner"):
        stage("hidden")
        assert list(tracked(range(3), "hidden")) == [0, 1, 2]
    assert terminal.getvalue() == ""
    with reporting(True, "outer"):
        with reporting(False, "inner"):
            stage("shown")
            assert list(tracked(iter("abc"), "letters", total=3)) == ["a", "b", "c"]
        assert len(tqdm._instances) == 1  # the line of the outer one
    assert "outer: shown" in terminal.getvalue()
    assert "letters:   0%" in terminal.getvalue()
    assert not tqdm._instances


def test_stages_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "prunekit"):
        pruned()
    assert {record.name for record in caplog.records} == {"prunekit"}
    assert {record.levelname for record in caplog.records} == {"INFO"}
    said = [record.getMessage() for record in caplog.records]
    assert said[:3] == ["read the samples", "trace", "patch statistics of 32 samples"]
    assert any(text.startswith("repair: takes up to") for text in said)
    assert any(isinstance(handler, logging.NullHandler) for handler in LOGGER.handlers)


def test_stages_that_are_known_are_counted_and_others_are_not() -> None:
    said: list[str] = []
    counter = StageCounter(("trace", "plan", "repair"), said.append)
    for name in ("trace", "deploy", "repair"):  # the plan of a resumed run is there already
        counter.begin(name)
    assert said == ["stage 1 of 3: trace", "stage 3 of 3: repair"]
