"""`prunekit visualize features` on a run, a model folder and a model by name, with good and bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image

import prunekit
from prunekit.cli import cli
from prunekit.jobs.run.baseline_cache import save_weights
from prunekit.models.zoo import build_model

RECIPE = """
name: mine
model: {name: resnet8, zoo: cifar}
data: {image_size: 16}
baseline: {epochs: 1}
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["visualize", "features", *arguments])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with all that it keeps, and a copy of its model folder alone."""
    root = tmp_path_factory.mktemp("features")
    settings = prunekit.ModelSettings("resnet8", "cifar")
    torch.manual_seed(0)
    model = build_model(settings, num_classes=None)
    found = prunekit.prune(model, (torch.randn(1, 3, 16, 16),), channels=0.5)
    for folder in (root / "run" / "model", root / "alone"):
        prunekit.save(found.model, folder, found.plan, build=settings)
    found.plan.save(root / "run")
    save_weights(root / "run" / "checkpoints" / "dense.safetensors", model)
    (root / "run" / "recipe.yaml").write_text(RECIPE)
    (root / "run" / "status.json").write_text('{"state": "finished"}')
    pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(root / "image.png")
    return root


@pytest.fixture
def here(folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folders)
    return folders


@pytest.mark.slow
def test_pictures_of_a_run_are_in_its_folder_and_in_its_report(here: Path) -> None:
    done = run("run/model", "--layers", "layer1.0.*1", "--layers", "linear", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    folder = here / "run" / "features"
    assert result["image"] == "test image 0, class 1"
    assert result["models"] == ["dense", "pruned"]
    assert [(row["path"], row["view"], row["channels"], row["kept"]) for row in result["layers"]] == [
        ("layer1.0.conv1", "maps", 16, 8), ("layer1.0.bn1", "maps", 16, 8), ("layer1.0.relu1", "maps", 16, 8),
        ("linear", "bars", 10, 10),
    ]  # fmt: skip
    for row in result["layers"]:
        with Image.open(folder / row["picture"]) as picture:
            assert picture.width > 400
    assert [Path(page).name for page in result["pages"]] == ["features.html", "report.html"]
    for page in map(Path, result["pages"]):
        html = page.read_text()
        assert html.count("<img") == 5
        assert set(re.findall(r'src="([^,]*),', html)) == {"data:image/png;base64"}
        assert 'alt="Maps of layer1.0.conv1, dense beside pruned: 16 maps of 16 x 16"' in html
        assert "img-src data:" in html


def test_pictures_that_would_make_a_page_too_large_are_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prunekit.report.sections.pictures.LARGEST", 0)
    done = run("run", "--layers", "layer1.0.conv1", "--image", "image.png", "--output", "small")
    assert done.exit_code == 0, done.output
    html = (here / "small" / "features.html").read_text()
    assert "In <code>small/layer1.0.conv1.png</code>" in html or "in <code>small/layer1.0.conv1.png</code>" in html
    assert html.count("<img") == 1


def test_a_model_folder_alone_shows_which_channels_of_a_layer_are_gone(here: Path) -> None:
    done = run("alone", "--image", "image.png", "--layers", "layer1.0.conv1", "--output", "out", "--json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["layers"]
    assert (row["channels"], row["kept"]) == (16, 8)
    assert "alone: the pruned model alone, because no run beside it has kept the dense weights" in done.stderr


@pytest.mark.slow
def test_a_model_by_name(here: Path) -> None:
    done = run("resnet8", "--zoo", "cifar", "--input-shape", "1x3x16x16", "--image", "image.png", "--output", "named")
    assert done.exit_code == 0, done.output
    assert "its weights are random" in done.stderr
    lines = [line.split()[:2] for line in done.stdout.splitlines()]
    assert ["layer2", "maps"] in lines
    assert ["linear", "bars"] in lines
    assert json.loads((here / "named" / "features.json").read_text())["layers"][0]["kept"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--layers", "layr1.*"), "layers: 'layr1.*' matches no module path; did you mean 'layer1."),
        (("run", "--image", "run/recipe.yaml"), "run/recipe.yaml: expected an image, such as a PNG or JPEG file, but"),
        (("run", "--index", "100000"), "expected the number of a test image, 0 to 538, got 100000"),
        (("alone",), "alone: expected an image to look at, because no recipe says which: --image FILE"),
        (("run", "--zoo", "cifar"), "run: a folder says what its models are; leave out --weights, --input-shape and"),
        (("run", "prune.budget=1"), "prune.budget"),
        ((), "expected a model: a recipe, a model folder"),
        (("checkpoints",), "expected a recipe, a model folder"),
    ],
)
def test_bad_input_is_one_message(here: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("inspect", "run"), "which holds a prunekit.json; did you mean run/model?"),
        (("sensitivity", "run"), "it cannot be read: Is a directory; did you mean run/recipe.yaml?"),
    ],
)
def test_the_folder_of_a_run_in_the_place_of_a_part_of_it(here: Path, arguments: tuple[str, ...], meant: str) -> None:
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 2, done.output
    assert meant in done.stderr


def test_dense_weights_that_are_not_this_model_s(here: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(here / "run", tmp_path / "run")
    save_weights(tmp_path / "run" / "checkpoints" / "dense.safetensors", torch.nn.Linear(2, 2))
    done = run(str(tmp_path / "run"), "--image", "image.png")
    assert done.exit_code == 1
    assert "dense.safetensors: does not belong to this dense model: bias, bn1" in done.stderr
