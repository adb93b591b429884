"""Faults planted in a small net that is healthy without them: each is found, and named where it is."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.data.loader import batches
from prunekit.data.sources import load_splits
from prunekit.inspection.diagnosis.diagnose_model import diagnose
from prunekit.inspection.diagnosis.findings import CHECKS, Diagnosis, Finding
from prunekit.settings.inputs import DataSettings

Batches = list[tuple[Tensor, Tensor]]


class Net(nn.Module):
    """Three convolutions with BatchNorm, a gate, two linear layers; for the digits at 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.conv2, self.bn2 = nn.Conv2d(12, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.relu, self.gate, self.sigmoid = nn.ReLU(inplace=True), nn.Linear(16, 16), nn.Sigmoid()
        self.conv3 = nn.Conv2d(16, 16, 3, stride=2)
        self.flatten = nn.Flatten()
        self.fc1, self.fc2 = nn.Linear(144, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = x * self.sigmoid(self.gate(x.mean((2, 3))))[:, :, None, None]
        x = self.flatten(F.relu(self.conv3(x)))
        return self.fc2(F.relu(self.fc1(x)))  # type: ignore[no-any-return]


class Sigmoids(nn.Module):
    """Twelve sigmoid layers as they are initialized: each passes on a quarter of the gradient at best."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(192, 192), nn.Sigmoid())))
        self.head = nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x.flatten(1)))  # type: ignore[no-any-return]


class KeepsNormEval(Net):
    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        self.bn2.eval()
        return self


class AddsUnequal(Net):
    def forward(self, x: Tensor) -> Tensor:
        low = self.bn1(self.conv1(x))
        high = self.conv2(low)
        return self.fc2((low + high).mean((2, 3)))  # type: ignore[no-any-return]


class TakesLogarithm(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.bn2(self.conv2(torch.log(self.bn1(self.conv1(x)))))
        x = x + self.gate(x.mean((2, 3)))[:, :, None, None]
        return self.fc2(self.fc1(self.flatten(self.conv3(x))))  # type: ignore[no-any-return]


class TakesRoot(Net):
    def forward(self, x: Tensor) -> Tensor:
        inside = self.bn2(self.conv2(self.conv1(x)))
        return super().forward(x) + (inside - inside.detach()).abs().sqrt().sum()  # type: ignore[no-any-return]


def scaled(module: nn.Module, factor: float, bias: float | None = None) -> None:
    with torch.no_grad():
        module.weight.mul_(factor)
        if bias is not None:
            module.bias.fill_(bias)


def dead(net: Net, data: Batches) -> None:
    scaled(net.conv3, 1, bias=-100.0)


def saturated(net: Net, data: Batches) -> None:
    scaled(net.gate, 1, bias=50.0)


def constant(net: Net, data: Batches) -> None:
    with torch.no_grad():
        net.fc1.weight[:12] = 0


def nan_weight(net: Net, data: Batches) -> None:
    with torch.no_grad():
        net.conv2.weight[3, 2, 1, 1] = math.nan


def tiny_variance(net: Net, data: Batches) -> None:
    scaled(net.conv2, 1e-7)


def running_variance(net: Net, data: Batches) -> None:
    net.bn2.running_var.fill_(1e-12)


def exploding(net: Net, data: Batches) -> None:
    scaled(net.conv3, 1e6)


def norm_in_eval(net: Net, data: Batches) -> None:
    net.bn2.eval()


def norm_in_train(net: Net, data: Batches) -> None:
    net.eval()
    net.bn1.train()


def frozen(net: Net, data: Batches) -> None:
    net.conv2.requires_grad_(False)


def unused(net: Net, data: Batches) -> None:
    net.extra = nn.Linear(3, 3)


def copied(net: Net, data: Batches) -> None:
    data[1] = data[0]


def label_too_large(net: Net, data: Batches) -> None:
    data[0][1][5] = 10


def bytes_as_they_are(net: Net, data: Batches) -> None:
    data[:] = [((images + 1) * 127.5, labels) for images, labels in data]


def wrong_size(net: Net, data: Batches) -> None:
    net.fc1 = nn.Linear(128, 24)


def nothing(net: Net, data: Batches) -> None:
    return


@dataclass(frozen=True)
class Planted:
    """A fault, and what is to be said of it."""

    kind: str
    module: str
    plant: Callable[[Net, Batches], None]
    says: str
    net: type[nn.Module] = Net
    lr: float = 0.05


PLANTED = [
    Planted(
        "shape_mismatch", "fc1", wrong_size,
        "conv3 (Conv2d) (64, 16, 3, 3) -> flatten (Flatten) (64, 144)",
    ),
    Planted("shape_mismatch", "", nothing, "low (64, 12, 8, 8), high (64, 16, 8, 8), in the forward pass", AddsUnequal),
    Planted("non_finite", "conv2", nan_weight, "conv2.weight hold NaN or Inf"),
    Planted("non_finite", "conv2", nothing, "input of conv2", TakesLogarithm),
    Planted("non_finite", "bn2", nothing, "the gradient of its output is NaN or Inf, the first on the way", TakesRoot),
    Planted("exploding_gradient", "conv3", exploding, "times on its way back through conv3"),
    Planted("vanishing_gradient", "layers.", nothing, "modules up to here learn hardly anything", Sigmoids),
    Planted("dead_relu", "", dead, "16 of 16 channels behind conv3 are 0 for all 128 inputs"),
    Planted("saturated_sigmoid", "sigmoid", saturated, "100.0 %"),
    Planted("constant_channels", "fc1", constant, "12 of 24 channels never change"),
    Planted("batchnorm_mode", "bn2", norm_in_eval, "bn2 in eval mode"),
    Planted("batchnorm_mode", "bn2", nothing, "bn2 in eval mode", KeepsNormEval),
    Planted("batchnorm_mode", "bn1", norm_in_train, "bn1 in train mode"),
    Planted("batchnorm_variance", "bn2", tiny_variance, "16 of 16 channels have less of its inputs"),
    Planted("batchnorm_variance", "bn2", running_variance, "16 of 16 channels have less in its running statistics"),
    Planted("unused_parameter", "extra", unused, "extra.weight, extra.bias; its module never runs"),
    Planted("frozen_parameter", "conv2", frozen, "1 of 15 are frozen"),
    Planted("duplicated_data", "data", copied, "64 of 128 are copies of one before"),
    Planted("labels_out_of_range", "data", label_too_large, "1 of 128 are others: 10"),
    Planted("input_normalization", "data", bytes_as_they_are, "standard deviations"),
    Planted("learning_rate", "", nothing, "on one batch 16 steps take the loss from", lr=100.0),
]  # fmt: skip


@pytest.fixture(scope="module")
def digits() -> Batches:
    splits = load_splits(DataSettings(image_size=8))
    return list(batches(splits.train, 64, shuffle_seed=0))[:2]


def look(net: nn.Module, data: Batches, lr: float = 0.05) -> Diagnosis:
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    return diagnose(net, data, optimizer=optimizer)


def every(findings: tuple[Finding, ...]) -> list[Finding]:
    return [each for finding in findings for each in (finding, *every(finding.consequences))]


def test_the_net_is_healthy_without_them(digits: Batches) -> None:
    torch.manual_seed(0)
    found = look(Net(), digits)
    assert found.findings == ()
    assert set(found.checked) == set(CHECKS)
    assert found.images == 128


def test_every_kind_is_planted() -> None:
    assert {planted.kind for planted in PLANTED} == set(CHECKS) - {"run_error"}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: f"{planted.kind}-{planted.plant.__name__}")
def test_planted_faults_are_found_and_named(digits: Batches, planted: Planted) -> None:
    torch.manual_seed(0)
    net, data = planted.net(), copy.deepcopy(digits)
    planted.plant(net, data)  # type: ignore[arg-type]
    found = look(net, data, planted.lr)
    finding = next(each for each in found.findings if each.kind == planted.kind)
    assert finding.module.startswith(planted.module)
    assert planted.module.endswith(".") or finding.module == planted.module
    assert planted.says in finding.came
    assert finding.expected
    assert finding.advice
    assert [each.kind for each in found.findings] == [planted.kind], every(found.findings)  # all else follows from it


def test_several_faults_come_in_order_of_execution(digits: Batches) -> None:
    torch.manual_seed(0)
    net, data = Net(), copy.deepcopy(digits)
    for plant in (unused, constant, frozen, copied):
        plant(net, data)
    found = [(each.kind, each.module) for each in look(net, data).findings]
    assert found == [
        ("duplicated_data", "data"),
        ("frozen_parameter", "conv2"),
        ("constant_channels", "fc1"),
        ("unused_parameter", "extra"),
    ]
