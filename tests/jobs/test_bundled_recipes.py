"""The recipes of real data sets, to their end: on a small tree, and on real images where they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from real_cifar import WEIGHTS, needs_cifar, write_npz

import prunekit
from prunekit.errors import DataError
from prunekit.jobs.finetune import finetune, prune_job
from prunekit.recipe.loading import load

RECIPES = Path(__file__).parents[2] / "recipes"
QUICK = [
    *("latency.batches=[1]", "latency.repeats=5", "latency.explain=false"),
    *("threads=1", "device=cpu", "data.workers=0"),
]
WNIDS = ("n01440764", "n01443537", "n01484850")


def silent(message: str) -> None:
    """A log that nobody reads."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """ImageNet's layout with three classes, one file of which is broken."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 3)):
        for wnid in WNIDS:
            folder = tmp_path / "imagenet" / part / wnid
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{wnid}_{index}.JPEG")
    (tmp_path / "imagenet" / "train" / WNIDS[1] / f"{WNIDS[1]}_3.JPEG").write_bytes(b"no image")
    return tmp_path / "imagenet"


@pytest.mark.slow
def test_imagenet_runs_to_its_end(tree: Path, tmp_path: Path) -> None:
    torch.save(torchvision.models.resnet18(num_classes=3).state_dict(), tmp_path / "resnet18.pth")
    sources = [f"data.root={tree}", f"model.weights={tmp_path / 'resnet18.pth'}", f"output={tmp_path / 'runs'}"]
    shorter = [
        "model.name=resnet18",
        "data.image_size=32",
        "data.batch=8",
        "data.validation_share=0.1",
        "finetune.epochs=1",
    ]
    run = finetune(load(RECIPES / "resnet34-imagenet.yaml", [*sources, *shorter, *QUICK]), log=silent)
    assert run.metrics["pruned"]["macs"] <= 0.6 * run.metrics["dense"]["macs"]
    assert run.metrics["pruned"]["n_test"] == 9
    assert [Path(name).name for name in run.metrics["corrupt_images"]] == [f"{WNIDS[1]}_3.JPEG"]
    assert json.loads((run.folder / "model" / "prunekit.json").read_text())["interface"]["classes"] == list(WNIDS)
    assert prunekit.load(run.folder / "model").fc.out_features == 3


@pytest.mark.slow
@needs_cifar
def test_cifar_runs_to_its_end(tmp_path: Path) -> None:
    data = write_npz(tmp_path / "cifar10.npz", train=300, test=200)
    sources = [f"data.root={data}", f"model.weights={WEIGHTS['resnet56']}", f"output={tmp_path / 'runs'}"]
    shorter = ["finetune.epochs=0", "calibration.images=64"]
    run = finetune(load(RECIPES / "resnet56-cifar10.yaml", [*sources, *shorter, *QUICK]), log=silent)
    assert (run.metrics["dense"]["n_test"], run.metrics["dense"]["top1"]) == (200, 94.0)
    assert run.metrics["pruned"]["macs"] <= 0.5 * run.metrics["dense"]["macs"]


@pytest.mark.slow
@needs_cifar
def test_cifar_without_training_runs_to_its_end(tmp_path: Path) -> None:
    data = write_npz(tmp_path / "cifar10.npz", train=300, test=200)
    sources = [f"data.root={data}", f"model.weights={WEIGHTS['resnet20']}", f"output={tmp_path / 'runs'}"]
    shorter = ["model.name=resnet20", "calibration.images=128"]
    run = prune_job(load(RECIPES / "resnet56-cifar10-oneshot.yaml", [*sources, *shorter, *QUICK]), log=silent)
    dense, pruned = run.metrics["dense"], run.metrics["pruned"]
    assert pruned["macs"] <= 0.5 * dense["macs"]
    assert pruned["top1"] >= dense["top1"] - 15  # plain magnitude pruning leaves a quarter of them right
    assert run.metrics["repair"]["kept"]
    assert run.metrics["repair"]["after"] < 0.3 * run.metrics["repair"]["before"]
    assert not run.metrics["fine_tuned"]
    assert "control" not in run.metrics
    assert prunekit.load_plan(run.folder).provenance["prune"]["criterion"] == "elimination"


@pytest.mark.parametrize("name", ["resnet34-imagenet", "resnet56-cifar10", "resnet56-cifar10-oneshot"])
def test_without_data_and_weights_nothing_starts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path / "hub"))
    with pytest.raises(DataError) as caught:
        finetune(load(RECIPES / f"{name}.yaml"), log=silent)
    message = str(caught.value)
    assert message.startswith("2 things are missing:\n  data.root: ")
    assert all(override in message for override in ("data.root=PATH", "model.weights=FILE"))
    known = {"resnet34-imagenet": ("image-net.org", "resnet34-b627a593.pth"),
             "resnet56-cifar10": ("name=CIFAR10", "akamaster/pytorch_resnet_cifar10")}  # fmt: skip
    assert all(source in message for source in known[name.removesuffix("-oneshot")])
    assert list(tmp_path.iterdir()) == []
