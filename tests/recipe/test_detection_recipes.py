"""Recipes of detectors, from their data to the finished report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from drawn_files import write_yolo

import prunekit as pk
from prunekit.cli import cli
from prunekit.data.drawn_shapes import DrawnShapes
from prunekit.errors import RecipeError
from prunekit.jobs.finetune import finetune
from prunekit.recipe.loading import load

pytest.importorskip("pycocotools")
TINY = [
    "data.image_size=64",
    "baseline.epochs=1",
    "finetune.epochs=1",
    "calibration.images=8",
    "latency.runtimes=[eager]",
    "latency.repeats=5",
    "latency.explain=false",
]
ON_SHAPES = ["data.source=shapes", "data.images=16", "data.batch=6", "data.workers=0"]


def run(name: str, tmp_path: Path, *overrides: str) -> tuple[pk.RunResult, list[str]]:
    lines: list[str] = []
    job = load(name, [*TINY, f"output={tmp_path / 'runs'}", *overrides])
    return finetune(job, log=lines.append), lines


def check(result: Any, classes: int) -> None:
    metrics = json.loads((result.folder / "metrics.json").read_text())
    assert [score["name"] for score in metrics["task"]["scores"]] == ["map", "map50"]
    pruned = metrics["pruned"]
    interval = metrics["accuracy"]["pruned"]
    assert {"map", "map50", "macs"} <= pruned.keys()
    assert 0 <= interval["low"] <= interval["high"] <= 100
    page = (result.folder / "report.html").read_text()
    assert "mAP@50:95" in page
    assert "top-1" not in page
    interface = json.loads((result.folder / "model" / "prunekit.json").read_text())["interface"]
    assert interface["task"] == "detection"
    assert len(interface["classes"]) == classes
    assert interface["preprocessing"]["padding"] == pytest.approx(114 / 255)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_ssdlite_on_shapes_and_the_commands_on_its_folder(tmp_path: Path) -> None:
    more = ["model.weights=null", "data.category_ids=false", "baseline.lr=0.002", "repair=null"]
    result, lines = run("ssdlite-coco", tmp_path, *ON_SHAPES, *more)
    check(result, 3)
    shown = json.loads((result.folder / "detections" / "detections.json").read_text())
    assert shown["models"] == ["dense", "pruned"]
    assert all(image["boxes"]["labeled"] and "pruned" in image["boxes"] for image in shown["images"])
    assert {image["picture"] for image in shown["images"]} == {
        path.name for path in (result.folder / "detections").glob("*.png")
    }
    page = (result.folder / "report.html").read_text()
    assert page.count('alt="Test image') == len(shown["images"]) > 0
    assert "95 % bootstrap intervals" in page
    assert any("pruned mAP@50:95" in line and "mAP@50 " in line for line in lines)
    folder, photo = str(result.folder / "model"), tmp_path / "photo.png"
    DrawnShapes(1, 64).read(0)[0].resize((200, 100)).save(photo)
    found = pk.predict(folder, photo, top=3)
    assert found.detections is not None
    assert len(found.rows()) == 3
    boxes = found.detections[0]["boxes"]
    assert boxes[:, 0::2].max() <= 200
    assert boxes[:, 1::2].max() <= 100
    assert boxes[:, 2].max() > 64
    assert {"sample", "rank", "class", "label", "score", "box"} == found.rows()[0].keys()
    said = CliRunner().invoke(cli, ["predict", folder, str(photo), "--json"])
    assert said.exit_code == 0, said.output
    assert len(json.loads(said.output)["detections"]) == 5
    recipe = tmp_path / "shapes.yaml"
    recipe.write_text(
        "name: a\ntask: detection\nmodel: {name: x, zoo: own}\nprune: {budget: {macs: 0.5}}\n"
        "data: {source: shapes, images: 16, image_size: 64, batch: 6}\n"
    )
    told = CliRunner().invoke(cli, ["evaluate", folder, "--recipe", str(recipe)])
    assert told.exit_code == 0, told.output
    assert "mAP@50:95" in told.output
    assert "of 5 test images" in told.output


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_yolo_on_a_folder_of_its_own_kind(tmp_path: Path) -> None:
    pytest.importorskip("ultralytics")
    root = write_yolo(tmp_path / "coco8", images=8, description=False)
    (root / "labels" / "train" / "001.txt").write_text("0 0.5 0.5 0.0 0.2\n1 0.5 0.5 0.3 0.4\n")
    result, lines = run("yolo-coco8", tmp_path, f"data.root={root}", "data.batch=3", "model.name=yolov8n")
    check(result, 80)
    assert any("boxes are empty or outside of their image, and left out" in line for line in lines)
    loaded = pk.load(result.folder / "model")
    output = loaded(torch.rand(1, 3, 64, 64))
    assert output[0].shape == (1, 84, 84)


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        ("yolo-coco8", ["data.source=digits"], "data.source: expected 'shapes', 'coco', 'yolo' or 'own', because task"),
        (
            "yolo-coco8",
            ["task=segmentation"],
            "task: expected 'detection', because data.source is 'yolo', which has box",
        ),
        (
            "yolo-coco8",
            ["data.category_ids=true"],
            "data.category_ids: expected nothing, because data.source is 'yolo'",
        ),
        ("resnet34", ["data.targets=[masks]"], "data.targets: expected nothing, because data.source is 'digits'"),
        (
            "ssdlite-coco",
            ["data.root=null"],
            "data.root: expected the path of the folder of a data set in the format of",
        ),
    ],
)
def test_contradictions_are_reported_with_the_recipe(recipe: str, overrides: list[str], expected: str) -> None:
    with pytest.raises(RecipeError, match=expected):
        load(recipe, overrides)
