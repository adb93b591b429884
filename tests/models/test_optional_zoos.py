"""Zoos that other packages bring."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from prunekit.compaction.model_folder import load, save
from prunekit.errors import ArtifactError, ModelError
from prunekit.models.zoo import build_model, image_shape, zoo_names
from prunekit.pruning.plan_search import PlanSearch
from prunekit.settings.inputs import ModelSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings

PACKAGES = {"timm": "timm", "hf": "transformers"}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "timm": ("test_efficientnet", {}),
    "hf": ("convnext", {"hidden_sizes": [8, 8, 12, 12], "depths": [1, 1, 1, 1], "image_size": 64}),
}


def need(zoo: str) -> None:
    pytest.importorskip(PACKAGES[zoo], reason=f"the extra {zoo} is not installed")


@pytest.mark.parametrize("zoo", PACKAGES)
def test_without_its_package_the_extra_is_named(zoo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[zoo], None)
    with pytest.raises(ModelError, match=rf"model\.zoo={zoo} needs .* pip install prunekit\[{zoo}\]"):
        zoo_names(zoo)
    with pytest.raises(ModelError, match=rf"prunekit\[{zoo}\]"):
        build_model(ModelSettings("any", zoo), num_classes=None)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("zoo", PACKAGES)
def test_built_pruned_saved_and_built_again_by_its_folder(zoo: str, tmp_path: Path) -> None:
    need(zoo)
    name, arguments = SMALL[zoo]
    settings = ModelSettings(name, zoo, arguments=arguments)  # type: ignore[arg-type]
    model = build_model(settings, num_classes=5).eval()
    shape = image_shape(model)
    assert shape is not None
    assert shape[0] == 3
    example = (torch.randn(1, *shape),)
    planned = PlanSearch.trace(model, example, PruneSettings(budget=BudgetSettings(channels=0.5))).find()
    built = ModelSettings(name, zoo, arguments={**arguments, "num_classes": 5})  # type: ignore[arg-type]
    save(planned.compact, tmp_path / "model", planned.plan, build=built)
    loaded = load(tmp_path / "model")
    assert type(loaded) is type(model)
    want, got = (getattr(out, "logits", out) for out in (planned.compact.eval()(*example), loaded(*example)))
    assert want.shape == (1, 5)
    assert torch.equal(want, got)


@pytest.mark.parametrize("zoo", PACKAGES)
def test_an_unknown_name_gets_the_nearest(zoo: str) -> None:
    need(zoo)
    name = SMALL[zoo][0]
    with pytest.raises(ModelError, match=rf"there is no model '{name}x' in {zoo}; did you mean '{name}'"):
        build_model(ModelSettings(f"{name}x", zoo), num_classes=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("zoo", "arguments", "message"),
    [
        ("timm", {"pretrained": True}, "pretrained: weights come from model.weights"),
        ("timm", {"checkpoint_path": "a.pth"}, "checkpoint_path: weights come from model.weights"),
        ("timm", {"nonsense": 1}, "refuses .*nonsense"),
        ("hf", {"hidden_size": 8}, "there is no 'hidden_size' in the configuration of convnext; did you mean"),
        ("hf", {"num_channels": "x"}, "num_channels.*expected int"),
        ("hf", {"attn_implementation": "someone/kernel"}, "attn_implementation: .* arguments name no code"),
        ("hf", {"hidden_act": "https://example.org/act"}, "hidden_act: expected a name such as 'gelu', no path"),
        ("timm", {"act_layer": "../act.py:make"}, "act_layer: expected a name such as 'gelu', no path"),
        ("timm", {"block_args": [{"url": "x"}]}, r"block_args\[0\].url: weights come from model.weights"),
    ],
)
def test_arguments_that_fetch_weights_or_code_are_refused(zoo: str, arguments: dict[str, Any], message: str) -> None:
    need(zoo)
    with pytest.raises(ModelError, match=message):
        build_model(ModelSettings(SMALL[zoo][0], zoo, arguments=arguments), num_classes=None)  # type: ignore[arg-type]


def test_a_folder_cannot_ask_for_more_than_a_recipe(tmp_path: Path) -> None:
    need("timm")
    name = SMALL["timm"][0]
    model = build_model(ModelSettings(name, "timm"), num_classes=None).eval()
    example = (torch.randn(1, 3, 64, 64),)
    plan = PlanSearch.trace(model, example, PruneSettings(budget=BudgetSettings(channels=0.5))).find()
    build = ModelSettings(name, "timm", arguments={"checkpoint_path": "a.pth"})
    save(plan.compact, tmp_path / "model", plan.plan, build=build)
    with pytest.raises(ArtifactError, match="checkpoint_path: weights come from"):
        load(tmp_path / "model")


def test_weights_have_no_names_here() -> None:
    need("timm")
    with pytest.raises(ModelError, match=r"has no weights 'IMAGENET1K_V1'; it has none with names"):
        build_model(ModelSettings(SMALL["timm"][0], "timm", weights="IMAGENET1K_V1"), num_classes=None)


@pytest.mark.parametrize("given", [None, False])
def test_no_argument_takes_the_place_of_the_one_that_keeps_timm_from_downloading(given: Any) -> None:
    need("timm")
    settings = ModelSettings(SMALL["timm"][0], "timm", arguments={"pretrained": given})
    with pytest.raises(ModelError, match=r"timm's test_efficientnet refuses \{'pretrained'"):
        build_model(settings, num_classes=5)
