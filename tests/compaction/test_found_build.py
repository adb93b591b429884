"""Folders whose model nobody said how to build: a zoo's is found by its name, and what no folder can hold is named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

import prunekit as pk
from prunekit.errors import ArtifactError, ModelError
from prunekit.models.cifar import CifarResNet
from prunekit.settings.inputs import ModelSettings
from prunekit.utils.tensors import gather


def renamed_head() -> nn.Module:
    model = torchvision.models.resnet18()
    model.fc = nn.Linear(512, 7)
    return model


def of_timm() -> nn.Module:
    model: nn.Module = pytest.importorskip("timm").create_model("resnet10t", num_classes=5)
    return model


def of_transformers() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 4}
    model: nn.Module = transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("build", [renamed_head, of_timm, of_transformers, lambda: CifarResNet(8, num_classes=3)])
def test_what_a_zoo_built_is_built_again_by_its_name(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 32, 32)
    result = pk.prune(build().eval(), x, channels=0.5)
    loaded = pk.load(pk.save(result, tmp_path / "small"))
    a, b = (gather(model(x))[0] for model in (result.model, loaded))
    assert torch.equal(a, b)


@pytest.mark.slow
def test_a_model_that_only_looks_like_a_zoos_is_not_taken_for_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 32, 32)
    for model in (
        torchvision.models.resnet18(norm_layer=partial(nn.BatchNorm2d, momentum=0.5)),  # seen in train mode alone
        torchvision.models.mobilenet_v3_small(dropout=0.7),
    ):
        folder = pk.save(pk.prune(model.eval(), x, channels=0.5), tmp_path / "small")
        with pytest.raises(ModelError, match="built by its owner's code; load it with"):
            pk.load(folder)
    strided = torchvision.models.resnet18()
    strided.maxpool.stride = 1  # the same shapes
    folder = pk.save(pk.prune(strided.eval(), x, channels=0.5), tmp_path / "small")
    with pytest.raises(ModelError, match="built by its owner's code; load it with"):
        pk.load(folder)


class Listed(nn.Module):
    """Blocks in a plain list, whose parameters another container registers, or nobody does."""

    def __init__(self, registered: bool = True) -> None:
        super().__init__()
        self.blocks = {"one": [nn.Linear(8, 16), nn.Linear(16, 8)]}
        self.last = nn.Linear(8, 4)
        if registered:
            self.own = nn.ParameterList([p for block in self.blocks["one"] for p in block.parameters()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.blocks["one"]
        found: torch.Tensor = self.last(second(first(x).relu()))
        return found


def test_a_factory_places_what_an_instance_places(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Listed(), torch.randn(2, 8)
    result = pk.prune(model, x, macs=0.5)
    folder = pk.save(result, tmp_path / "small")
    for given in (model, Listed):
        assert torch.equal(pk.load(folder, model=given)(x), result.model(x))  # type: ignore[arg-type]


class Hidden(nn.Module):
    """Has a layer that nothing registers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.parts = nn.Linear(8, 16), nn.Linear(16, 8), (nn.Linear(8, 8),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.parts[0](self.last(self.first(x).relu()))
        return found


def test_parameters_that_a_folder_cannot_hold_are_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Hidden(), torch.randn(2, 8)
    result = pk.prune(model, x, macs=0.5)
    folder = pk.save(result, tmp_path / "small")
    assert torch.equal(pk.load(folder, model=model)(x), result.model(x))
    with pytest.raises(ArtifactError, match=r"parts\.0\.\w+ is a parameter that the model does not register"):
        pk.load(folder, model=Hidden)


def test_a_build_that_does_not_fit_into_memory_is_refused_before_it_is_made(tmp_path: Path) -> None:
    torch.manual_seed(0)
    result = pk.prune(CifarResNet(8, num_classes=3).eval(), torch.randn(1, 3, 32, 32), channels=0.5)
    settings = ModelSettings("resnet8", "cifar", arguments={"num_classes": 10**12})
    folder = pk.save(result, tmp_path / "small", build=settings)
    with pytest.raises(ArtifactError, match=r"build: the resnet8 that it asks for takes 260,.* bytes, and .* free"):
        pk.load(folder)
