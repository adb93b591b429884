"""The dense model of a run or of a model folder, and folders that have none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import prunekit
from prunekit.errors import ArtifactError, ModelError
from prunekit.jobs.run.baseline_cache import save_weights
from prunekit.jobs.run.dense_model import load_dense
from prunekit.models.zoo import build_model

IMAGE = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def dense() -> nn.Module:
    torch.manual_seed(0)
    return build_model(prunekit.ModelSettings("resnet8", "cifar"), num_classes=None).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, dense: nn.Module) -> Path:
    """The folder of a run with its dense weights, and a copy of its model folder alone."""
    root = tmp_path_factory.mktemp("dense")
    found = prunekit.prune(dense, (IMAGE,), channels=0.5)
    prunekit.save(found.model, root / "run" / "model", found.plan, build=prunekit.ModelSettings("resnet8", "cifar"))
    save_weights(root / "run" / "checkpoints" / "dense.safetensors", dense)
    shutil.copytree(root / "run" / "model", root / "alone")
    return root


@pytest.mark.parametrize("name", ["run", "run/model"])
def test_the_dense_model_has_the_weights_that_the_run_kept(folders: Path, dense: nn.Module, name: str) -> None:
    found = load_dense(folders / name)
    assert found is not None
    assert not found.training
    tensors = found.state_dict()
    assert tensors.keys() == dense.state_dict().keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in dense.state_dict().items())


def test_without_a_run_there_is_none(folders: Path) -> None:
    assert load_dense(folders / "alone") is None
    with pytest.raises(
        ModelError, match=r"expected the folder of a model, or of a run that has one, .* no prunekit\.json"
    ):
        load_dense(folders / "run" / "checkpoints")


def test_dense_weights_that_are_not_this_model_s(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "run", tmp_path / "run")
    save_weights(tmp_path / "run" / "checkpoints" / "dense.safetensors", nn.Linear(2, 2))
    with pytest.raises(ArtifactError, match=r"dense\.safetensors: does not belong to this dense model: bias, bn1"):
        load_dense(tmp_path / "run")
