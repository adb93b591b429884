"""`--model` and `--data`: the user's own code on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from prunekit.cli import cli

RECIPE = """
name: mine
model: {name: squeezenet1_1}
baseline: {epochs: 1, lr: 0.1}
data: {image_size: 8, batch: 16}
calibration: {images: 32}
prune: {budget: {channels: 0.5}}
finetune: {epochs: 1}
latency: {batches: [1], repeats: 5}
device: cpu
threads: 1
"""
CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def net():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(8, 2))


def part(count):
    print("making images")
    labels = torch.arange(count) % 2
    pixels = torch.randint(0, 100, (count, 3, 8, 8), generator=torch.Generator().manual_seed(count))
    return TensorDataset((pixels + 100 * labels[:, None, None, None]).to(torch.uint8), labels)


def images():
    return part(60), part(20)
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.mark.slow
def test_a_job_from_the_command_line_to_its_model_folder(here: Path) -> None:
    own = ["--model", "own.py:net", "--data", "own.py:images"]
    done = run("finetune", "mine.yaml", *own, "--json")
    assert done.exit_code in (0, 1), done.output  # 1: a net as small as this may be no faster
    assert "making images" in done.stderr
    folder = Path(json.loads(done.stdout)["folder"])
    assert json.loads(done.stdout)["dense"]["n_test"] == 20
    recipe = str(folder / "recipe.yaml")
    assert "zoo: own" in Path(recipe).read_text()

    again = run("evaluate", recipe, *own, "--json")
    assert json.loads(again.stdout)["top1"] == json.loads(done.stdout)["dense"]["top1"]
    pruned = run("evaluate", str(folder / "model"), *own, "--json")
    assert json.loads(pruned.stdout)["top1"] == json.loads(done.stdout)["pruned"]["top1"]
    calibrated = run("calibrate", recipe, *own, "--json")
    assert json.loads(calibrated.stdout)["reused"] is True
    calibrated = run("calibrate", recipe, *own, "calibration.images=8", "--json")
    assert json.loads(calibrated.stdout)["reused"] is False
    timed = run("bench", str(folder / "model"), "--model", "own.py:net", "--input-shape", "1x3x8x8",
                "--batch", "1", "--repeats", "5", "--json")  # fmt: skip
    assert list(json.loads(timed.stdout)["models"]) == ["net", str(folder / "model")]


@pytest.mark.slow
def test_images_alone(here: Path) -> None:
    shape = ["--input-shape", "1x3x8x8"]
    found = run("evaluate", "--model", "own.py:net", *shape, "--data", "own.py:images", "data.image_size=8", "--json")
    assert found.exit_code == 2
    assert "changes a recipe, and no recipe was given" in found.stderr
    found = run(
        "evaluate", "--model", "own.py:net", *shape, "--data", "own.py:images", "--recipe", "mine.yaml", "--json"
    )
    assert json.loads(found.stdout)["n_test"] == 20
    timed = run("bench", "mine.yaml", "--data", "own.py:images", "data.image_size=32", "--batch", "1", "--repeats", "5",
                "--device", "cpu", "--json")  # fmt: skip
    assert timed.exit_code == 0, timed.output
    planned = run("finetune", "mine.yaml", "--model", "own.py:net", "--data", "own.py:images", "--dry-run", "--json")
    assert json.loads(planned.stdout)["recipe"]["data"]["source"] == "own"


@pytest.mark.slow
def test_a_recipe_whose_model_is_the_users_own(here: Path) -> None:
    (here / "own.yaml").write_text(RECIPE.replace("{name: squeezenet1_1}", "{name: net, zoo: own}"))
    (here / "own.py").write_text(CODE.replace("nn.Linear(8, 2)", "nn.Linear(8, 10)"))
    for recipe in ("own.yaml", "mine.yaml"):
        shown = run("inspect", recipe, "--model", "own.py:net", "--json")
        payload = json.loads(shown.stdout)
        assert (payload["architecture"], payload["input_shape"]) == ("Sequential", [1, 3, 8, 8])
    timed = run("bench", "own.yaml", "mine.yaml", "--model", "own.py:net", "--batch", "1", "--repeats", "5",
                "--device", "cpu", "--json")  # fmt: skip
    assert list(json.loads(timed.stdout)["models"]) == ["mine (1)", "mine (2)"]
    assert run("evaluate", "own.yaml", "--model", "own.py:net").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["finetune", "mine.yaml", "model.zoo=own"],
            "model.zoo is 'own' and --model was not given: expected 'own' together",
        ),
        (
            ["finetune", "mine.yaml", "model={name: 'own.py:net', zoo: own}"],
            "together with --model file.py:factory; if you trust that code, add --model own.py:net",
        ),
        (
            ["finetune", "mine.yaml", "data.source=own"],
            "data.source is 'own' and --data was not given: expected 'own' together",
        ),
        (["finetune", "mine.yaml", "--data", "own.py"], "expected file.py:factory, got 'own.py'"),
        (["calibrate", "mine.yaml", "--model", "own.py:nett"], "no function or class 'nett' here; did you mean 'net'"),
        (["evaluate", "mine.yaml", "--data", "none.py:images"], "none.py: there is no such file"),
        (["evaluate", "mine.yaml", "--model", "own.py:net", "--weights", "a.pt"], "leave out what else names one"),
        (
            ["bench", "resnet20", "--data", "own.py:images"],
            "--data own.py:images changes a recipe, and no recipe was given",
        ),
        (["inspect", "mine.yaml", "model.zoo=own"], "model.zoo is 'own' and --model was not given"),
        (["inspect", "resnet20", "--model", "own.py:net"], "got two: resnet20 and --model own.py:net"),
        (["bench", "mine.yaml", "--model", "own.py:net", "--weights", "a.pt"], "--weights goes with a zoo's name"),
    ],
)
def test_what_does_not_go_together(arguments: list[str], expected: str, here: Path) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert expected in " ".join(result.stderr.split())
    assert not (here / "runs").exists()


def test_a_cifar_model_by_name(here: Path) -> None:
    shown = run("inspect", "resnet20", "--json")
    payload = json.loads(shown.stdout)
    assert (payload["architecture"], payload["input_shape"]) == ("CifarResNet", [1, 3, 32, 32])
    assert len(payload["groups"]) == 10  # nine blocks and the stream
