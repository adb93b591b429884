"""Folding: the same outputs with fewer norms, and nothing folded that something else reads."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from equivalence import Net, assert_unchanged, difference, doubled, image, random_keep, randomized, snapshot
from torch import Tensor, nn

import prunekit
from prunekit.channels.trace import trace
from prunekit.compaction.compact_model import compact
from prunekit.compaction.model_folder import load, read_manifest, save
from prunekit.deploy.batchnorm_folding import fold_batchnorm
from prunekit.deploy.deployment_transform import flush_subnormals_in_place, transform_of
from prunekit.errors import ArtifactError, VerificationError
from prunekit.measure.latency_profile.network_timing import structure_hash
from prunekit.models.zoo import build_model
from prunekit.planning.plan import Plan
from prunekit.settings.deployment import DeploySettings
from prunekit.settings.inputs import ModelSettings
from prunekit.utils.files import sha256, with_checksum
from prunekit.utils.tensors import lies_channels_last


def chain(layer: nn.Module, norm: nn.Module) -> Net:
    return randomized(Net(lambda net, x: net.norm(net.layer(x)).relu(), layer=layer, norm=norm)).eval()  # type: ignore[return-value]


def outputs(model: nn.Module, example: tuple[Any, ...]) -> Any:
    with torch.no_grad():
        return model.eval()(*example)


@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [
        (nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), (2, 3, 8, 8)),
        (nn.Conv2d(4, 6, 3, groups=2, stride=2), nn.BatchNorm2d(6, affine=False), (2, 4, 8, 8)),
        (nn.Conv1d(3, 6, 3, padding="same"), nn.BatchNorm1d(6, eps=0.1), (2, 3, 8)),
        (nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4), (2, 3, 4, 4, 4)),
        (nn.ConvTranspose2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), (2, 4, 5, 5)),
        (nn.ConvTranspose2d(4, 6, 3, groups=2, stride=2), nn.BatchNorm2d(6), (2, 4, 5, 5)),
        (nn.ConvTranspose1d(6, 9, 3, groups=3), nn.BatchNorm1d(9), (2, 6, 5)),
        (nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), (3, 5)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_what_is_folded_computes_the_same(layer: nn.Module, norm: nn.Module, shape: tuple[int, ...]) -> None:
    model, example = chain(layer, norm), (torch.randn(shape, generator=torch.Generator().manual_seed(0)),)
    before = snapshot(model)
    folded = prunekit.fold_batchnorm(model.train(), example)
    assert model.training
    assert_unchanged(model, before)
    assert folded.norms == {"norm": "layer"}
    assert folded.max_relative_difference < 1e-12
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in folded.model.modules())
    assert difference(outputs(model, example), outputs(folded.model, example)) < 1e-5
    double = prunekit.fold_batchnorm(model.double(), doubled(example)).model
    assert difference(outputs(model, doubled(example)), outputs(double, doubled(example))) < 1e-12


@pytest.mark.parametrize(
    ("function", "parts", "reason"),
    [
        (lambda net, x: net.norm(net.a(x)) + net.a(x).mean(), {}, "a runs several times"),
        (lambda net, x: (y := net.a(x)) * 2 + net.norm(y), {}, "something else reads the output of a too"),
        (lambda net, x: (y := net.a(x), net.norm(y)), {}, "something else reads the output of a too"),
        (lambda net, x: net.norm(net.a(x).relu()), {}, "what it reads is not the output"),
        (lambda net, x: net.norm(net.norm(net.a(x))), {}, "it runs several times"),
        (lambda net, x: net.norm(net.a(x)) * net.norm.weight.sum(), {}, "it runs several times, or something else"),
        (lambda net, x: net.norm(net.a(x)) * net.a.weight.sum(), {}, "a runs several times, or something else"),
        (
            lambda net, x: net.norm(nn.functional.conv2d(x, net.a.weight)),
            {"a": nn.Conv2d(3, 4, 3)},
            "a has no place for a bias",
        ),
        (lambda net, x: net.norm(x), {"norm": nn.BatchNorm2d(3)}, "what it reads is not the output"),
    ],
)
def test_what_something_else_reads_is_not_folded(
    function: Callable[..., Any], parts: dict[str, nn.Module], reason: str
) -> None:
    net = randomized(Net(function, **{"a": nn.Conv2d(3, 4, 3, bias=False), "norm": nn.BatchNorm2d(4), **parts}))
    folded = prunekit.fold_batchnorm(net, image())
    assert folded.norms == {}
    assert reason in folded.kept["norm"]
    assert difference(outputs(net, image()), outputs(folded.model, image())) == 0


def test_a_linear_layer_over_rows_is_not_folded_into_a_norm_over_them() -> None:
    """(B, L, C) and a norm over L: as many channels, on another axis."""
    net = chain(nn.Linear(6, 6), nn.BatchNorm1d(6))
    folded = prunekit.fold_batchnorm(net, (torch.randn(2, 6, 6),))
    assert folded.norms == {}


class NormWithActivation(nn.BatchNorm2d):
    """As in timm: an activation that is a part of the norm."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))  # type: ignore[no-any-return]


