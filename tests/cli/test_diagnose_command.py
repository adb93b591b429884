"""`prunekit diagnose` on the embedded digits and on nets of the user's own, with good and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prunekit.cli import cli

RECIPE = """
name: mine
model: {name: squeezenet1_1}
baseline: {epochs: 2, lr: 0.05}
data: {image_size: 8, batch: 32}
device: cpu
threads: 1
"""
CODE = """
import torch
from prunekit.data.sources import load_splits
from prunekit.settings.inputs import DataSettings
from torch import nn


def images():
    splits = load_splits(DataSettings(image_size=8))
    stored = splits.train
    while hasattr(stored, "dataset"):
        stored = stored.dataset
    stored.labels[::2] = 12
    return splits


class Net(nn.Module):
    def __init__(self, features=16):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.head = nn.Linear(features, 10)

    def forward(self, x):
        print("chatter")
        x = self.norm(self.stem(x)).relu().mean((2, 3))
        return self.head(x)


def fits():
    torch.manual_seed(0)
    return Net()


def wrong():
    return Net(18)


def dead():
    net = fits()
    nn.init.constant_(net.norm.bias, -100)
    return net
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["diagnose", *arguments])


def test_a_healthy_model_exits_with_0(here: Path) -> None:
    done = run("mine.yaml", "--model", "own.py:fits", "--batches", "2", "--json", "--output", "found")
    assert done.exit_code == 0, done.output
    payload = json.loads(done.stdout)
    assert payload == json.loads((here / "found" / "diagnose.json").read_text())
    assert (payload["model"], payload["healthy"], payload["findings"], payload["images"]) == ("mine", True, [], 64)
    assert len(payload["checked"]) == 16
    assert payload["figures"]["lr"] == pytest.approx(0.05 / 8)  # the first step of the warm-up
    assert "chatter" in done.stderr
    shown = run("--model", "own.py:fits", "--input-shape", "1x3x8x8", "--recipe", "mine.yaml", "--batches", "1")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("fits: healthy: 16 checks found nothing (32 training images, loss ")


@pytest.mark.slow
def test_faults_are_named_and_exit_with_1(here: Path) -> None:
    done = run("mine.yaml", "--model", "own.py:wrong")
    assert done.exit_code == 1, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "mine: 1 fault (0 training images, lr 0.00625)"
    assert lines[2:4] == ["1. shape_mismatch in head", "   expected: an input (..., 18) of Linear"]
    assert lines[4].startswith("   came:     (32, 16), in the forward pass; own.py:26: return self.head(x): Runtime")
    assert lines[4].endswith("stem (Conv2d) (32, 16, 6, 6) -> norm (BatchNorm2d) (32, 16, 6, 6)")
    assert lines[-1].startswith("not looked for, the forward pass stopped in head: ")

    done = run("mine.yaml", "--model", "own.py:dead", "--batches", "1")
    assert done.exit_code == 1, done.output
    assert "1. dead_relu in the model\n" in done.stdout
    assert "16 of 16 channels behind norm are 0 for all 32 inputs" in done.stdout
    assert "may cause: vanishing_gradient in " in done.stdout
    ignored = run("mine.yaml", "--model", "own.py:dead", "--batches", "1", "--ignore", "dead_relu", "--json")
    assert [each["kind"] for each in json.loads(ignored.stdout)["findings"]] == ["vanishing_gradient"]


def test_labels_of_ones_own_images(here: Path) -> None:
    done = run("mine.yaml", "--model", "own.py:fits", "--data", "own.py:images", "data.image_size=32", "--batches", "1")
    assert done.exit_code == 1, done.output
    assert "1. labels_out_of_range in data" in done.stdout
    assert "are others: 12" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "expected a model: a recipe, a model folder"),
        (("resnet20",), "resnet20: expected images to run it on; name the recipe that has them: --recipe PATH"),
        (("mine.yaml", "--recipe", "mine.yaml"), "--recipe goes with a model folder, a zoo's name or --model"),
        (("mine.yaml", "--ignore", "dead_rulo"), "ignore: there is no check 'dead_rulo'; did you mean 'dead_relu'?"),
        (("mine.yaml", "--batches", "0"), "Invalid value for '--batches'"),
        (("none.yaml",), "none.yaml"),
    ],
)
def test_bad_input_is_one_message_and_exits_with_2(here: Path, arguments: tuple[str, ...], says: str) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert says in done.stderr
