"""Whole jobs on images without labels: what is learned and measured is what the dense model answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from efforts import DRAWN
from process_group import together
from resume_jobs import require_same_tables, require_same_tensors
from training_models import Ends
from unlabeled_jobs import RECIPE, evaluated, in_group, job, own, ran, written

import prunekit
from prunekit.cli import cli
from prunekit.compaction.model_folder import read_manifest
from prunekit.data.sources import load_splits
from prunekit.errors import RecipeError, UsageError
from prunekit.jobs.analyses.evaluate import evaluate
from prunekit.jobs.run.job_subject import prepare
from prunekit.jobs.run.subject_sources import resolve
from prunekit.jobs.stages.calibration_stage import calibrate
from prunekit.measure.measurement_effort import effort_of
from prunekit.models.zoo import load_factory
from prunekit.recipe.loading import load
from prunekit.report.pages.run_page import write_report
from prunekit.settings.train import TrainSettings

NOTE = "no labels are read: the dense model's answers take their place"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("photographer"))


Run = tuple[Path, dict[str, Any], list[str]]


@pytest.fixture(scope="module")
def finished(home: Path) -> Run:
    return ran(home, home / "runs")


@pytest.mark.slow
def test_a_folder_of_images_is_enough(home: Path, finished: Run) -> None:
    folder, metrics, log = finished
    assert sum(line.startswith(f"data: {NOTE}") for line in log) == 1
    dense, pruned = (metrics["accuracy"][name] for name in ("dense", "pruned"))
    assert (dense["agreement"], dense["correct"], dense["n_test"]) == (100.0, 18, 18)
    assert dense["low"] < 100 == dense["high"]
    assert dense["chance"] < 60  # several answers

    small, net = (
        prunekit.load(folder / "model", model=load_factory(own(home).model or "")),
        load_factory(f"{own(home).model}"),
    )
    images = load_splits(job(home, home).data).test.fetch(torch.arange(18))[0]
    with torch.no_grad():
        same = int((small(images).argmax(1) == net(images).argmax(1)).sum())
    assert pruned["correct"] == same
    assert pruned["agreement"] == pytest.approx(100 * same / 18)
    assert small[0].out_channels == 4
    assert read_manifest(folder / "model")["interface"]["classes"] == ["0", "1", "2"]
    history = pd.read_csv(folder / "history.csv")
    assert {"train_agreement", "validation_agreement"} < set(history.columns)
    with effort_of(DRAWN):
        write_report(folder)
    page = (folder / "report.html").read_text()
    for text in (
        "Agreement with the dense model on the test images",
        "No labels are read: the dense",
        "95 % Wilson intervals",
    ):
        assert text in page
    assert "top-1" not in page.lower()


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_as_one_that_was_not(home: Path, finished: Run, tmp_path: Path) -> None:
    output = tmp_path / "runs"
    with pytest.raises(Ends):
        ran(home, output, "data.workers=1", stop_after=1)
    folder, metrics, _ = ran(home, output, "data.workers=1")
    assert metrics["resumed"] == 1
    assert metrics["accuracy"] == finished[1]["accuracy"]
    require_same_tensors(finished[0], folder, "model/model", "checkpoints/pruned")
    require_same_tables(finished[0], folder, "history")


@pytest.mark.slow
def test_evaluation_asks_the_dense_model_of_the_recipe(home: Path, finished: Run) -> None:
    folder, metrics, _ = finished
    alone, said = evaluated(home, folder)
    reached = metrics["accuracy"]["pruned"]
    assert {key: alone[key] for key in reached} == reached
    assert "agreement with the dense model" in said
    assert NOTE[0].upper() + NOTE[1:] in said
    settings = job(home, home)
    target = resolve(folder / "model", factory=own(home).model)
    with pytest.raises(UsageError, match="the dense model's outputs: give the recipe that has it"):
        evaluate(target, settings.known_data, torch.device("cpu"))
    dense = evaluate(prepare(settings, own(home)), None, torch.device("cpu"))
    assert dense.scores.values == {"agreement": 100.0}


@pytest.mark.slow
def test_two_processes_find_the_same_answers(home: Path, finished: Run, tmp_path: Path) -> None:
    alone = evaluated(home, finished[0])
    for told, metrics in together(2, tmp_path / "meet", in_group, home, tmp_path / "runs", finished[0]):
        assert told == alone
        assert metrics["accuracy"]["dense"] == finished[1]["accuracy"]["dense"]
        assert metrics["accuracy"]["pruned"]["n_test"] == 18
        assert metrics["environment"]["processes"] == 2


@pytest.mark.slow
def test_pruning_and_calibration_need_no_labels_either(home: Path, tmp_path: Path) -> None:
    _, metrics, log = ran(
        home, tmp_path / "runs", "prune.criterion=elimination", "calibration.images=30", training=False
    )
    assert metrics["accuracy"]["dense"]["agreement"] == 100
    assert any(NOTE in line for line in log)
    settings = job(home, tmp_path)
    assert len(calibrate(settings, log=lambda line: None, own=own(home)).stats) > 0
    invoked = CliRunner().invoke(cli, ["evaluate", str(home / "recipe.yaml"), "--model", str(own(home).model),
                                       f"data.root={home / 'photos'}", f"output={tmp_path}"])  # fmt: skip
    assert invoked.exit_code == 0, invoked.output
    assert "agreement with the dense model 100.00 %" in invoked.output


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("distill: auto", "distill: null", r":7:42: finetune\.distill: expected a mapping such as \{\}, .*got null"),
        ("distill: auto", "label_smoothing: 0.1", r":7:50: finetune\.label_smoothing: expected 0, because .*got 0\.1"),
        ("distill: auto", "distill: {labels: 0.5}", r":7:51: finetune\.distill\.labels: expected 0, .*got 0\.5"),
        ("labels: false", "labels: 0", r":4:51: data\.labels: "),
        (
            "name: small",
            "name: small\ntask: segmentation",
            r"data\.labels: expected true, because task is 'segmentation'",
        ),
        (
            "budget:",
            "criterion: taylor, budget:",
            r":6:20: prune\.criterion: expected one without gradients .*elimination",
        ),
        ("device: cpu", "baseline: {epochs: 1}", r":10:11: baseline: expected null, because .*give model\.weights"),
        (
            "{name: own, zoo: own}",
            "{name: resnet18}",
            r"model\.weights: expected trained weights, because data\.labels",
        ),
        (
            "device: cpu",
            "sparsify: {distill: null, regularize: {method: bn_l1}}",
            r":10:21: sparsify\.distill: expected a mapping",
        ),
    ],
)
def test_what_needs_labels_is_refused_where_the_recipe_says_it(
    old: str, new: str, expected: str, tmp_path: Path
) -> None:
    assert old in RECIPE
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace(old, new))
    with pytest.raises(RecipeError, match=expected):
        load(tmp_path / "recipe.yaml")


def test_the_same_is_refused_in_python(home: Path, tmp_path: Path) -> None:
    settings = job(home, tmp_path)
    for changes, expected in (
        ({"finetune": TrainSettings(epochs=1, distill=None)}, r"finetune\.distill: expected a mapping"),
        ({"finetune": replace(settings.finetune, label_smoothing=0.1)}, r"finetune\.label_smoothing: expected 0"),
        ({"baseline": TrainSettings(epochs=1)}, "baseline: expected none, because the targets"),
        ({"prune": replace(settings.prune, criterion="taylor")}, r"prune\.criterion: expected one without gradients"),
    ):
        with pytest.raises(UsageError, match=expected):
            prepare(replace(settings, **changes), own(home))
