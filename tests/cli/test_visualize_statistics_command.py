"""`prunekit visualize filters` and `histograms` on a run, and what they say to bad input."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image

import prunekit
from prunekit.cli import cli
from prunekit.errors import ArtifactError
from prunekit.jobs.run.baseline_cache import save_weights
from prunekit.models.zoo import build_model
from prunekit.report.pages.run_page import write_report

RECIPE = """
name: mine
model: {name: resnet8, zoo: cifar}
data: {image_size: 16}
baseline: {epochs: 1}
calibration: {images: 8}
device: cpu
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["visualize", *arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("statistics") / "run"
    settings = prunekit.ModelSettings("resnet8", "cifar")
    torch.manual_seed(0)
    model = build_model(settings, num_classes=None)
    found = prunekit.prune(model, (torch.randn(1, 3, 16, 16),), channels=0.5)
    prunekit.save(found.model, folder / "model", found.plan, build=settings)
    found.plan.save(folder)
    save_weights(folder / "checkpoints" / "dense.safetensors", model)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "status.json").write_text('{"state": "finished"}')
    (folder / "scores.csv").write_text("group,channel,score,kept\nconv1,0,0.5,1\nconv1,1,0.25,0\n")
    return folder


def test_filters_of_a_run_dense_beside_pruned(folder: Path) -> None:
    done = run("filters", str(folder), "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["layer"], result["filters"], result["models"]) == ("conv1", 16, ["dense", "pruned"])
    assert len(result["kept"]) == 8
    with Image.open(folder / "filters" / "filters.png") as picture:
        assert picture.width > 400
    html = (folder / "report.html").read_text()
    assert 'alt="16 filters of conv1, dense beside pruned; 8 are kept"' in html
    assert "histograms.html" not in html
    (folder / "filters" / "filters.png").rename(folder / "kept.png")
    with pytest.raises(ArtifactError, match=r"filters\.png: cannot be read"):
        write_report(folder)
    (folder / "kept.png").rename(folder / "filters" / "filters.png")


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_histograms_of_a_run_and_the_link_in_its_report(folder: Path) -> None:
    done = run("histograms", str(folder), "--layers", "conv1", "--layers", "layer2.0.conv*", "--json")
    assert done.exit_code == 0, done.output
    result, where = json.loads(done.stdout), folder / "histograms"
    with (where / "histograms.csv").open() as file:
        kinds = {(row["model"], row["kind"]) for row in csv.DictReader(file) if row["layer"] == "conv1"}
    assert kinds == {(model, kind) for model in ("dense", "pruned") for kind in ("weights", "activations")}
    html = (where / "histograms.html").read_text()
    assert (html.count('role="img"'), html.count("<img")) == (3, 1)
    assert "default-src 'none'" in html
    assert result["page"] == str(where / "histograms.html")
    report = (folder / "report.html").read_text()
    assert '<a href="histograms/histograms.html">' in report
    elsewhere = write_report(folder, folder.parent / "pages" / "report.html", whole=False).read_text()
    assert '<a href="../run/histograms/histograms.html">' in elsewhere


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("filters", "{run}", "--layer", "conv9"), "layer 'conv9': did you mean 'conv1'"),
        (("filters", "{run}", "--layer", "linear"), "layer 'linear', a Linear, has no filters that are images"),
        (("histograms", "{run}", "--layers", "layr*"), "layers: 'layr*' matches no module path"),
        (("histograms", "squeezenet1_1"), "expected a run's folder or a recipe, whose calibration samples"),
    ],
)
def test_bad_input_is_one_message(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run(*(argument.replace("{run}", str(folder)) for argument in arguments))
    assert done.exit_code == 2, done.output
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
