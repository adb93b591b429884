"""Models whose residual stream runs through norms."""

from __future__ import annotations

import pytest
import torch
import torchvision
from equivalence import difference, parity, random_keep, randomized
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer

import prunekit
from prunekit.channels.trace import trace
from prunekit.compaction.compact_model import compact
from prunekit.measure.model_size import count_macs
from prunekit.measure.verification import verify
from prunekit.planning.plan import Plan


def small_convnext() -> ConvNeXt:
    settings = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, 24, 2), CNBlockConfig(24, None, 1)]
    return ConvNeXt(settings, num_classes=5)


def images(size: int = 32, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
def test_the_residual_stream_of_convnext_tiny_is_free() -> None:
    model = randomized(torchvision.models.convnext_tiny()).eval()
    pruned = prunekit.prune(model, (images(batch=1),), channels=0.5)
    chart = pruned.plan.channel_map
    assert pruned.max_relative_difference <= 1e-9
    assert chart.free_share([name for name, _ in model.named_parameters()]) > 0.999
    assert not [lock for lock in chart.locks if lock.reason.startswith("the trial")]
    assert chart.macs(pruned.plan.keep) / chart.macs() < 0.3
    assert count_macs(pruned.model, (images(batch=1),)) == chart.macs(pruned.plan.keep)
    assert pruned.model.features[0][1].normalized_shape == (48,)  # type: ignore[index, union-attr]


def small_vit() -> nn.Module:
    return VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=5)


def small_swin() -> nn.Module:
    return SwinTransformer([2, 2], 8, [1, 1], [2, 2], [4, 4], num_classes=5)


@pytest.mark.parametrize(
    ("build", "norm"), [(small_vit, "encoder.layers.encoder_layer_1.ln_2"), (small_swin, "features.1.0.norm1")]
)
def test_norms_of_transformers_do_not_lock(build: type[nn.Module], norm: str) -> None:
    model, example = randomized(build()).eval(), (images(batch=1),)
    chart = trace(model, example)
    assert norm in chart.norms
    assert not [lock for lock in chart.locks if lock.module == norm]
    pruned = prunekit.prune(model, example, channels=0.5)
    assert pruned.max_relative_difference <= 1e-9
    assert parity(model, pruned.plan, example) <= 1e-9


def test_training_under_masks_keeps_masked_equal_to_compact() -> None:
    model, x = randomized(small_convnext(), seed=3).double().train(), images().double()
    chart = trace(model, (x,))
    plan = Plan(chart, random_keep(chart, seed=6))
    small = compact(model, plan)
    nets, losses = (model, small), []
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-3) for net in nets]
    with prunekit.masked(model, plan, optimizers[0]):
        for net, optimizer in zip(nets, optimizers, strict=True):
            for _ in range(3):
                optimizer.zero_grad()
                loss = net(x).square().mean()
                loss.backward()
                optimizer.step()
            losses.append(loss.detach())
    assert difference(losses[0], losses[1]) <= 1e-9
    assert verify(model, small, plan, [(x,)]).max_relative_difference <= 1e-9
    assert verify(model, compact(model, plan), plan, [(x,)]).max_relative_difference <= 1e-9
