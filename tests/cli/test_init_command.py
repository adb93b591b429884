"""`prunekit init`: the recipe that it writes is explained key by key, passes every check, and runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from tiny_language import bert, llama, text, write_model

from prunekit.cli import cli
from prunekit.recipe.loading import load

CODE = """
import torch
from torch import nn


def net():
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    return nn.Sequential(*layers)


def images():
    torch.manual_seed(0)
    return tuple(torch.utils.data.TensorDataset(torch.rand(n, 3, 16, 16), torch.arange(n) % 3) for n in (30, 9))
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a folder of 36 images in three classes, an archive of them, and the user's own code."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (36, 40, 50, 3), dtype=np.uint8)
    for index, image in enumerate(pixels):
        folder = tmp_path / "photos" / f"class{index % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{index}.png")
    np.savez(tmp_path / "photos.npz", images=pixels, labels=np.arange(36) % 3)
    (tmp_path / "own.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


def planned(*arguments: str) -> None:
    """The written recipe makes its plan."""
    plan = json.loads(run("finetune", "mine.yaml", "--dry-run", "--json", "device=cpu", *arguments))["plan"]
    assert plan["macs_after"] < 0.6 * plan["macs_before"]


@pytest.mark.slow
def test_for_a_folder_of_images(home: Path) -> None:
    shown = run("init", "--model", "resnet8", "--data", "photos", "mine.yaml", "prune.budget.macs=0.4")
    assert "photos: 3 classes, 36 images, of about 50x40 pixels" in shown
    assert "Run it: prunekit finetune mine.yaml" in shown
    job = load("mine.yaml")
    assert (job.name, job.model.zoo, job.data.root, job.data.image_size) == ("mine", "cifar", Path("photos"), 32)
    assert job.prune.budget.macs == 0.4
    assert job.baseline is not None
    planned()


@pytest.mark.slow
def test_for_a_folder_of_images_without_labels(home: Path) -> None:
    (home / "all").mkdir()
    for image in (home / "photos").rglob("*.png"):
        image.rename(home / "all" / image.name)
    shown = run("init", "--model", "own.py:net", "--data", "all", "mine.yaml", "prune.budget.macs=0.4")
    assert "all: no folders of classes, so that no labels are read, 36 images, of about 50x40 pixels" in shown
    assert "3 classes" in shown  # of the model
    text, job = (home / "mine.yaml").read_text(), load("mine.yaml")
    assert (job.data.labels, job.data.root, job.baseline) == (False, Path("all"), None)
    assert "baseline" not in text
    planned("--model", "own.py:net")
    refused = run("init", "--model", "resnet8", "--data", "all", "other.yaml", code=2)
    assert "--weights: expected trained weights of resnet8, because the images in all have no labels" in refused
    assert not (home / "other.yaml").exists()


@pytest.mark.slow
def test_for_the_digits_and_every_key_has_its_comment(home: Path) -> None:
    run("init", "--model", "resnet20", "--data", "digits", "mine.yaml")
    lines = (home / "mine.yaml").read_text().splitlines()
    keys = [index for index, line in enumerate(lines) if line and not line.lstrip().startswith("#")]
    assert len(keys) > 20
    assert all(lines[index - 1].lstrip().startswith("# ") for index in keys)
    assert max(map(len, lines)) <= 120
    planned()


@pytest.mark.slow
def test_for_code_of_ones_own(home: Path) -> None:
    shown = run("init", "--model", "own.py:net", "--data", "own.py:images", "mine.yaml")
    own = ["--model", "own.py:net", "--data", "own.py:images"]
    assert f"Run it: prunekit finetune mine.yaml {' '.join(own)}" in shown
    planned(*own)
    shown = run("init", "--model", "own.py:net", "--data", "photos.npz", "npz.yaml")
    assert load("npz.yaml").data.source == "npz"
    assert "36 images" in shown


@pytest.mark.slow
def test_size_and_rates_go_with_the_model(home: Path) -> None:
    run("init", "--model", "vit_b_32", "--data", "photos", "mine.yaml")
    job = load("mine.yaml")
    assert job.data.image_size == 224
    assert (job.finetune.optimizer, job.baseline and job.baseline.lr) == ("adamw", 5e-4)


@pytest.mark.slow
def test_what_is_missing_is_said_and_the_recipe_is_there(home: Path) -> None:
    shown = run("init", "--model", "resnet20", "--data", "CIFAR10", "--weights", "none.pth", "mine.yaml")
    assert "CIFAR10 was not looked at" in shown
    job = load("mine.yaml")
    assert (job.data.source, job.data.name, job.model.weights, job.baseline) == (
        "torchvision",
        "CIFAR10",
        "none.pth",
        None,
    )
    shown = run("init", "--model", "resnet20", "--data", "digits", "--weights", "none.pth", "other.yaml")
    assert "there is no such file of weights" in shown
    run("init", "--model", "resnet20", "--data", "uoft-cs/cifar10", "hub.yaml")
    assert load("hub.yaml").data.source == "huggingface"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "resnet21", "--data", "digits", "mine.yaml"], "did you mean 'resnet32' or 'resnet20'"),
        (["--model", "resnet20", "--data", "photo", "mine.yaml"], "there is no such file or folder; expected digits,"),
        (["--model", "photos", "--data", "digits", "mine.yaml"], "got a folder; a recipe prunes a dense model"),
        (["--model", "own.py:nett", "--data", "digits", "mine.yaml"], "did you mean 'net'"),
        (["--model", "own.py:net", "--data", "digits", "mine.yaml"], "3"),
        (["--model", "resnet20", "--data", "digits"], "expected one FILE for the recipe"),
        (["--model", "resnet8", "--data", "digits", "mine.yaml", "prune.budget.macs=1e-5"], "leave no less than"),
        (
            ["--model", "resnet20", "--data", "digits", "mine.yaml", "prune.budget.macs=2"],
            "override 'prune.budget.macs=2'",
        ),
    ],
)
def test_what_does_not_fit_is_said_and_nothing_is_written(arguments: list[str], expected: str, home: Path) -> None:
    before = set(home.iterdir())
    assert expected in run("init", *arguments, code=2)
    assert set(home.iterdir()) - before <= {home / "__pycache__"}


