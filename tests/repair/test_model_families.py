"""Repair on small members of many families of models: nearer to the dense outputs, and still masked == compact."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from equivalence import randomized
from torch import nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.efficientnet import MBConvConfig
from torchvision.models.googlenet import BasicConv2d, Inception

import prunekit
from prunekit.compaction.compact_model import compact
from prunekit.measure.verification import verify
from prunekit.repair.repair_model import repair
from prunekit.settings.calibration import RepairSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings

Build = Callable[[], nn.Module]
BLOCK = partial(MBConvConfig, width_mult=0.5, depth_mult=0.5)
FAMILIES: dict[str, Build] = {
    "dense": lambda: models.DenseNet(8, (2, 2), 16, num_classes=5),
    "depthwise": lambda: models.MobileNetV2(
        5, width_mult=0.25, inverted_residual_setting=[[1, 16, 1, 1], [6, 32, 2, 2]]
    ),
    "squeeze and excitation": lambda: models.EfficientNet(
        [BLOCK(1, 3, 1, 32, 16, 1), BLOCK(6, 3, 2, 16, 32, 4)], 0.0, num_classes=5, last_channel=32
    ),
    "layer norm": lambda: models.ConvNeXt([CNBlockConfig(16, 24, 2), CNBlockConfig(24, None, 2)], num_classes=5),
    "attention": lambda: models.VisionTransformer(32, 8, 2, 4, 24, 48, num_classes=5),
    "windows": lambda: models.SwinTransformer([4, 4], 16, [2], [4], [4, 4], stochastic_depth_prob=0.0, num_classes=5),
    "branches": lambda: nn.Sequential(
        BasicConv2d(3, 12, kernel_size=3, stride=2),
        Inception(12, 8, 8, 12, 4, 8, 8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(36, 5),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_come_nearer_to_those_of_the_dense_model(family: str) -> None:
    torch.manual_seed(0)
    model, images = randomized(FAMILIES[family]()).eval(), torch.randn(64, 3, 32, 32)
    settings = PruneSettings(BudgetSettings(macs=0.6), criterion="random")
    plan = prunekit.plan(model, (images[:2],), settings=settings)
    repaired, report = repair(model, plan, images, RepairSettings(rows=1024, held_out=0.25))
    assert report.kept
    assert report.after < 0.6 * report.before
    refitted = [layer for layer in report.layers if layer.applied]
    assert len(refitted) > len(report.layers) / 2
    assert all(layer.note for layer in report.layers if not layer.applied)
    verify(repaired, compact(repaired, plan), plan, [(images[:4],)])
