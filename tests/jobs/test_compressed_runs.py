"""Runs whose model folders store zeros as bits: what they hold, what is measured, and that every command reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from equivalence import randomized
from PIL import Image
from safetensors.torch import load_file

import prunekit as pk
from prunekit.cli import cli
from prunekit.models.bitmask import is_compressed, write_tensors
from prunekit.models.zoo import build_model
from prunekit.report.headline import compared
from prunekit.settings.inputs import ModelSettings

SIZES = ("plain_bytes", "bitmask_bytes", "plain_compressed_bytes", "bitmask_compressed_bytes")
RECIPE = """
name: zeros
model: {name: resnet8, zoo: cifar, weights: {weights}}
data: {image_size: 8, batch: 200}
prune: {budget: {macs: 0.7}, criterion: l2}
calibration: {images: 64}
finetune: {epochs: 0}
control: false
deploy: {fold_batchnorm: true}
compress: true
latency: {batches: [1], repeats: 5, explain: false}
threads: 1
device: cpu
"""


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def zeros(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with `compress: true`, from weights of which half are zeros."""
    place = tmp_path_factory.mktemp("zeros")
    model = randomized(build_model(ModelSettings("resnet8", "cifar"), num_classes=10))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter[torch.rand(parameter.shape) < 0.5] = 0
    assert write_tensors(model.state_dict(), place / "weights.safetensors", compress=True)
    (place / "zeros.yaml").write_text(RECIPE.replace("{weights}", str(place / "weights.safetensors")))
    run("finetune", place / "zeros.yaml", "--output", place / "runs")
    (folder,) = (place / "runs" / "zeros").glob("2*")
    return folder


def saved_plain(folder: Path, path: Path) -> Path:
    """The same model in a folder that is not compressed."""
    manifest, interface = json.loads((folder / "prunekit.json").read_text()), pk.interface(folder)
    settings = ModelSettings(**manifest["build"])
    parts = {"preprocessing": interface.preprocessing, "classes": interface.classes, "task": interface.task}
    return pk.save(pk.load(folder), path, pk.load_plan(folder), build=settings, **parts)


@pytest.mark.slow
def test_both_folders_of_a_run_are_compressed_and_the_same_models(zeros: Path, tmp_path: Path) -> None:
    for name in ("model", "deployed"):
        assert is_compressed(zeros / name / "model.safetensors")
        plain = saved_plain(zeros / name, tmp_path / name)
        assert not is_compressed(plain / "model.safetensors")
        found, wanted = (pk.load(folder).state_dict() for folder in (zeros / name, plain))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
        metrics = json.loads((zeros / "metrics.json").read_text())["pruned" if name == "model" else name]
        assert metrics["size_bytes"] == (zeros / name / "model.safetensors").stat().st_size == metrics["bitmask_bytes"]
        assert metrics["plain_bytes"] == (plain / "model.safetensors").stat().st_size


@pytest.mark.slow
def test_sizes_are_in_the_results_and_the_report(zeros: Path) -> None:
    metrics = json.loads((zeros / "metrics.json").read_text())
    assert metrics["dense"]["size_bytes"] == pytest.approx(metrics["dense"]["plain_bytes"], rel=0.02)
    for name in ("dense", "pruned", "deployed"):
        assert metrics[name]["compressor"] == pk.stored_sizes(torch.nn.Linear(1, 1)).compressor
        assert 0.5 < metrics[name]["bitmask_bytes"] / metrics[name]["plain_bytes"] < 0.75
    assert not [text for text in metrics["shortfalls"] if "files of" in text]
    table = pd.read_csv(zeros / "results.csv").set_index("model")
    for size in SIZES:
        assert list(table[size]) == [metrics[name][size] for name in table.index]
    rows = {row.label: row.cells for row in compared(metrics)}
    by = metrics["pruned"]["compressor"]
    labels = [f"Weights file, {form}{made}" for form in ("plain", "zeros as bits") for made in ("", f", by {by}")]
    assert [label for label in rows if label.startswith("Weights file")] == labels
    assert all(len(rows[label]) == 3 for label in labels)
    assert all(label in (zeros / "report.html").read_text(encoding="utf-8") for label in labels)


@pytest.mark.slow
def test_every_command_reads_the_folder(zeros: Path, tmp_path: Path) -> None:
    folder, plain = zeros / "model", saved_plain(zeros / "model", tmp_path / "plain")
    image = tmp_path / "image.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8), np.uint8)).save(image)
    assert run("predict", folder, image)["top"] == run("predict", plain, image)["top"]
    metrics = json.loads((zeros / "metrics.json").read_text())
    assert run("evaluate", folder)["top1"] == metrics["pruned"]["top1"]
    assert run("inspect", folder)["params"] == metrics["pruned"]["params"]
    quick = ("--repeats", "5", "--device", "cpu")
    assert run("bench", folder, "--batch", "1", *quick)
    assert run("explain", folder, *quick)
    run("export", folder, "--to", "standalone", "--output", tmp_path / "alone")
    assert load_file(tmp_path / "alone" / "model.safetensors").keys() == pk.load(folder).state_dict().keys()