class NormTwice(nn.BatchNorm2d):
    """What it does behind its work is no part of it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_parts_behind_a_norm_stay_and_what_else_it_does_keeps_it() -> None:
    net = chain(nn.Conv2d(3, 6, 3), NormWithActivation(6))
    folded = prunekit.fold_batchnorm(net, image())
    assert folded.norms == {"norm": "layer"}
    assert difference(outputs(net, image()), outputs(folded.model, image())) < 1e-5
    kept = prunekit.fold_batchnorm(chain(nn.Conv2d(3, 6, 3), NormTwice(6)), image())
    assert kept.kept == {"norm": "NormTwice does more than a norm and its parts behind it"}


def test_a_model_that_reads_its_norm_from_outside_is_refused() -> None:
    class Peeks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x)) * (2.0 if isinstance(self.norm, nn.BatchNorm2d) else 1.0)  # type: ignore[no-any-return]

    with pytest.raises(
        VerificationError, match=r"Peeks and its changed copy differ: in the output, values differ by 0\.5"
    ):
        prunekit.fold_batchnorm(randomized(Peeks()), image())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "norms", "left"),
    [("mobilenet_v2", 52, 0), ("densenet121", 121, 62), ("shufflenet_v2_x0_5", 56, 0)],
)
def test_every_norm_behind_a_convolution_of_torchvision(name: str, norms: int, left: int) -> None:
    """DenseNet's norms stand before their convolutions but for the stem's and those of its bottlenecks."""
    model = randomized(torchvision.models.get_model(name, weights=None, num_classes=5)).eval()
    folded = prunekit.fold_batchnorm(model, image(size=64, batch=1))
    assert len(folded.norms) == norms - left
    assert len(folded.kept) == left
    assert folded.max_relative_difference < 1e-9


def test_small_scales_leave_no_subnormal_numbers() -> None:
    model = chain(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))
    with torch.no_grad():
        model.norm.weight[:3] = 2e-38  # type: ignore[union-attr, index]
    example = image(size=8, batch=2)
    assert not flush_subnormals_in_place(copy.deepcopy(model))
    folded = prunekit.fold_batchnorm(model, example).model
    assert not flush_subnormals_in_place(copy.deepcopy(folded))
    assert (folded.get_parameter("layer.weight")[:3] == 0).any()
    assert difference(outputs(model, example), outputs(folded, example)) < 1e-6


@pytest.mark.parametrize("blocks", [0, 4])
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True), (False, False)])
def test_a_transform_found_in_the_dense_model_does_the_same_to_a_compact_one(
    wanted: tuple[bool, bool], blocks: int
) -> None:
    model = randomized(build_model(ModelSettings("resnet20", "cifar"), num_classes=5)).eval()
    example = image(size=16, batch=1)
    transform = transform_of(model, example, DeploySettings(*wanted))
    chart = trace(model, example)
    keep = random_keep(chart)
    for branch in chart.branches.found[1 : 2 * blocks : 2]:
        keep[branch.labels] = False
    plan = Plan(chart, keep, {})
    assert len(plan.gone) == blocks
    small = compact(model, plan)
    known = fold_batchnorm(small, example).model if wanted[0] else small
    found = transform(small)
    assert difference(outputs(known, example), outputs(found, example)) < 1e-6
    assert lies_channels_last(found) == wanted[1]
    assert set(found.state_dict()) == set(known.state_dict())
    outline = transform(compact(copy.deepcopy(model).to("meta"), plan))
    # so that cached times are found without a network
    assert structure_hash(outline) == structure_hash(found)


# Folders


@cache
def folded_resnet() -> tuple[nn.Module, tuple[Tensor, ...], ModelSettings, Plan]:
    build = ModelSettings("resnet18", arguments={"num_classes": 5})
    model = randomized(build_model(build, num_classes=None)).eval()
    example = image(size=64)
    chart = trace(model, example)
    plan = Plan(chart, random_keep(chart))
    small = prunekit.fold_batchnorm(compact(model, plan), example).model
    return small, example, build, plan


def compacted(path: Path) -> tuple[nn.Module, tuple[Tensor, ...], ModelSettings, Plan]:
    small, example, build, plan = folded_resnet()
    save(small, path, plan, build=build)
    return small, example, build, plan


@pytest.mark.slow
def test_a_folder_of_a_folded_model_loads_equal(tmp_path: Path) -> None:
    small, example, build, _ = compacted(tmp_path / "model")
    manifest = read_manifest(tmp_path / "model")
    assert manifest["folded_norms"]["layer1.0.bn1"] == "layer1.0.conv1"
    assert len(manifest["folded_norms"]) == 20
    dense = build_model(build, num_classes=None)
    before = snapshot(dense)
    for loaded in (load(tmp_path / "model"), load(tmp_path / "model", dense)):
        assert_unchanged(loaded, snapshot(small))
        assert torch.equal(outputs(loaded, example), outputs(small, example))
        assert [str(module) for module in loaded.modules()] == [str(module) for module in small.modules()]
    assert_unchanged(dense, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folds", "message"),
    [
        ({"bn1": "conv2"}, "folded_norms: does not fit the model"),
        ({"layer1": "conv1"}, "expected a BatchNorm with running statistics, got Sequential"),
        ({"bn1": "relu"}, "expected a layer with a weight and a bias, got ReLU"),
        ({"bn1": 3}, "expected a mapping of module paths"),
        (["bn1"], "expected a mapping of module paths"),
        ({}, "does not belong to this dense model"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(folds: Any, message: str, tmp_path: Path) -> None:
    compacted(tmp_path / "model")
    file = tmp_path / "model" / "prunekit.json"
    file.write_text(json.dumps(with_checksum({**read_manifest(tmp_path / "model"), "folded_norms": folds})))
    with pytest.raises(ArtifactError, match=message):
        load(tmp_path / "model")
    assert (
        sha256(tmp_path / "model" / "model.safetensors")
        == read_manifest(tmp_path / "model")["sha256"]["model.safetensors"]
    )