def test_a_file_that_is_there_stays_unless_it_is_forced(home: Path) -> None:
    (home / "mine.yaml").write_text("mine")
    arguments = ["init", "--model", "resnet8", "--data", "digits", "mine.yaml"]
    assert "overwrite it with --force" in run(*arguments, code=2)
    assert (home / "mine.yaml").read_text() == "mine"
    run(*arguments, "--force")
    job = load("mine.yaml")
    assert (job.model.name, job.finetune.lr) == ("resnet8", "auto")


@pytest.mark.slow
def test_for_a_language_model_and_its_text(home: Path) -> None:
    write_model(home / "tiny", llama())
    (home / "text.txt").write_text(text(600))
    shown = run("init", "--model", "tiny", "--data", "text.txt", "mine.yaml", "data.window=16")
    assert "texts: 22 for train, 4 for validation, 11 for test; the first has 16 tokens of 45" in shown
    job = load("mine.yaml")
    assert (job.task, job.model.name, job.model.zoo, job.baseline) == ("causal_lm", "./tiny", "hf", None)
    assert (job.data.source, job.data.root, job.data.window) == ("text", Path("text.txt"), 16)
    assert (job.finetune.optimizer, job.finetune.lr) == ("adamw", 2e-5)  # too few texts to compare rates by
    assert job.repair is not None
    write_model(home / "encoder", bert())
    run("init", "--model", "encoder", "--data", "text.txt", "other.yaml", "data.window=16")
    assert load("other.yaml").task == "masked_lm"
    refused = run("init", "--model", "distilbert", "--zoo", "hf", "--data", "text.txt", "third.yaml", code=2)
    assert "data.tokenizer: texts need a tokenizer, got none" in refused
    write_model(home / "classifier", bert("BertForSequenceClassification"))
    refused = run("init", "--model", "classifier", "--data", "text.txt", "fourth.yaml", code=2)
    assert "the model in classifier is for text_classification" in refused
