"""Scores of what is shipped: where a job exports in int8, searches and frontiers judge the file it would deliver."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import prunekit as pk
from prunekit.backends.files.exported_model import open_exported
from prunekit.backends.onnx_runtime import OnnxRuntime
from prunekit.cli import cli
from prunekit.errors import PlanError, UsageError
from prunekit.jobs import frontier as frontiers
from prunekit.jobs.analyses.frontier import Frontier, FrontierPoint
from prunekit.jobs.finetune import prune_job
from prunekit.jobs.frontier import analyze
from prunekit.jobs.run.job_subject import JobSubject, prepare
from prunekit.jobs.stages import deployment_stage as deployment
from prunekit.jobs.stages.repair_stage import held_out
from prunekit.measure.score_drop import Drop, HeldOut
from prunekit.recipe.loading import load, own_overrides
from prunekit.report.pages.run_page import write_report
from prunekit.settings.deployment import QuantizeSettings
from prunekit.tasks.detection import DETECTION
from prunekit.tasks.task import Score

pytest.importorskip("onnxruntime")

RECIPE = """
name: mine
data: {image_size: 8, batch: 64, validation_share: 0.4, test_share: 0.1}
calibration: {images: 48}
prune: {budget: {max_drop: 0.12}, criterion: elimination, scope: per_mac, round_to: 1}
repair: {}
finetune: {epochs: 0}
latency: {batches: [1], threads: [1], repeats: 5, explain: false}
export: [pt2, onnx]
quantize: {images: 64, max_drop: null}
device: cpu
threads: 1
"""
CODE = '''
import torch
from torch import nn

from prunekit.data.loader import batches
from prunekit.data.sources import load_splits
from prunekit.settings.inputs import DataSettings


def uneven():
    """Random features of digits, and least squares: one scale for units of such different sizes rounds many off."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10)).eval()
    train = load_splits(DataSettings(image_size=8, validation_share=0.4, test_share=0.1)).train
    images, labels = next(iter(batches(train, len(train), shuffle_seed=None)))
    with torch.no_grad():
        net[2].weight.copy_(torch.logspace(0, 2, 48)[torch.randperm(48)])
        units = net[:-1](images)
        sizes = units.std(0)
        units = units / sizes
        gram = units.T @ units + 1e-4 * len(units) * torch.eye(48)
        answers = torch.linalg.solve(gram, units.T @ (nn.functional.one_hot(labels, 10) - 0.1))
        net[-1].weight.copy_((answers / sizes[:, None]).T)
        net[-1].bias.zero_()
    return net


class Doubling(nn.Sequential):
    """Its Python reads a number of the run, which no exporter follows."""

    def forward(self, x):
        out = super().forward(x)
        return 2 * out if out.mean().item() > 1e9 else out


def branching():
    return Doubling(*uneven())
