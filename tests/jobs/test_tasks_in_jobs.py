"""Whole jobs of tasks other than classifying images: trained, pruned, fine-tuned, compacted, measured and reported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from efforts import DRAWN
from task_sources import IGNORED, Segmenter, bert, docstrings, regressor, zeros_and_ones
from torch import Tensor, nn
from torch.utils.data import DataLoader

import prunekit
from prunekit.cli import cli
from prunekit.compaction.model_folder import read_manifest
from prunekit.data.user_data import sample_splits
from prunekit.errors import ArtifactError, DataError, UsageError
from prunekit.jobs.analyses.bench import bench_targets
from prunekit.jobs.analyses.evaluate import evaluate
from prunekit.jobs.finetune import finetune
from prunekit.jobs.run.command_subject import Own
from prunekit.jobs.run.subject_sources import resolve
from prunekit.measure.measurement_effort import effort_of
from prunekit.report.headline import compared
from prunekit.report.pages.run_page import write_report
from prunekit.settings.calibration import CalibrationSettings, RepairSettings
from prunekit.settings.deployment import LatencySettings
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.train import DistillSettings, TrainSettings
from prunekit.tasks.classification import TEXT_CLASSIFICATION
from prunekit.tasks.segmentation import SEGMENTATION
from prunekit.utils.files import with_checksum
from prunekit.utils.inputs import inputs_as_example

FILE = Path(__file__).with_name("task_sources.py")
CPU = torch.device("cpu")
LAST = "bert.encoder.layer.1.output.LayerNorm"


def silent(message: str) -> None:
    """A log that nobody reads."""


def job(output: Path, training: TrainSettings, **changes: Any) -> JobSettings:
    settings = JobSettings(
        name="task",
        model=ModelSettings("own", "own"),
        data=DataSettings("own", batch=16),
        baseline=training,
        calibration=CalibrationSettings(images=64),
        prune=PruneSettings(budget=BudgetSettings(channels=0.5)),
        finetune=replace(training, epochs=2, distill=DistillSettings()),
        latency=LatencySettings(batches=(1,), repeats=5, explain=False),
        device="cpu",
        threads=1,
        output=output,
    )
    return replace(settings, **changes)


def pages_of(folder: Path) -> str:
    with effort_of(DRAWN):
        write_report(folder)
    return "".join((folder / name).read_text() for name in ("report.html", "metrics.json", "history.csv"))


def iou(predicted: np.ndarray, wanted: np.ndarray) -> float:
    """Mean intersection over union of sets of pixels, over the whole set at once, in percent."""
    seen = wanted != IGNORED
    sets = [((predicted == kind) & seen, (wanted == kind) & seen) for kind in range(3)]
    return float(100 * np.mean([(found & there).sum() / (found | there).sum() for found, there in sets]))


@pytest.mark.slow
def test_segmentation(tmp_path: Path) -> None:
    training = TrainSettings(epochs=6, optimizer="adamw", lr=0.01)
    prune = PruneSettings(budget=BudgetSettings(channels=0.5), criterion="elimination")
    repair = RepairSettings(joint_steps=0)
    settings = job(tmp_path, training, task="segmentation", prune=prune, repair=repair)
    settings = replace(settings, finetune=replace(settings.finetune, label_smoothing=0.02))
    log: list[str] = []
    own = Own(f"{FILE}:Segmenter", f"{FILE}:zeros_and_ones")
    run = finetune(settings, log=log.append, own=own, finish=partial(write_report, state="finished"))

    small = prunekit.load(run.folder / "model", model=Segmenter())
    assert (small.down[0].out_channels, small.up[0].out_channels, small.out.in_channels) == (8, 16, 8)
    assert run.metrics["parity"]["max_relative_difference"] < 1e-9
    images, masks = zeros_and_ones()[1].tensors
    with torch.no_grad():
        predicted = small(images)["out"].argmax(1).numpy()
    reached = run.metrics["pruned"]["mean_iou"]
    assert reached == pytest.approx(iou(predicted, masks.numpy()), rel=1e-9)
    always_ground = iou(np.zeros_like(predicted), masks.numpy())
    assert always_ground < 34
    assert reached > 80  # L2 ranking without repair, the same otherwise, reaches less than 50
    figures = dict(run.metrics["accuracy"]["pruned"])
    assert figures.pop("chance") == pytest.approx(always_ground, rel=1e-9)
    assert figures.pop("at_chance") is False
    assert figures.items() <= run.metrics["pruned"].items()

    history = pd.read_csv(run.folder / "history.csv")
    assert {"train_mean_iou", "validation_mean_iou"} < set(history.columns)
    best = history[history["run"] == "baseline"]["validation_mean_iou"].max()
    dense = Segmenter()
    dense.load_state_dict(load_weights(run.folder))
    splits = sample_splits(dict(zip(("train", "test"), zeros_and_ones(), strict=True)), SEGMENTATION)
    images, masks = splits.validation.fetch(torch.arange(len(splits.validation)))
    with torch.no_grad():
        assert best == pytest.approx(iou(dense.eval()(images)["out"].argmax(1).numpy(), masks.numpy()), rel=1e-9)
    page = pages_of(run.folder)
    for text in ("Mean IoU on the test images", "Pixel accuracy on the test images", "Validation mean IoU"):
        assert text in page
    assert "top1" not in page
    assert "top-1" not in page.lower()
    assert any(line.startswith(f"test: pruned mean IoU {reached:.2f} %, pixel accuracy ") for line in log)


def load_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "checkpoints" / "dense.safetensors")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A job that trains a small BERT and prunes it by gradients of the task's loss."""
    training = TrainSettings(epochs=3, optimizer="adamw", lr=3e-3)
    prune = PruneSettings(budget=BudgetSettings(channels=0.5), criterion="taylor")
    settings = job(tmp_path_factory.mktemp("texts"), training, task="text_classification", prune=prune)
    settings = replace(settings, data=DataSettings("own", batch=32), finetune=replace(training, epochs=1))
    own = Own(f"{FILE}:bert", f"{FILE}:docstrings")
    return finetune(settings, log=silent, own=own)


