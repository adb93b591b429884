"""`prunekit visualize cam` and `saliency` on a small net of the user's own, with good and bad input."""

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
from prunekit.compaction.compact_model import compact
from prunekit.errors import ArtifactError
from prunekit.inspection.visualize.class_maps import class_activation_map, correlation
from prunekit.jobs.run.baseline_cache import save_weights
from prunekit.jobs.run.model_pair import load_model_pair
from prunekit.report.pages.run_page import write_report

RECIPE = """
name: mine
model: {name: resnet8, zoo: cifar}
baseline: {epochs: 2, lr: 0.1}
data: {image_size: 8, batch: 256}
device: cpu
threads: 1
"""
CODE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm, self.inner = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 12, 3, padding=1)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(12, 10)

    def forward(self, x):
        print("chatter")
        x = self.relu(self.inner(self.relu(self.norm(self.stem(x)))))
        return self.head(x.mean((2, 3)))
"""
OWN = ("--model", "own.py:Net")
IMAGE = ("--image", "image.png")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["visualize", *arguments])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe, and the folder of a run: a pruned model beside the weights of the dense one."""
    (tmp_path / "own.py").write_text(CODE)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    names: dict[str, type[torch.nn.Module]] = {}
    exec(CODE, names)
    model, example = names["Net"](), torch.rand(1, 3, 16, 16)
    settings = prunekit.PruneSettings(prunekit.BudgetSettings(channels=0.5))
    plan = prunekit.plan(model, (example,), settings=settings)
    folder = tmp_path / "run"
    save_weights(folder / "checkpoints" / "dense.safetensors", model)
    prunekit.save(compact(model, plan), folder / "model", plan)
    (folder / "status.json").write_text("{}")
    pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    return tmp_path


@pytest.mark.slow
def test_cam_shows_dense_beside_pruned_with_their_correlation(here: Path) -> None:
    done = run("cam", "run", *OWN, *IMAGE, "--layer", "inner", "--class", "3", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["method"], result["layer"], result["class"]) == ("grad_cam", "inner", 3)
    sides = load_model_pair(here / "run", factory="own.py:Net")
    image, _ = sides.input(here / "image.png")
    maps = [class_activation_map(model, image, "inner", target=3) for model in sides.models.values()]
    assert result["correlation"] == pytest.approx(correlation(maps[0].values, maps[1].values)[0])
    assert abs(result["correlation"]) < 0.999
    for name, one in zip(("dense", "pruned"), maps, strict=True):
        assert result["models"][name]["probability"] == pytest.approx(float(one.probabilities[0]))
    with Image.open(here / result["picture"]) as picture:
        assert picture.width > 3 * 336  # three panels
        assert picture.width > 1.5 * picture.height
    assert json.loads((here / "run" / "maps" / "grad_cam-inner-image-for-class-3.json").read_text()) == result
    page = (here / "run" / "report.html").read_text()
    assert f'alt="{result["title"]}; image.png"' in page
    assert page.count("data:image/png") == 1
    (here / "run" / "maps" / "grad_cam-inner-image-for-class-3.png").unlink()
    with pytest.raises(ArtifactError, match=r"grad_cam-inner-image-for-class-3\.png: cannot be read"):
        write_report(here / "run")


@pytest.mark.parametrize("method", ["grad_cam_pp", "layer_cam", "eigen_cam"])
def test_every_method_on_a_single_model(here: Path, method: str) -> None:
    done = run("cam", *OWN, "--input-shape", "1x3x16x16", *IMAGE, "--method", method, "--output", "out")
    assert done.exit_code == 0, done.output
    name = {"grad_cam_pp": "Grad-CAM++", "layer_cam": "Layer-CAM", "eigen_cam": "Eigen-CAM"}[method]
    assert done.stdout.startswith(f"{name} at relu (8 x 8), class ")
    assert "correlation" not in done.stdout
    (picture,) = (here / "out").glob("*.png")  # another one for each class
    assert picture.stem == f"{method}-relu-image-for-class-{re.findall(r'class ([0-9]+)', done.stdout)[0]}"


@pytest.mark.slow
def test_saliency_is_the_same_for_the_same_seed(here: Path) -> None:
    first, again, other = (
        run("saliency", "run", *OWN, *IMAGE, "--method", "smooth_grad", *seed, "--json")
        for seed in ((), ("--seed", "0"), ("--seed", "1"))
    )
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout) == json.loads(again.stdout)
    assert json.loads(first.stdout)["correlation"] != json.loads(other.stdout)["correlation"]
    assert json.loads(first.stdout)["layer"] is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("cam", "run", *OWN, "--image", "own.py"),
            "own.py: expected an image, such as a PNG or JPEG file, but it is of",
        ),
        (("cam", "run", *OWN, "--image", "none.png"), "none.png: expected an image file, and there is none"),
        (
            ("cam", "run", *OWN, *IMAGE, "--layer", "head"),
            "head returns (1, 10), a vector of 10 values",
        ),
        (("cam", "run", *OWN, *IMAGE, "--layer", "innner"), "did you mean 'inner'"),
        (("cam", "run", *OWN, *IMAGE, "--class", "10"), "class 10: the model has 10 classes, 0 to 9"),
        (("cam", "run", *OWN, *IMAGE, "--method", "gradcam"), "'gradcam' is not one of"),
        (("cam", "run", *OWN), "run: expected an image to look at"),
    ],
)
def test_bad_input_says_what_was_expected(here: Path, arguments: tuple[str, ...], expected: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert expected in " ".join(done.stderr.split())
