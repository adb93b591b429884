"""torchvision's classifiers and detectors by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from prunekit.errors import ModelError
from prunekit.models.zoo import build_model, missing_weights, zoo_names
from prunekit.settings.inputs import ModelSettings


def test_names_are_torchvisions_classifiers_and_detectors() -> None:
    names = zoo_names()
    assert {"resnet34", "googlenet", "inception_v3", "vit_b_16", "regnet_y_400mf"} <= set(names)
    assert {"fasterrcnn_resnet50_fpn", "ssdlite320_mobilenet_v3_large"} <= set(names)
    assert "fcn_resnet50" not in names
    detectors = torchvision.models.list_models(module=torchvision.models.detection)
    assert names[-len(detectors) :] == tuple(detectors)
    assert list(names[: -len(detectors)]) == sorted(names[: -len(detectors)])


def test_the_architecture_is_torchvisions_own() -> None:
    torch.manual_seed(3)
    ours = build_model(ModelSettings("resnet18"), num_classes=7)
    torch.manual_seed(3)
    theirs = torchvision.models.resnet18(num_classes=7)
    assert type(ours) is type(theirs)
    assert repr(ours) == repr(theirs)
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)


@pytest.mark.parametrize(("data", "argument", "expected"), [(7, None, 7), (7, 5, 5), (None, None, 1000)])
def test_classes(data: int | None, argument: int | None, expected: int) -> None:
    arguments = {} if argument is None else {"num_classes": argument}
    model = build_model(ModelSettings("squeezenet1_1", arguments=arguments), num_classes=data)
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, expected)


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_old_initialization_is_kept_without_a_warning(name: str) -> None:
    model = build_model(ModelSettings(name), num_classes=4)  # a warning would be an error here
    assert isinstance(model.fc, nn.Linear)
    assert model.fc.out_features == 4
    deviations = {"googlenet": 0.01, "inception_v3": 0.1}
    assert model.fc.weight.std().item() == pytest.approx(deviations[name], rel=0.1)


def test_arguments_reach_the_constructor() -> None:
    model = build_model(ModelSettings("googlenet", arguments={"aux_logits": False}), num_classes=4)
    assert model.aux1 is None


def test_the_callers_arguments_are_left_alone() -> None:
    arguments: dict[str, Any] = {"aux_logits": False}
    build_model(ModelSettings("googlenet", arguments=arguments), num_classes=4)
    assert arguments == {"aux_logits": False}


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"no model 'resnet35' in torchvision; did you mean .*'resnet34'"):
        build_model(ModelSettings("resnet35"), num_classes=10)


@pytest.mark.parametrize("arguments", [{"depth": 3}, {"norm_layer": 3}, {"weights": None}])
def test_arguments_that_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"model\.arguments: torchvision's resnet18 refuses .*: "):
        build_model(ModelSettings("resnet18", arguments=arguments), num_classes=10)


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        (ModelSettings("resnet18"), {"weights": None}),
        (ModelSettings("fasterrcnn_mobilenet_v3_large_320_fpn"), {"weights": None}),
        (ModelSettings("resnet18", weights="IMAGENET1K_V1"), {"weights": None}),
    ],
)
def test_arguments_given_twice_are_refused_while_an_exception_is_handled(
    settings: ModelSettings, arguments: dict[str, Any]
) -> None:
    try:
        raise StopIteration
    except StopIteration:
        with pytest.raises(ModelError, match=r"model\.arguments: .* refuses \{'weights': None.*: .*weights"):
            build_model(replace(settings, arguments=arguments), num_classes=None)


def test_unknown_weights() -> None:
    with pytest.raises(ModelError, match=r"resnet18 has no weights 'IMAGENET'; .*'IMAGENET1K_V1'.*\.safetensors"):
        build_model(ModelSettings("resnet18", weights="IMAGENET"), num_classes=1000)


def test_pretrained_weights_of_other_classes_are_refused() -> None:
    with pytest.raises(ModelError, match="has 1000 classes, but the data 10; give a state dict"):
        build_model(ModelSettings("resnet18", weights="IMAGENET1K_V1"), num_classes=10)


def test_pretrained_weights_that_cannot_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    monkeypatch.setattr("torch.hub.get_dir", lambda: "empty")
    settings = ModelSettings("resnet18", weights="IMAGENET1K_V1")
    where = r"resnet18-.*\.pth is not in empty.checkpoints; it comes from https://.*: put it there, or give .*=FILE"
    with pytest.raises(ModelError, match=f"{where}; downloading it failed: no network"):
        build_model(settings, num_classes=None)
    assert re.search(where, str(missing_weights(settings)))


def test_weights_from_a_file(tmp_path: Path) -> None:
    trained = torchvision.models.squeezenet1_1(num_classes=5)
    torch.save(trained.state_dict(), tmp_path / "a.pth")
    settings = ModelSettings("squeezenet1_1", weights=str(tmp_path / "a.pth"))
    model = build_model(settings, num_classes=5)
    for name, value in trained.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    with pytest.raises(ModelError, match=r"a\.pth: .* 2 of another shape: classifier\.1\.weight \(5, 512, 1, 1\) for"):
        build_model(settings, num_classes=6)


def test_pretrained_weights_come_from_torchs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    settings = ModelSettings("squeezenet1_1", weights="IMAGENET1K_V1", origin="ask Ada")
    file = tmp_path / "hub" / "checkpoints" / torchvision.models.SqueezeNet1_1_Weights.IMAGENET1K_V1.url.split("/")[-1]
    assert str(missing_weights(settings)).endswith("; ask Ada")
    file.parent.mkdir(parents=True)
    trained = torchvision.models.squeezenet1_1()
    torch.save(trained.state_dict(), file)
    assert missing_weights(settings) is None
    model = build_model(settings, num_classes=1000)
    assert torch.equal(model.state_dict()["features.0.weight"], trained.state_dict()["features.0.weight"])
    file.write_bytes(b"torn")
    with pytest.raises(ModelError, match=rf"{file.name}: the file is damaged \(.*\); remove it"):
        build_model(settings, num_classes=1000)


@pytest.mark.parametrize("settings", [ModelSettings("resnet18"), ModelSettings("resnet9", weights="IMAGENET1K_V1")])
def test_nothing_is_missing_where_nothing_is_known(settings: ModelSettings) -> None:
    assert missing_weights(settings) is None
