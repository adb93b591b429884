"""A job that is killed in each of its stages, and resumed each time, ends as one that is not."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from killing import forked
from resume_jobs import PLANNED, folder_of, job, require_same_tables, require_same_tensors, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from prunekit.reading.text_files import read_json

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
SAID = {
    "calibrate": "calibration: ",
    "plan": PLANNED,
    "repair": "repair: takes",
    "thresholds": "fine-tune: ",
    "compact": "verify: ",
    "measure": "test: control",
}
"""What is logged in the middle of a stage."""
TRAININGS = ("baseline", "pruned", "control")


def begin(output: Path, dying: str = "", resume: str | None = "auto") -> None:
    """Runs the job, and is killed in a stage, in the third checkpoint of a training, or at the very end."""
    run(job(output), dying, resume, SAID.get(dying))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody killed."""
    output = tmp_path_factory.mktemp("whole")
    assert forked(partial(begin, output, resume=None)) == 0
    return folder_of(output)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, killed in each stage once."""
    output = tmp_path_factory.mktemp("resumed")
    stages = ("baseline", "calibrate", "plan", "repair", "thresholds", "pruned", "compact", "control", "measure")
    for stage in (*stages, "report"):
        assert forked(partial(begin, output, stage)) == 9, stage
        assert read_json(folder_of(output) / "status.json")["state"] == "running"
    assert forked(partial(begin, output)) == 0
    return folder_of(output)


@pytest.mark.slow
def test_weights_are_bit_identical(whole: Path, resumed: Path) -> None:
    files = ["model/model", "plan", "statistics/channel_stats"]
    require_same_tensors(whole, resumed, *files, *(f"checkpoints/{name}" for name in ("dense", "pruned", "control")))


@pytest.mark.slow
def test_every_figure_but_time_is_the_same(whole: Path, resumed: Path) -> None:
    require_same_tables(whole, resumed, "history", "clamps", "repair", "scores", "locks", "coupling", "layers")
    before, after = (read_json(folder / "metrics.json") for folder in (whole, resumed))
    for key in ("dense", "control", "pruned", "accuracy", "sparsity", "plan", "parity", "activations", "repair"):
        assert before[key] == after[key], key
    assert before["clamps"] == after["clamps"]
    assert (before["resumed"], after["resumed"]) == (0, 10)


@pytest.mark.slow
def test_the_run_says_that_it_was_resumed_and_leaves_nothing_behind(whole: Path, resumed: Path) -> None:
    status = read_json(resumed / "status.json")
    assert (status["state"], len(status["resumed"])) == ("finished", 10)
    log = (resumed / "log.txt").read_text()
    assert log.count(", resumed; it was started") == 10
    for name in TRAININGS:
        assert f"{name}: resumed from {resumed / 'resume' / name}" in log
    assert log.count("dense: training") == 2
    assert log.count("plan: that of the run") == 7  # once for each attempt after the plan was made
    assert log.count("repair: that of the run") == 6
    names = [path.relative_to(resumed).as_posix() for path in resumed.rglob("*")]
    known = [path.relative_to(whole).as_posix() for path in whole.rglob("*")]
    plain = [[name for name in found if "events.out" not in name] for found in (names, known)]
    assert sorted(plain[0]) == sorted(plain[1])
    assert not any(path.name == "resume" or path.name.startswith(".") for path in resumed.rglob("*"))
    for name in TRAININGS:  # several files of events, and every epoch once
        curve = EventAccumulator(str(resumed / "tensorboard" / name)).Reload().Scalars("loss/train")
        assert [event.step for event in curve] == [1]
        tables = [pd.read_csv(folder / "scalars" / f"{name}.csv") for folder in (whole, resumed)]
        first, second = (table[~table["tag"].isin(["seconds", "images_per_s"])] for table in tables)
        pd.testing.assert_frame_equal(first, second, check_exact=True)
