"""Frontiers: points of one model, choices among them, jobs that are resumed, and their page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from own_jobs import MINE, OWN, RECIPE, write_job
from torch import nn

import prunekit as pk
from prunekit.cli import cli
from prunekit.errors import UsageError
from prunekit.jobs import frontier as frontiers
from prunekit.jobs.analyses.frontier import Frontier, FrontierPoint
from prunekit.jobs.frontier import analyze
from prunekit.measure.score_drop import Drop
from prunekit.recipe.loading import load, own_overrides
from prunekit.tasks.task import Score


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path, RECIPE.replace("macs: 0.5", "macs: 0.5, max_drop: 0.02"))
    return tmp_path


def made_up(*lost: float, error: float = 0.001, speedups: tuple[float, ...] = ()) -> Frontier:
    """A frontier whose points lose so much, from 90 % of the MACs down in steps of 10 %."""
    about = Score("top1", "top-1", float)
    points = [
        FrontierPoint(
            0.9 - number / 10, 0.9 - number / 10, 0.95 - number / 10, 0,
            Drop(90 - 100 * drop, 90.0, drop, error, 50, 1000, 1.0, about), Path(str(number)),
            (speedups[number], speedups[number], speedups[number]) if speedups else None,
        )
        for number, drop in enumerate(lost)
    ]  # fmt: skip
    return Frontier("Net", tuple(points))


def test_points_are_what_prune_makes_of_the_same_samples() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
    x, held = torch.randn(256, 8), torch.randn(400, 8)
    found = pk.frontier(model, calibration=x, held_out=held, points=[0.8, 0.4], timed=False, progress=False)
    for point, macs in zip(found.points, (0.8, 0.4), strict=True):
        alone = pk.prune(model, calibration=x, macs=macs, progress=False)
        assert (point.result.plan.keep == alone.plan.keep).all()  # type: ignore[union-attr]
        with torch.no_grad():
            assert torch.equal(point.result.model(held), alone.model(held))  # type: ignore[union-attr]
            same = (alone.model(held).argmax(1) == model(held).argmax(1)).double().mean()
        assert point.drop.drop == pytest.approx(1 - float(same))
    assert found.at(macs=0.5) is found.points[1].result


def test_budgets_hold_for_every_point_and_points_descend() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
    given: dict[str, Any] = {
        "calibration": torch.randn(256, 8), "held_out": torch.randn(400, 8), "timed": False, "progress": False,
    }  # fmt: skip
    left = [point.macs for point in pk.frontier(model, macs=0.15, points=3, **given).points]
    assert left == sorted(left, reverse=True)
    assert max(left) <= 0.15
    with pytest.raises(UsageError, match=r"expected shares up to 0\.6, which budgets allow, got 0\.8"):
        pk.frontier(model, macs=0.6, points=[0.8, 0.5], **given)
    coarse = pk.frontier(model, round_to=32, points=6, **given)  # of which there are few widths
    assert len({point.macs for point in coarse.points}) == len(coarse.points) < 6


@pytest.mark.parametrize("points", [1, 0, "8", 3.0, [], [0.5, 1.5], [0.5, 0.5], ["half"], None])
def test_points_that_are_none_are_refused(points: Any) -> None:
    with pytest.raises(UsageError, match="points: expected a number of at least 2, or different shares"):
        pk.frontier(nn.Linear(2, 2), calibration=torch.randn(300, 2), points=points)


def test_a_drop_is_met_by_the_narrowest_whose_wider_ones_meet_it_too() -> None:
    found = made_up(0.001, 0.004, 0.02, 0.005)  # the last is luck
    assert found.at(drop=0.01) == Path("1")
    assert found.at(drop=0.03) == Path("3")
    with pytest.raises(UsageError, match=r"drop=0.001: the first one, with MACs 90.0 % left, may lose 0.27 points"):
        found.at(drop=0.001)


def test_other_figures_are_met_by_the_widest() -> None:
    found = made_up(0.0, 0.01, 0.03, speedups=(1.1, 1.6, 2.4))
    assert (found.at(macs=0.85), found.at(params=0.8), found.at(speedup=1.5)) == (Path("1"), Path("2"), Path("1"))
    with pytest.raises(UsageError, match=r"speedup=3: they reach from 1.1 to 2.4"):
        found.at(speedup=3)
    with pytest.raises(UsageError, match="nothing was timed"):
        made_up(0.0, 0.01).at(speedup=2)
    for wrong in ({"macs": 50}, {"macs": "half"}, {"drop": 1}, {"speedup": 0}):
        with pytest.raises(UsageError, match=r"at: (macs|drop|speedup): expected"):
            found.at(**wrong)  # type: ignore[arg-type]
    for wrong in ({}, {"size": 1.0}, {"macs": 0.5, "drop": 0.1}):
        with pytest.raises(UsageError, match="at: expected one of macs, params, speedup, drop"):
            found.at(**wrong)


def test_the_knee_is_where_the_loss_begins_to_grow() -> None:
    bent = made_up(0.0, 0.001, 0.002, 0.05, 0.2, error=0.002)
    assert bent.knee is bent.points[3]
    assert bent.advice == (
        "Down to MACs 70.0 % left, no loss can be told by 1,000 samples. Below 60.0 %, where it is 5.00 points, the "
        "loss grows faster: 15.00 points more down to 50.0 %."
    )
    assert made_up(0.0, 0.1).knee is None
    assert made_up(0.0, 0.001, 0.002, 0.05, 0.2, error=0.2).knee is None  # noise
    assert made_up(0.1, 0.2, 0.3).advice == "The score falls evenly: no point stands out."


def test_an_interrupted_job_goes_on_with_the_points_that_are_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load("mine.yaml", own_overrides(model="own.py:net"))
    whole = analyze(job, points=3, log=lambda line: None, own=OWN)
    made: list[float] = []
    plan_at = frontiers.at_share

    def at_share(search: Any, inputs: Any, share: float) -> Any:
        if made:
            raise KeyboardInterrupt
        made.append(share)
        return plan_at(search, inputs, share)

    monkeypatch.setattr(frontiers, "at_share", at_share)
    with pytest.raises(KeyboardInterrupt):
        analyze(job, points=3, log=lambda line: None, own=OWN)
    monkeypatch.setattr(frontiers, "at_share", lambda *of: (made.append(of[2]), plan_at(*of))[1])
    resumed = analyze(job, points=3, log=lambda line: None, resume="auto", own=OWN)
    assert len(made) == 3  # the first is not made again
    assert resumed.folder != whole.folder
    timeless = {"speedup", "speedup_low", "speedup_high", "stable"}
    for one, other in zip(whole.result.rows(), resumed.result.rows(), strict=True):
        assert {key: one[key] for key in one.keys() - timeless} == {key: other[key] for key in one.keys() - timeless}
    weights = [sorted((run.folder / "points").glob("*/model.safetensors")) for run in (whole, resumed)]
    assert len(weights[0]) == 3
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(*weights, strict=True))


@pytest.mark.usefixtures("drawn")
def test_the_command_writes_a_page_and_models_that_load(folder: Path) -> None:
    done = CliRunner().invoke(cli, ["frontier", *MINE, "--points", "0.8,0.5", "--json"])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    run = Path(figures["folder"])
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Score against speed" in page
    assert "points/0.8<" in page
    assert figures["asked"] == {"macs": 0.5, "max_drop": 0.02}  # mark the picture, and bind no point
    assert [row["macs"] < share for row, share in zip(figures["points"], (0.81, 0.51), strict=True)] == [True, True]
    assert figures["points"][0]["macs"] > 0.6
    small = pk.load(run / "points" / "0.5", lambda: load_net(folder))
    assert small(torch.zeros(1, 3, 8, 8)).shape == (1, 10)


def load_net(folder: Path) -> nn.Module:
    names: dict[str, Any] = {}
    exec((folder / "own.py").read_text(encoding="utf-8"), names)
    return names["net"]()  # type: ignore[no-any-return]


def test_the_command_prunes_to_a_drop(folder: Path) -> None:
    done = CliRunner().invoke(cli, ["prune", *MINE, "--max-drop", "0.5", "--json"])
    assert done.exit_code in (0, 1), done.output
    plan = json.loads(done.stdout)["plan"]
    assert plan["max_drop"]["most"] <= 0.5
    assert plan["macs_left"] < 0.98
    dry = CliRunner().invoke(cli, ["prune", *MINE, "--max-drop", "0.5", "--dry-run"])
    assert dry.exit_code == 2
    assert "prunekit prune RECIPE" in dry.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--points", "1"], "points: expected a number of at least 2"),
        (["--points", "0.5,1.5"], "different shares above 0 and below 1"),
        (["--points", "many"], "--points: expected a number such as 8"),
    ],
)
def test_wrong_points_are_said_before_anything_runs(folder: Path, arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(cli, ["frontier", *MINE, *arguments])
    assert done.exit_code == 2
    assert said in done.output
    assert not (folder / "runs").exists()
