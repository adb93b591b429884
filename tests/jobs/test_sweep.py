"""Sweeps: grids, engines and what becomes of trials that fail, are killed or take too much memory."""

from __future__ import annotations

import importlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from own_jobs import CODE, MINE, OWN, RECIPE, write_job

from prunekit.cli import cli
from prunekit.errors import UsageError
from prunekit.jobs.sweep_engines import ENGINES, Command, Limits, bytes_of, run_processes, write_slurm
from prunekit.recipe.loading import combinations, grid_of, load, own_overrides
from prunekit.recipe_jobs import sweep

KILLED = """
    if sys.argv[1:2] == ["prune"]:  # a trial, and not the sweep itself
        with suppress(FileNotFoundError):
            who = Path("kill").read_text()
            Path("kill").unlink()
            os.kill(os.getppid() if who == "parent" else os.getpid(), signal.SIGKILL)
    return"""
IMPORTED = "import os, signal, sys\nfrom contextlib import suppress\nfrom pathlib import Path\n"
SWEEP = ("sweep", *MINE, "--prune")
QUICK = ("list", "formats", "--json")
"""A command that prints one JSON object, and imports nothing large."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path, f"{RECIPE}watch: null\ncontrol: false\n", IMPORTED + CODE.replace("\n    return", KILLED))
    return tmp_path


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(cli, [*SWEEP, *arguments])
    assert done.exit_code == 2, done.output
    assert not Path("runs").exists()
    return done.output


def test_a_grid_has_every_combination_by_name(folder: Path) -> None:
    job = load("mine.yaml", own_overrides(model="own.py:net"))
    grid = grid_of(["prune.criterion=l1,elimination", "prune.ignore=[],['a.*', b]", "prune={round_to: 4}"])
    assert grid["prune.ignore"] == [[], ["a.*", "b"]]
    found = combinations(job, {key: grid[key] for key in ("prune.criterion", "prune.ignore")})
    assert [*found] == [
        "prune.criterion=l1 prune.ignore=[]",
        'prune.criterion=l1 prune.ignore=["a.*", "b"]',
        "prune.criterion=elimination prune.ignore=[]",
        'prune.criterion=elimination prune.ignore=["a.*", "b"]',
    ]
    made = [(each.prune.criterion, each.prune.ignore) for each in found.values()]
    assert made[1] == ("l1", ("a.*", "b"))
    grids: list[dict[str, Any]] = [{}, {"seed": []}, {"prune.criterion": "l1"}]
    for wrong in grids:
        with pytest.raises(UsageError, match="grid: expected values by key"):
            combinations(job, wrong)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--grid", "prune.bugdet.macs=0.3"], "prune.bugdet: unknown key; did you mean 'budget'"),
        (["--grid", "prune.budget.macs=0.3,7"], "override 'prune.budget.macs=7': prune.budget.macs: expected a number"),
        (["--grid", "prune.budget.macs=0.3,0.30"], "is the same as prune.budget.macs=0.3"),
        (["--grid", "seed=1", "--grid", "seed=2"], "seed is given twice: expected all its values in one"),
        (["--grid", "prune.budget.macs"], "--grid: expected KEY=VALUE,VALUE, such as"),
        (["--grid", "seed=1,[2"], "--grid: expected KEY=VALUE,VALUE"),
        (["--grid", "seed=1,2", "--memory", "much"], "memory: expected a size such as 4GB or 500MB, got 'much'"),
        (["--grid", "seed=1,2", "--engine", "cloud"], "'cloud' is not one of 'processes', 'ray', 'slurm', 'collect'"),
        (["--grid", "model.weights=no.pt,none.pt"], "no.pt"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(folder: Path, arguments: list[str], said: str) -> None:
    assert said in refused(*arguments)


def test_numbers_that_are_none_are_refused(folder: Path) -> None:
    wrong: list[dict[str, Any]] = [{"at_once": 0}, {"retries": -1}, {"engine": "cloud"}]
    for each in wrong:
        with pytest.raises(UsageError, match="expected"):
            sweep("mine.yaml", {"seed": [1]}, own=OWN, **each)
    assert not (folder / "runs").exists()


def test_the_command_offers_every_engine() -> None:
    assert f"[{'|'.join(ENGINES)}]" in CliRunner().invoke(cli, ["sweep", "--help"]).output


def test_a_size_of_memory_is_in_bytes() -> None:
    assert [bytes_of(text) for text in (None, "4GB", "1.5 TB", "500MB")] == [None, 4 * 10**9, 15 * 10**11, 5 * 10**8]
    for wrong in ("0GB", "GB", "4", "4gb", "-1GB", ""):
        with pytest.raises(UsageError, match="memory: expected a size"):
            bytes_of(wrong)


def test_ray_that_is_not_installed_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"--engine ray needs the package ray, .*pip install prunekit\[ray\]"):
        sweep("mine.yaml", {"seed": [1, 2]}, own=OWN, training=False, engine="ray", log=lambda line: None)


@pytest.mark.slow
def test_processes_run_some_at_once_and_try_failed_ones_again(tmp_path: Path) -> None:
    commands = [Command(f"quick {number}", tmp_path / str(number), QUICK) for number in range(2)]
    wrong = Command("wrong", tmp_path / "wrong", ("list", "nothing"))
    failing = Command("failing", tmp_path / "failing", ("report", str(tmp_path)))
    (tmp_path / "status.json").write_text("[]")
    said: list[str] = []
    assert wrong.problem == "it has not run"
    run_processes([*commands, wrong, failing], Limits(2), said.append)
    assert [each.problem for each in commands] == [None, None]
    assert said.count("wrong: starts") == 1  # wrong usage stays wrong
    assert "nothing" in str(wrong.problem)
    assert said.count("failing: starts") == 2
    assert "The run has not finished" in str(failing.problem)


@pytest.mark.slow
def test_processes_that_run_together_get_a_gpu_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Seen(Command):
        def start(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
            seen.append(environment["CUDA_VISIBLE_DEVICES"])
            return super().start(environment)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    run_processes(
        [Seen(f"{number}", tmp_path / f"{number}", QUICK, gpu=number < 2) for number in range(3)], Limits(3), print
    )
    assert seen == ["3", "5", "3,5"]  # the last one takes none


@pytest.mark.slow
def test_what_takes_more_memory_than_allowed_is_killed_and_named(tmp_path: Path) -> None:
    command, said = Command("greedy", tmp_path / "greedy", ("inspect", "resnet18", "--json")), list[str]()
    run_processes([command], Limits(1, memory=10**6), said.append)
    assert said.count("greedy: starts") == 2  # tried again
    assert str(command.problem).startswith("out of memory: ")
    assert str(command.problem).endswith("--memory allows 1.00 MB")


def test_a_script_for_slurm_is_whole_and_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / 'it\'s; a "place"'
    place.mkdir()
    monkeypatch.chdir(place)
    names = ("first", "second $(touch bad)")
    trials = [Command(name, place / str(number), (*QUICK, f"$(touch {number})")) for number, name in enumerate(names)]
    write_slurm(place / "sweep.sh", [Command("dense", place / "dense", QUICK)], trials, ("a", "b c"), Limits(3, 2**31))
    text = (place / "sweep.sh").read_text(encoding="utf-8")
    assert "array=0-1%3\noptions=(--cpus-per-task=1 --mem=2048M)" in text
    assert subprocess.run(["bash", "-n", "sweep.sh"], check=False).returncode == 0
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name in ("sbatch", "python"):
        (bin_folder / name).write_text('#!/bin/bash\nprintf "<%s>" "$@" >> "$LOG"; echo >> "$LOG"; echo "7;c"\n')
        (bin_folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    text = text.replace(sys.executable, str(bin_folder / "python"))
    (place / "sweep.sh").write_text(text, encoding="utf-8")
    assert subprocess.run(["bash", "sweep.sh", "--time=1:00"], check=False, capture_output=True).stdout == b"7\n"
    for part in ("shared", "trial"):
        run = {**os.environ, "SLURM_ARRAY_TASK_ID": "1"}
        assert subprocess.run(["bash", "sweep.sh", part], check=False, env=run).returncode == 0
    lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert lines[1].startswith("<--parsable><--job-name=prunekit-trial>")
    assert "<--array=0-1%3><--requeue><--dependency=afterok:7><--cpus-per-task=1><--mem=2048M><--time=1:00>" in lines[1]
    assert lines[2].endswith(f"<{place}/sweep.sh><compare>")
    assert lines[3:] == ["<-m><prunekit><list><formats><--json>", "<-m><prunekit><list><formats><--json><$(touch 1)>"]
    assert (place / "1.json").read_text() == "7;c\n"
    assert not any((place / name).exists() for name in ("bad", "0", "1"))


@pytest.mark.slow
def test_a_sweep_compares_its_trials_names_those_that_fail_and_goes_on(folder: Path) -> None:
    given: dict[str, Any] = {"own": OWN, "training": False, "at_once": 1, "retries": 0, "log": lambda line: None}
    grid = {"prune.budget.macs": [0.5, 0.3]}
    (folder / "kill").write_text("itself")
    found = sweep("mine.yaml", grid, **given)
    (missing,) = found.metrics["missing"]
    assert missing.startswith("prune.budget.macs=0.5: killed by signal 9")
    assert json.loads((found.folder / "status.json").read_text())["state"] == "failed"
    assert f"no run of {missing.split(',')[0]}" in (found.folder / "comparison.html").read_text(encoding="utf-8")
    again = sweep("mine.yaml", grid, resume="auto", **given)
    assert again.folder == found.folder
    assert again.metrics["missing"] == []
    assert again.result[1]["folder"] == found.result[1]["folder"]  # which is not run again
    assert [row["macs_left"] <= most for row, most in zip(again.result, (0.5, 0.3), strict=True)] == [True, True]
    assert json.loads((found.folder / "sweep.json").read_text())["trials"] == again.result
    assert (found.folder / "sweep.csv").read_text().count("\n") == 3
    done = CliRunner().invoke(cli, [*SWEEP, "--grid", "prune.budget.macs=0.5,0.3", "--engine", "collect", "--json"])
    assert done.exit_code == 1  # another sweep, of which nothing has run
    assert [row["error"] for row in json.loads(done.stdout)["trials"]] == ["it has not run"] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_of_two_nodes_runs_trials_and_one_again_whose_worker_is_killed(folder: Path) -> None:
    ray = pytest.importorskip("ray")
    cluster = importlib.import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        (folder / "kill").write_text("parent")
        given: dict[str, Any] = {"own": OWN, "training": False, "engine": "ray", "log": lambda line: None}
        found = sweep("mine.yaml", {"prune.budget.macs": [0.5, 0.3]}, **given)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert not (folder / "kill").exists()
    assert found.metrics["missing"] == []
    assert [row["run"] for row in found.result] == ["A", "B"]
