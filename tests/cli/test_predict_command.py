"""`prunekit predict`, and `prunekit evaluate` on a model folder far from its run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from exported_files import exported
from PIL import Image
from real_cifar import WEIGHTS, images, needs_cifar
from safetensors.torch import load_file

import prunekit as pk
from prunekit.cli import cli
from prunekit.cli.models import recipe_of_data
from prunekit.data.sources import load_splits
from prunekit.models.zoo import build_model
from prunekit.settings.inputs import DataSettings, ModelSettings

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
RECIPE = """
name: small
model: {name: resnet8, zoo: cifar}
data: {image_size: 8, batch: 200}
baseline: {epochs: 1, lr: 0.05}
prune: {budget: {macs: 0.5}, criterion: l2}
finetune: {epochs: 0}
control: false
deploy: {fold_batchnorm: true}
latency: {batches: [1], repeats: 5}
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(one) for one in arguments])


def json_of(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders `model` and `deployed` of a run, alone in another place, and the run's result."""
    place = tmp_path_factory.mktemp("moved")
    (place / "mine.yaml").write_text(RECIPE)
    result = run("finetune", place / "mine.yaml", "--output", place / "runs", "--json")
    assert result.exit_code in (0, 1), result.output
    folder = next((place / "runs" / "small").glob("2*"))
    for name in ("model", "deployed"):
        shutil.copytree(folder / name, place / "elsewhere" / name)
    shutil.copy(folder / "metrics.json", place / "metrics.json")
    shutil.rmtree(place / "runs")
    return place


@pytest.fixture(scope="module")
def digits(moved: Path) -> Path:
    """The test images of the run as 8-bit PNG files, in a folder for each class; as an archive; and as code."""
    test = load_splits(DataSettings(image_size=8)).test
    pixels = np.round(test.dataset.pixels[test.indices][:, 0].numpy() * (255 / 16)).astype(np.uint8)  # type: ignore[attr-defined]
    labels = test.labels.numpy()  # type: ignore[attr-defined]
    for index, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        path = moved / "digits" / str(label) / f"{index:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    np.savez(moved / "digits.npz", images=pixels, labels=labels)
    code = "import numpy as np, torch\ndef images():\n    found = np.load(r'{}')\n"
    code += "    both = [(torch.tensor(i)[None], int(n)) for i, n in zip(found['images'], found['labels'])]\n"
    (moved / "own.py").write_text(code.format(moved / "digits.npz") + "    return both[:200], both\n")
    return moved


@pytest.mark.slow
@pytest.mark.parametrize("which", ["model", "deployed"])
def test_a_folder_is_evaluated_far_from_its_run(which: str, digits: Path) -> None:
    """On the same images as files of 8 bits, which round the digits' 17 levels."""
    known = json.loads((digits / "metrics.json").read_text())["pruned"]
    found = [json_of("evaluate", digits / "elsewhere" / which, "--data", data) for data in data_of(digits)]
    assert found[0]["n_test"] == known["n_test"]
    for result in found:
        assert result["top1"] == pytest.approx(known["top1"], abs=1.0)
        assert result["task"]["name"] == "image_classification"
    assert len({result["top1"] for result in found}) == 1


def data_of(digits: Path) -> Sequence[object]:
    return digits / "digits", digits / "digits.npz", f"{digits / 'own.py'}:images"


@pytest.mark.slow
def test_classes_of_other_images_are_refused(digits: Path) -> None:
    shutil.copytree(digits / "digits", digits / "other")
    (digits / "other" / "9").rename(digits / "other" / "nine")
    result = run("evaluate", digits / "elsewhere" / "model", "--data", digits / "other")
    assert result.exit_code == 2
    assert "class 'nine' is none of the model's 10 classes" in result.stderr


@pytest.mark.slow
def test_the_top_classes_of_images(digits: Path) -> None:
    model, images = digits / "elsewhere" / "model", sorted((digits / "digits" / "3").iterdir())[:3]
    found = json_of("predict", model, *images, "--top", "2", "--output", digits / "out")
    assert [row["sample"] for row in found["top"]] == [str(path) for path in images for _ in range(2)]
    loaded = pk.load(model)
    scores = loaded(loaded.preprocessing(images)).detach().double().softmax(1)
    assert [row["label"] for row in found["top"] if row["rank"] == 1] == scores.argmax(1).tolist()
    assert found["top"][0]["probability"] == pytest.approx(float(scores[0].max()))
    assert json.loads((digits / "out" / "predict.json").read_text()) == found
    assert load_file(digits / "out" / "outputs.safetensors")["scores"].shape == (3, 10)
    whole = json_of("predict", model, digits / "digits", "--top", "1")
    right = [Path(row["sample"]).parent.name == row["class"] for row in whole["top"]]
    evaluated = json_of("evaluate", model, "--data", digits / "digits")
    assert sum(right) == evaluated["correct"]
    text = run("predict", model, images[0])
    assert "probability" in text.stdout
    assert str(images[0]) in text.stdout
    np.save(digits / "inputs.npy", loaded.preprocessing(images).numpy())
    ready = json_of("predict", model, digits / "inputs.npy", "--top", "2")
    assert [row["label"] for row in ready["top"]] == [row["label"] for row in found["top"]]


@pytest.mark.slow
def test_what_does_not_go_together_says_what_does(digits: Path, tmp_path: Path) -> None:
    model = digits / "elsewhere" / "model"
    image = digits / "digits" / "0"
    for arguments, told in (
        (("predict", model), "expected images: prunekit predict"),
        (("predict", model, tmp_path / "gone.png"), "gone.png: expected an image file"),
        (("predict", "resnet8", image), "expected trained weights"),
        (("predict", tmp_path / "gone", image), "expected a recipe, a model folder"),
        (("predict", model, image, "--data", "own.py:images"), "changes a recipe, and no recipe was given"),
        (("evaluate", model), "expected images to test on; name the recipe"),
        (("evaluate", model, "--data", tmp_path / "gone.npz"), "gone.npz: expected a folder of images"),
        (("evaluate", digits / "mine.yaml", "--data", digits / "digits"), "data.source=imagefolder data.root="),
        (("evaluate", model, "--recipe", digits / "mine.yaml", "--data", digits / "digits.npz"), "data.source=npz"),
        (
            ("evaluate", model, "--data", digits / "digits", "--task", "semantic_segmentation"),
            "give its data as --data",
        ),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert told in result.stderr
        assert result.stdout == ""


def test_a_file_in_the_folder_of_a_run_is_of_that_run(tmp_path: Path) -> None:
    for folder in ("run/model", "run/export", "other/export"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("run/recipe.yaml", "run/status.json", "run/export/net.onnx", "other/recipe.yaml", "other/net.onnx"):
        (tmp_path / name).touch()
    recipe = str((tmp_path / "run" / "recipe.yaml").resolve())
    for target in ("run/model", "run/export/net.onnx"):
        assert recipe_of_data([str(tmp_path / target)], None) == recipe
    assert recipe_of_data([str(tmp_path / "other" / "net.onnx")], None) is None


@pytest.mark.slow
@needs_cifar
def test_real_images_are_right_in_every_form(tmp_path: Path) -> None:
    """Files, arrays and an ONNX file of a ResNet-20 on CIFAR-10 with 5 % fewer MACs, far from any recipe."""
    model = build_model(ModelSettings("resnet20", "cifar", weights=str(WEIGHTS["resnet20"])), num_classes=10).eval()
    small = pk.prune(model, torch.randn(1, 3, 32, 32), macs=0.95)
    feed = pk.Preprocessing(32, 32)
    folder = pk.save(small, tmp_path / "model", build=ModelSettings("resnet20", "cifar"), preprocessing=feed,
                     classes=CIFAR10, task="image_classification")  # fmt: skip
    pixels, labels = images("test", 200)
    np.savez(tmp_path / "cifar.npz", images=pixels, labels=labels, classes=np.array(CIFAR10))
    for index, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        path = tmp_path / "cifar" / CIFAR10[label] / f"{index:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    file = exported(small.model, (feed(list(pixels[:2])),), "onnx", tmp_path / "net", task="image_classification",
                    classes=CIFAR10, preprocessing=feed)  # fmt: skip
    found = [
        json_of("evaluate", target, "--data", tmp_path / data)["correct"]
        for target in (folder, file)
        for data in ("cifar", "cifar.npz")
    ]
    with torch.no_grad():
        scores = small.model.eval()((torch.tensor(pixels).permute(0, 3, 1, 2) / 255 - mean_of(feed)) / std_of(feed))
    right = int((scores.argmax(1) == torch.tensor(labels)).sum())
    assert right > 150
    assert found == [right] * 4
    top = json_of("predict", file, tmp_path / "cifar", "--top", "1")["top"]
    assert sum(Path(row["sample"]).parent.name == row["class"] for row in top) == right


def mean_of(feed: pk.Preprocessing) -> torch.Tensor:
    return torch.tensor(feed.mean)[:, None, None]


def std_of(feed: pk.Preprocessing) -> torch.Tensor:
    return torch.tensor(feed.std)[:, None, None]