def test_texts(texts: Any) -> None:
    small = prunekit.load(texts.folder / "model", model=bert())
    assert prunekit.load_plan(texts.folder).provenance["prune"]["criterion"] == "taylor"
    layer = small.bert.encoder.layer[0]
    assert layer.intermediate.dense.out_features == 32
    assert texts.metrics["parity"]["max_relative_difference"] < 1e-9
    assert texts.metrics["pruned"]["macs"] < 0.5 * texts.metrics["dense"]["macs"]
    rows = docstrings()[1].tensors
    with torch.no_grad():
        given = small(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
    reached = texts.metrics["accuracy"]["pruned"]
    assert reached["correct"] == int((given.argmax(1) == rows["labels"]).sum())
    assert reached["top1"] == pytest.approx(100 * reached["correct"] / len(rows["labels"]))
    commonest = float(rows["labels"].bincount().max()) / len(rows["labels"])
    assert reached["low"] > 100 * commonest + 5  # well above always saying the same, noise included
    assert [row.label for row in compared(texts.metrics)][:2] == ["Top-1 on the test texts", "Test texts"]
    example = read_manifest(texts.folder / "model")["example"]
    names = ["input_ids", "attention_mask"]
    assert example == {"shapes": [[1, 16], [1, 16]], "dtypes": ["int64", "int64"], "names": names}


@pytest.mark.slow
def test_a_model_folder_is_evaluated_on_texts(texts: Any) -> None:
    own = Own(f"{FILE}:bert", f"{FILE}:docstrings")
    target = resolve(texts.folder / "model", factory=own.model)
    found = evaluate(target, DataSettings("own"), CPU, own, "text_classification").figures()
    assert found["top1"] == texts.metrics["pruned"]["top1"]
    assert found["task"]["samples"] == "texts"
    assert found["macs"] == texts.metrics["pruned"]["macs"]
    timed = bench_targets([target], LatencySettings(batches=(2,), repeats=5), log=silent)
    assert timed.models[target.name]["macs"] == found["macs"]
    assert not timed.failures
    explained = CliRunner().invoke(cli, ["explain", target.name, "--model", f"{FILE}:bert", "--repeats", "5"])
    assert explained.exit_code == 0, explained.output
    assert "× faster [" in explained.output or "to settle it" in explained.output


def test_inputs_that_a_manifest_does_not_say_right(texts: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(texts.folder / "model", tmp_path / "model"))
    manifest = json.loads((folder / "prunekit.json").read_text())
    manifest["example"]["dtypes"] = ["int64", "nothing"]
    (folder / "prunekit.json").write_text(json.dumps(with_checksum(manifest)))
    with pytest.raises(ArtifactError, match=r"as many dtypes such as int64, got .*'nothing'.*damaged"):
        resolve(folder, factory=f"{FILE}:bert")


@pytest.mark.slow
def test_one_call_and_calibration_on_batches_of_several_inputs(texts: Any) -> None:
    """A loader's mappings, taken apart by the task, do what positional arguments do."""
    model = bert()
    model.load_state_dict(load_weights(texts.folder), strict=False)
    model.eval()
    loader = DataLoader(docstrings()[0], 32)
    task = TEXT_CLASSIFICATION
    pairs = [task.unpack(batch) for _, batch in zip(range(3), loader, strict=False)]
    stats = prunekit.calibrate(model, pairs)
    same = prunekit.calibrate(model, [(inputs_as_example(model, inputs), labels) for inputs, labels in pairs])
    assert stats.keys() == same.keys()
    assert all((stats[key].mean == same[key].mean).all() for key in stats)
    with torch.no_grad():
        outputs = [(model.bert(**inputs).last_hidden_state, inputs["attention_mask"].bool()) for inputs, _ in pairs]
        hidden = torch.cat([states[counted] for states, counted in outputs])  # padding counts for nothing
    last = [layer for key, layer in stats.items() if (key.module, key.side) == (LAST, "output")]
    assert last[0].mean == pytest.approx(hidden.double().mean(0).numpy(), abs=1e-5)

    found = prunekit.prune(
        model, calibration=loader, channels=0.6, task=task, images=64, repair=RepairSettings(joint_steps=0)
    )
    assert found.max_relative_difference < 1e-9
    assert found.repair is not None
    assert found.repair.after < found.repair.before
    assert found.model.bert.encoder.layer[0].intermediate.dense.out_features < 64
    with pytest.raises(DataError, match=r"got dict \{labels: .*; say how it comes apart: task="):
        prunekit.prune(nn.Sequential(nn.Linear(16, 4)), calibration=loader, channels=0.6)


RECIPE = """
name: heights
model: {name: resnet18}
data: {batch: 32}
baseline: {epochs: 4, optimizer: adamw, lr: 0.01}
calibration: {images: 64}
prune: {budget: {channels: 0.5}}
finetune: {epochs: 3, optimizer: adamw, lr: 0.01}
latency: {batches: [1], repeats: 5, explain: false}
device: cpu
threads: 1
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    (tmp_path / "heights.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    code = ["--model", f"{FILE}:regressor", "--data", f"{FILE}:heights"]
    return lambda command, *more: CliRunner().invoke(cli, [command, *more, *code])


@pytest.mark.slow
def test_a_task_of_the_users_own_from_the_command_line(run: Callable[..., Any]) -> None:
    own = ("--task", f"{FILE}:regression")
    done = run("finetune", "heights.yaml", *own, "--json")
    assert done.exit_code in (0, 1), done.output  # 1: a net as small as this may be no faster
    found = json.loads(done.stdout)
    assert found["task"] == {
        "name": "regression", "samples": "samples", "interval": None,
        "scores": [{"name": "r2", "label": "explained variance", "unit": "%"}],
    }  # fmt: skip
    folder = Path(found["folder"])
    assert f"task: {FILE}:regression" in (folder / "recipe.yaml").read_text()
    assert prunekit.load(folder / "model", model=regressor())[0].out_channels == 8
    assert found["pruned"]["r2"] > 20
    page = pages_of(folder)
    assert "Explained variance on the test samples" in page
    assert "top1" not in page

    again = run("evaluate", str(folder / "model"), *own)
    assert f"explained variance {found['pruned']['r2']:.2f} % (of 200 test samples)" in again.stdout, again.output


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("--task", f"{FILE}:heights"),
            "expected a prunekit.tasks.task.Task, or a function that returns one, got tuple",
        ),
        (("task=sementation",), "expected the name of a task, or file.py:object, got 'sementation'; did you mean 'seg"),
        (("--task", f"{FILE}:regression", "finetune.distill={}"), "task 'regression' has none"),
        (("--task", f"{FILE}:regression", "finetune.mixup=0.2"), "mix the labels of images"),
    ],
)
def test_what_does_not_go_with_a_task(run: Callable[..., Any], more: tuple[str, ...], message: str) -> None:
    result = run("finetune", "heights.yaml", *more)
    assert result.exit_code == 2
    assert message in result.output


def test_a_task_wants_data_of_its_own(tmp_path: Path) -> None:
    settings = job(tmp_path, TrainSettings(epochs=1), task="segmentation", data=DataSettings())
    with pytest.raises(
        UsageError, match=r"task is 'segmentation' and data\.source is 'digits', which holds images with"
    ):
        finetune(settings, log=silent, own=Own(f"{FILE}:Segmenter"))
