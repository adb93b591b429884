"""Healthy models raise no alarm: trained and fresh ones, on real images, masked and compact as well as dense."""

from __future__ import annotations

import pytest
import real_cifar
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

import prunekit
from prunekit.data.datasets import IMAGENET_MEAN, IMAGENET_STD, ImageTransform
from prunekit.data.loader import batches
from prunekit.data.sources import load_splits
from prunekit.data.splits import Splits
from prunekit.hooks.hook import count_hooks
from prunekit.inspection.diagnosis.data_checks import Pool
from prunekit.inspection.diagnosis.diagnose_model import diagnose
from prunekit.inspection.diagnosis.findings import CHECKS, Diagnosis
from prunekit.models.zoo import build_model
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.train import TrainSettings
from prunekit.training.loop import fit
from prunekit.utils.context import seeded

Batches = list[tuple[Tensor, Tensor]]


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        nn.Conv2d(16, 24, 3, stride=2), nn.ReLU(), nn.Conv2d(24, 24, 3), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Flatten(), nn.Linear(24, 10),
    )  # fmt: skip


@pytest.fixture(scope="module")
def splits() -> Splits:
    return load_splits(DataSettings(image_size=8))


@pytest.fixture(scope="module")
def digits(splits: Splits) -> Batches:
    return list(batches(splits.train, 64, shuffle_seed=0))[:2]


@pytest.fixture(scope="module")
def trained(splits: Splits) -> nn.Module:
    with seeded(0):
        model = small()
    history = fit(model, splits, TrainSettings(epochs=3), device=torch.device("cpu"), seed=0, batch=64)
    assert history.rows[-1].validation_score > 90
    return model


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def assert_healthy(found: Diagnosis) -> None:
    assert found.findings == ()
    assert set(found.checked) == set(CHECKS)


@pytest.mark.slow
def test_a_small_trained_net(trained: nn.Module, splits: Splits, digits: Batches) -> None:
    pool = Pool(batches(splits.train, 64, shuffle_seed=1), batches(splits.validation, 64, shuffle_seed=None), 2000)
    found = diagnose(trained, digits, optimizer=sgd(trained, 0.01), pool=Pool(held_out=pool.held_out))
    assert_healthy(found)
    twice = diagnose(trained, digits, optimizer=sgd(trained, 0.01), pool=pool)
    assert [each.kind for each in twice.findings] == ["duplicated_data"]  # the batches are in the pool once more


@pytest.mark.slow
def test_a_fresh_resnet_of_torchvision() -> None:
    with seeded(0):
        model = torchvision.models.ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10, zero_init_residual=True)
    images = load_splits(DataSettings(image_size=24))
    data = list(batches(images.train, 16, shuffle_seed=0))[:1]
    assert_healthy(diagnose(model, data, optimizer=sgd(model)))


@pytest.mark.slow
@real_cifar.needs_cifar
def test_a_published_resnet20() -> None:
    model = build_model(
        ModelSettings("resnet20", "cifar", weights=str(real_cifar.WEIGHTS["resnet20"])), num_classes=None
    )
    pixels, labels = real_cifar.images("train", 64)
    scaled = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    images = ImageTransform(32, IMAGENET_MEAN, IMAGENET_STD).normalized(scaled)
    assert_healthy(diagnose(model, [(images, torch.from_numpy(labels).long())], optimizer=sgd(model, 0.02)))


def test_a_fresh_transformer_whose_head_starts_at_zero(digits: Batches) -> None:
    with seeded(0):
        model = torchvision.models.VisionTransformer(8, 4, 2, 2, 16, 32, num_classes=10)
    assert_healthy(diagnose(model, digits, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3)))


def test_masked_channels_are_not_dead(trained: nn.Module, digits: Batches) -> None:
    plan = prunekit.plan(trained, (digits[0][0][:2],), channels=0.4)
    optimizer = sgd(trained, 0.001)
    with prunekit.masked(trained, plan, optimizer, restore=True):
        assert not trained[0].weight.flatten(1).any(1).all()  # some are zero
        assert_healthy(diagnose(trained, digits, optimizer=optimizer))
        assert_healthy(diagnose(prunekit.compact(trained, plan), digits, optimizer=optimizer))


class Counts(nn.Module):
    """Puts a new tensor in the place of its buffer in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.passes = self.passes + 1
        return x


def test_the_model_is_afterwards_what_it_was(trained: nn.Module, digits: Batches) -> None:
    net = nn.Sequential(trained, nn.Dropout(0.5), Counts())
    net.train()
    trained[1].eval()
    trained[3].weight.grad = torch.ones_like(trained[3].weight)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    modes, random = [module.training for module in net.modules()], torch.get_rng_state()
    first = diagnose(net, digits, optimizer=sgd(net, 100.0))
    assert {each.kind for each in first.findings} == {"batchnorm_mode", "learning_rate"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert [module.training for module in net.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert bool((trained[3].weight.grad == 1).all())
    assert trained[0].weight.grad is None
    assert count_hooks(net) == 0
    assert diagnose(net, digits, optimizer=sgd(net, 100.0)) == first
    trained[3].weight.grad = None
    trained.train()
