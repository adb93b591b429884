"""The CIFAR ResNets: their definition, their published accuracy, and what of them can be pruned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from real_cifar import WEIGHTS, needs_cifar, write_npz
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.channels.trace import trace
from prunekit.compaction.model_folder import load, save
from prunekit.data.loader import batches
from prunekit.data.sources import load_splits
from prunekit.errors import ModelError
from prunekit.measure.accuracy import evaluate
from prunekit.measure.model_size import count_macs, count_parameters
from prunekit.models.cifar import BasicBlock, CifarResNet
from prunekit.models.zoo import build_model, zoo_names
from prunekit.pruning.prune import prune
from prunekit.settings.inputs import DataSettings, ModelSettings

CPU = torch.device("cpu")
EXAMPLE = (torch.zeros(2, 3, 32, 32),)


def built(name: str, **settings: str) -> nn.Module:
    return build_model(ModelSettings(name, "cifar", **settings), num_classes=10).eval()


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("resnet8", 0.08),  # which the paper has not
        ("resnet20", 0.27),
        ("resnet32", 0.46),
        ("resnet44", 0.66),
        ("resnet56", 0.85),
        ("resnet110", 1.7),
    ],
)
def test_sizes_are_those_of_the_paper(name: str, millions: float) -> None:
    model = built(name)
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(layers) == int(name.removeprefix("resnet"))
    assert count_parameters(model) / 1e6 == pytest.approx(millions, abs=0.04)


def test_names_of_layers_are_those_of_the_published_weights() -> None:
    names = set(built("resnet20").state_dict())
    assert {"conv1.weight", "bn1.running_mean", "layer2.0.conv1.weight", "layer3.2.bn2.bias", "linear.bias"} <= names
    assert {name.split(".")[0] for name in names} == {"conv1", "bn1", "layer1", "layer2", "layer3", "linear"}
    assert not any("shortcut" in name or "downsample" in name for name in names)


def test_shortcuts_subsample_and_pad_on_both_sides() -> None:
    block = BasicBlock(16, 32, stride=2).eval()
    nn.init.zeros_(block.bn2.weight)  # the branch gives nothing: what comes out is the shortcut
    x = torch.rand(2, 16, 8, 8)
    out = block(x)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


def test_a_depth_that_is_none() -> None:
    with pytest.raises(ValueError, match="6n \\+ 2 layers, got 21"):
        CifarResNet(21)
    with pytest.raises(ModelError, match=r"no model 'resnet56' in torchvision; it is in model\.zoo=cifar"):
        build_model(ModelSettings("resnet56"), num_classes=10)
    with pytest.raises(ModelError, match=r"no model 'resnet57' in cifar; did you mean .*'resnet56'"):
        build_model(ModelSettings("resnet57", "cifar"), num_classes=10)
    with pytest.raises(ModelError, match=r"resnet20 has no weights 'IMAGENET1K_V1'; it has none with names; .* \.th"):
        build_model(ModelSettings("resnet20", "cifar", weights="IMAGENET1K_V1"), num_classes=10)
    with pytest.raises(ModelError, match=r"cifar's resnet20 refuses {'width': 3"):
        build_model(ModelSettings("resnet20", "cifar", {"width": 3}), num_classes=10)
    assert zoo_names("cifar") == ("resnet110", "resnet20", "resnet32", "resnet44", "resnet56", "resnet8")


class Reference(nn.Module):
    """The published definition, written independently: option A by pad of planes // 4."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        net = self.model
        x = F.relu(net.bn1(net.conv1(x)))
        for stage in (net.layer1, net.layer2, net.layer3):
            for block in stage:
                out = block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x)))))
                planes = out.shape[1]
                if out.shape != x.shape:
                    x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, planes // 4, planes // 4), "constant", 0)
                x = F.relu(out + x)
        return net.linear(F.avg_pool2d(x, x.shape[3]).flatten(1))


def test_it_computes_what_the_published_definition_does() -> None:
    model = built("resnet20").double()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model(x), Reference(model)(x))


@pytest.mark.slow
@needs_cifar
def test_published_weights_reach_their_accuracy(tmp_path: Path) -> None:
    """1,833 of the first 2,000 test images; all 10,000 give 91.73 % (and 93.39 % with resnet56)."""
    data = DataSettings(source="npz", root=write_npz(tmp_path / "cifar10.npz", 100, 2000), batch=250)
    model = built("resnet20", weights=str(WEIGHTS["resnet20"]))
    found = evaluate(model, batches(load_splits(data).test, 250, shuffle_seed=None), "image_classification", CPU)
    assert (found.counts[0], found.n_test) == (1833, 2000)
    assert built("resnet56", weights=str(WEIGHTS["resnet56"])).linear.weight.shape == (10, 64)


@pytest.mark.slow
def test_inside_of_blocks_and_the_stream_are_free_where_nothing_is_padded() -> None:
    model = built("resnet56")
    chart = trace(model, EXAMPLE)
    blocks = {f"layer{stage}.{block}.conv1" for stage in (1, 2, 3) for block in range(9)}
    stream = {group.name: len(group.labels) for group in chart.groups if group.name not in blocks}
    assert blocks <= {group.name for group in chart.groups}
    assert stream == {"conv1": 16}  # the rest of the later stages is what the padding leaves
    half = prune(model, EXAMPLE, channels=0.5)
    assert half.max_relative_difference <= 1e-12
    assert count_macs(half.model, EXAMPLE[:1]) / count_macs(model, EXAMPLE[:1]) < 0.4


def test_a_model_folder_builds_it_again(tmp_path: Path) -> None:
    pruned = prune(built("resnet20"), EXAMPLE, channels=0.5)
    build = ModelSettings("resnet20", "cifar", {"num_classes": 10})
    save(pruned.model, tmp_path / "model", pruned.plan, build=build)
    again = load(tmp_path / "model")
    assert type(again) is CifarResNet
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(x), pruned.model.eval()(x))