'''
OWN = pk.Own("own.py:uneven")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("int8")
        patch.chdir(path)
        (path / "own.py").write_text(CODE, encoding="utf-8")
        (path / "mine.yaml").write_text(RECIPE, encoding="utf-8")
        yield path


def job(*changes: str) -> Any:
    return load("mine.yaml", [*own_overrides(model="own.py:uneven"), *changes])


def judge() -> tuple[JobSubject, HeldOut]:
    prepared = prepare(job(), OWN)
    return prepared, held_out(prepared, prepared.model)


@pytest.fixture(scope="module")
def pruned(folder: Path) -> Any:
    lines = list[str]()
    finished = prune_job(
        job("deploy.fold_batchnorm=true"),
        log=lines.append,
        own=OWN,
        finish=lambda run: write_report(run, state="finished"),
    )
    return finished, lines


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    return analyze(
        job(), points=[0.8, 0.5], log=lambda line: None, own=OWN, finish=lambda run: write_report(run, state="finished")
    )


@pytest.mark.slow
def test_max_drop_is_of_the_file_that_is_delivered(pruned: Any) -> None:
    finished, lines = pruned
    files, found = judge()[1], finished.metrics["plan"]["max_drop"]
    shipped = files.drop(files.score(open_exported(finished.folder / "exports/model-int8.onnx")), files.halves[1])
    assert {name: found[name] for name in ("score", "dense", "drop", "most", "samples")} == {
        name: getattr(shipped, name) for name in ("score", "dense", "drop", "most", "samples")
    }
    assert found["most"] <= 0.12
    assert files.drop(files.score(finished.model()), files.halves[1]).score != shipped.score
    assert " in int8: " in found["said"]
    assert found["said"] in (finished.folder / "report.html").read_text(encoding="utf-8").replace("&gt;", ">")
    assert any("judged as files of onnx in int8; without pruning: top-1" in line for line in lines)
    assert sum("itself reaches" in line for line in lines) == 3  # test samples see what is delivered, no candidate


@pytest.mark.slow
def test_where_int8_costs_much_a_wider_model_is_delivered(pruned: Any) -> None:
    plain = prune_job(job("quantize=null", "export=[]"), log=lambda line: None, own=OWN, finish=None)
    left = [run.metrics["plan"]["macs_left"] for run in (plain, pruned[0])]
    assert left[1] > left[0] + 0.05
    assert "int8" not in plain.metrics["plan"]["max_drop"]["said"]
    prepared, files = judge()
    as_file, problem = deployment.Int8Copies(prepared, files, "onnx", lambda line: None).drop(plain.model())
    assert as_file is not None
    assert not problem
    assert plain.metrics["plan"]["max_drop"]["most"] <= 0.12 < as_file.most


@pytest.mark.slow
def test_what_cannot_be_had_in_int8_says_what_int8_costs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10))
    monkeypatch.setattr(
        deployment.Int8Copies, "score", lambda self, model: replace(self._held_out.score(silent), dtype="int8")
    )
    said = r"even .* may lose more: top-1 .* in int8: .*; without pruning: top-1 .* in int8: .* points lower on 719"
    with pytest.raises(PlanError, match=said):
        prune_job(job(), log=lambda line: None, own=OWN, finish=None)
    monkeypatch.setattr(deployment.Int8Copies, "score", lambda self, model: no_file())
    with pytest.raises(PlanError, match=r"^int8: too much is lost; without pruning: int8: too much is lost$"):
        prune_job(job(), log=lambda line: None, own=OWN, finish=None)


def no_file() -> None:
    raise PlanError("int8: too much is lost")


@pytest.mark.slow
def test_points_are_judged_as_the_files_that_are_exported_of_them(whole: Any, tmp_path: Path) -> None:
    prepared, files = judge()
    for point in whole.result.points:
        asked: dict[str, Any] = {"quantize": QuantizeSettings(images=64, max_drop=None), "timed": ()}
        path = tmp_path / f"{point.share}.onnx"
        asked |= {"dense": prepared.model, "recipe": job(), "own": OWN, "log": lambda line: None}
        exported = pk.export(point.result, path=path, **asked)
        alone = files.drop(files.score(open_exported(exported.int8.path)))
        assert replace(alone, dtype="int8") == point.int8
        assert point.int8.score != point.drop.score
    rows = [*csv.DictReader((whole.folder / "frontier.csv").read_text(encoding="utf-8").splitlines())]
    kept = json.loads((whole.folder / "frontier.json").read_text(encoding="utf-8"))
    for row, plain, point in zip(rows, kept["points"], whole.result.points, strict=True):
        low, high = point.int8.interval
        expected = {"int8_score": point.int8.score, "int8_drop": point.int8.drop, "int8_low": low, "int8_high": high}
        assert {name: plain[name] for name in expected} == expected
        assert {name: float(row[name]) for name in expected} == expected
    assert kept["dense_int8"]["int8_drop"] == whole.result.int8.drop
    printed = " ".join(str(whole.result).split())
    assert f"Without pruning: {whole.result.int8}" in printed
    assert "in int8 lower by" in printed
    assert whole.result.points[0].int8.with_interval in printed


@pytest.mark.slow
def test_the_page_has_a_line_and_columns_of_int8(whole: Any, drawn: None) -> None:
    page = write_report(whole.folder, state="finished").read_text(encoding="utf-8")
    assert page.count("as files in int8") == 1
    assert "speedup in float, times the dense model" in page
    for row in whole.result.rows():
        assert f'<td class="pruned">{row["int8_score"]:.2f} %</td>' in page
    figures = {**whole.metrics, "points": [{**row, "int8_score": None} for row in whole.result.rows()]}
    assert "in int8" not in frontiers_picture({**figures, "dense_int8": None})


def frontiers_picture(figures: dict[str, Any]) -> str:
    from prunekit.report.figures.charts import frontier

    return str(frontier(figures))


@pytest.mark.slow
def test_a_resumed_frontier_has_the_same_files(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, plan_at, again = (
        list[float](),
        frontiers.at_share,
        {"points": [0.8, 0.5], "log": lambda line: None, "own": OWN},
    )

    def at_share(search: Any, inputs: Any, share: float) -> Any:
        made.append(share)
        if len(made) == 2:
            raise KeyboardInterrupt
        return plan_at(search, inputs, share)

    monkeypatch.setattr(frontiers, "at_share", at_share)
    with pytest.raises(KeyboardInterrupt):
        analyze(job(), **again)  # type: ignore[arg-type]
    resumed = analyze(job(), resume="auto", **again)  # type: ignore[arg-type]
    assert made == [0.8, 0.5, 0.5]  # the first is not made again
    assert [point.int8 for point in resumed.result.points] == [point.int8 for point in whole.result.points]
    assert [point.drop for point in resumed.result.points] == [point.drop for point in whole.result.points]
    assert (resumed.result.int8, resumed.result.advice) == (whole.result.int8, whole.result.advice)


@pytest.mark.slow
def test_a_point_without_a_file_says_why_also_when_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    score = deployment.Int8Copies.score
    monkeypatch.setattr(
        deployment.Int8Copies,
        "score",
        lambda self, model: no_file() if model[1].out_features < 30 else score(self, model),
    )
    monkeypatch.setattr(frontiers, "measure_latency", no_time)
    with pytest.raises(KeyboardInterrupt):
        analyze(job("name=none"), points=[0.8, 0.5], log=lambda line: None, own=OWN)
    monkeypatch.setattr(frontiers, "measure_latency", lambda *_, **__: SimpleNamespace(speedup=[]))
    found = analyze(job("name=none"), points=[0.8, 0.5], log=lambda line: None, own=OWN, resume="auto").result
    assert [point.int8 is None for point in found.points] == [False, True]
    assert found.missed == ("50.0 % in int8: int8: too much is lost",)


def no_time(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_advice_says_what_int8_costs_at_the_point_it_names() -> None:
    about = Score("top1", "top-1", float)
    points = [
        FrontierPoint(
            left, left, left, 0, Drop(90 - 100 * drop, 90.0, drop, 0.001, 50, 1000, 1.0, about), Path(str(left)),
            int8=Drop(89 - 100 * drop, 90.0, drop + 0.01, 0.002, 50, 1000, 1.0, about, "int8"),
        )
        for left, drop in ((0.8, 0.0), (0.6, 0.001), (0.4, 0.1))
    ]  # fmt: skip
    found = Frontier("Net", tuple(points))
    ends = "[0.70, 1.50]"
    assert found.knee is points[1]
    assert found.advice.endswith(
        f"In int8 the score at 60.0 % of the MACs is 1.10 {ends} points lower than the dense model's."
    )
    assert "In int8" not in Frontier("Net", tuple(replace(one, int8=None) for one in points)).advice


@pytest.mark.slow
def test_a_task_that_cannot_score_a_file_is_refused_before_anything_runs() -> None:
    prepared = prepare(job(), OWN)
    deployment.require_int8_scores(prepared, "max_drop")
    detecting = replace(prepared, splits=replace(prepared.splits, task=DETECTION))
    with pytest.raises(
        UsageError, match=r"^quantize: with it max_drop judges files in int8, and task 'detection' cannot score"
    ):
        deployment.require_int8_scores(detecting, "max_drop")
    deployment.require_int8_scores(replace(detecting, job=replace(job(), quantize=None)), "max_drop")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["frontier", "prune"])
def test_a_model_that_cannot_be_exported_is_refused_before_anything_runs(command: str) -> None:
    given = [command, "mine.yaml", "--model", "own.py:branching", "name=branching"]
    done = CliRunner().invoke(cli, given)
    assert done.exit_code == 2
    judged = "the frontier" if command == "frontier" else "max_drop"
    said = " ".join(done.output.split())
    assert f"quantize: with it {judged} judges files in int8: " in said
    assert f"; set quantize to null, and {judged} is of models in float" in said
    assert not Path("runs/branching").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["frontier", "prune"])
def test_files_that_cannot_be_made_here_are_refused_before_anything_runs(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnnxRuntime, "unquantizable", lambda self: "int8 for onnx needs more")
    given = [command, "mine.yaml", "--model", "own.py:uneven", "name=refused"]
    done = CliRunner().invoke(cli, given)
    assert done.exit_code == 2
    assert "int8 for onnx needs more" in done.output
    assert not Path("runs/refused").exists()
    bare = CliRunner().invoke(cli, [*given, "export=[pt2]"])
    assert bare.exit_code == 2
    assert "quantize: expected null, or onnx or openvino among the formats of export" in bare.output
