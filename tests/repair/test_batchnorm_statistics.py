"""BatchNorm recalibration is exact over batches of any size; other statistics leave what a model computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from process_group import together
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from prunekit.distributed.process_group import full_tensor, rank, size
from prunekit.errors import DataError
from prunekit.hooks.hook import count_hooks
from prunekit.repair.batchnorm_statistics import rebase_batchnorm, recalibrate_batchnorm

SIZES = (7, 1, 12, 3, 2, 1)  # the last joins the one before


def batches(x: Tensor, sizes: tuple[int, ...] = SIZES) -> list[tuple[Tensor, Tensor]]:
    return [(part, torch.zeros(len(part))) for part in x.split(sizes)]


def data(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    scale = torch.linspace(0.1, 30, sum(SIZES), dtype=torch.float64)
    x = torch.randn(sum(SIZES), *shape, dtype=torch.float64, generator=generator)
    return x * scale.reshape(-1, *[1] * len(shape)) + 100  # the batches differ, and the mean is far from zero


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_equal_to_one_batch_of_everything(norm: Any, momentum: float | None) -> None:
    dims = {nn.BatchNorm1d: (), nn.BatchNorm2d: (4, 5), nn.BatchNorm3d: (2, 3, 2)}[norm]
    x = data(6, *dims)
    model, reference = norm(6, momentum=momentum).double(), norm(6, momentum=1.0).double()
    reference(x)
    assert recalibrate_batchnorm(nn.Sequential(model), batches(x)) == ("0",)
    torch.testing.assert_close(model.running_mean, reference.running_mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(model.running_var, reference.running_var, rtol=1e-12, atol=0)
    assert model.momentum == momentum
    assert model.num_batches_tracked == 4


class Forces(nn.Module):
    """Returns the gradient of its layers by the input, with gradients enabled by itself or by its caller."""

    def __init__(self, *, enables: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 5), nn.BatchNorm1d(5))
        self.enables = enables

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.enables or torch.is_grad_enabled()):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.layers(x).square().sum(), x)[0]


def test_a_pass_that_runs_again_with_gradients_counts_once() -> None:
    once, again = Forces(enables=True).double(), Forces(enables=False).double()
    again.load_state_dict(once.state_dict())
    for model in (once, again):
        assert recalibrate_batchnorm(model, batches(data(6))) == ("layers.1", "layers.4")
    for name, value in again.state_dict().items():
        assert torch.equal(value, once.state_dict()[name]), name
    assert again.layers[1].num_batches_tracked == 4
    expected = once.layers[0](data(6)).var(0)
    torch.testing.assert_close(again.layers[1].running_var, expected, rtol=1e-12, atol=0)


def test_float32_keeps_a_small_variance_beside_a_large_mean() -> None:
    x = 1000 + 0.1 * data(6, 4, 4).sub(100).div(30)
    model = nn.BatchNorm2d(6)
    recalibrate_batchnorm(model, batches(x.float()))
    expected = x.float().double().transpose(0, 1).flatten(1).var(1)
    torch.testing.assert_close(model.running_var.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_deep_layers_pool_what_reaches_them() -> None:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=4).double()
    x = data(3, 33, 33)
    seen: dict[str, list[Tensor]] = {}
    norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    handles = [
        module.register_forward_pre_hook(lambda m, i, name=name: seen.setdefault(name, []).append(i[0].clone()))
        for name, module in norms.items()
    ]
    assert recalibrate_batchnorm(model, batches(x)) == tuple(norms)
    for handle in handles:
        handle.remove()
    for name, module in norms.items():
        values = torch.cat([part.transpose(0, 1).flatten(1) for part in seen[name]], 1)
        torch.testing.assert_close(module.running_mean, values.mean(1), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(module.running_var, values.var(1), rtol=1e-9, atol=1e-12)


def test_modes_are_restored_and_nothing_else_changes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.BatchNorm2d(4)).double()
    model[3].eval()
    before = {name: value.clone() for name, value in model.named_parameters()}
    dropped: list[bool] = []
    model[2].register_forward_hook(lambda m, i, o: dropped.append(not torch.equal(i[0], o)))
    recalibrate_batchnorm(model, batches(data(3, 5, 5)))
    assert [module.training for module in model] == [True, True, True, False]
    assert [model[i].track_running_stats for i in (1, 3)] == [True, True]
    assert count_hooks(model) == 1
    assert dropped == [False] * 4
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_a_module_that_does_not_run_keeps_its_statistics() -> None:
    torch.manual_seed(0)
    model = torchvision.models.googlenet(num_classes=2, init_weights=False)
    model.register_module("unused", nn.BatchNorm2d(3))
    recalibrated = recalibrate_batchnorm(model, batches(torch.randn(4, 3, 64, 64), (2, 2)))
    assert "conv1.bn" in recalibrated
    assert not any(name.startswith(("aux", "unused")) for name in recalibrated)
    assert model.aux1.conv.bn.num_batches_tracked == 0


@pytest.mark.parametrize(("sizes", "message"), [((), "at least one batch"), ((1,), r"batch 1 of float64 \(1, 6\)")])
def test_too_little_data_changes_nothing(sizes: tuple[int, ...], message: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(6)).double()
    with pytest.raises(DataError, match=message):
        recalibrate_batchnorm(model, batches(data(6)[: sum(sizes)], sizes) if sizes else [])
    assert torch.equal(model[0].running_mean, torch.zeros(6))
    assert model[0].num_batches_tracked == 0
    assert model[0].track_running_stats
    assert count_hooks(model) == 0


def test_a_model_without_batchnorm() -> None:
    assert recalibrate_batchnorm(nn.Linear(6, 2), batches(data(6).float())) == ()


def images(seed: int, shift: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return shift + (1 + shift) * torch.randn(24, 3, 8, 8, dtype=torch.float64, generator=generator)


def trained() -> nn.Sequential:
    """A model that has seen images, with scales and shifts of its own; a channel of its first norm has died since."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5), nn.Flatten()
    ).double()
    for norm in (model[1], model[4]):
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.uniform_(norm.bias, -1, 1)
    recalibrate_batchnorm(model, images(1, 0.0))
    nn.init.zeros_(model[0].weight[5])
    return model.eval()


def rebased(model: nn.Module, parts: list[Tensor]) -> nn.Module:
    def passes() -> Iterator[bool]:
        for part in parts:
            model(part)
            yield True

    rebase_batchnorm(model, passes())
    return model


def test_statistics_of_other_images_leave_what_a_model_computes() -> None:
    """It begins to normalize by the batch with the same outputs, which are far from them else."""
    model, others = trained(), images(2, 1.5)
    expected, before = [model(x) for x in (images(3, 0.0), others)], model[1].weight.clone()
    apart = (model.train()(others) - expected[1]).detach().abs().max()  # which changes the statistics
    model = rebased(trained(), list(others.split((10, 14))))
    for x, output in zip((images(3, 0.0), others), expected, strict=True):
        torch.testing.assert_close(model(x), output, rtol=1e-11, atol=1e-11)
    assert count_hooks(model) == 0
    mean = model[0](others).transpose(0, 1).flatten(1).mean(1)
    torch.testing.assert_close(model[1].running_mean[:5], mean[:5], rtol=1e-12, atol=0)
    assert not torch.equal(model[1].weight[:5], before[:5])
    assert torch.equal(model[1].weight[5], before[5])  # of a channel that does not vary
    assert (model.train()(others) - expected[1]).detach().abs().max() < 0.01 * apart


def test_norms_without_anything_to_change_stay_as_they_are() -> None:
    model = trained()
    model[4].weight.requires_grad_(False)
    model.append(nn.Unflatten(1, (5, 16))).append(nn.BatchNorm1d(5).double())  # not trained
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = rebased(model.eval(), [images(2, 1.5)]).state_dict()
    assert {name.split(".")[0] for name, value in before.items() if not torch.equal(found[name], value)} == {"1"}
    shared = trained()
    shared[4].weight = shared[4].bias
    before = shared[4].running_mean.clone()
    assert torch.equal(rebased(shared, [images(2, 1.5)])[4].running_mean, before)
    empty = nn.Linear(2, 2)
    rebase_batchnorm(empty, iter(lambda: pytest.fail("a model without BatchNorm is not run"), True))


def in_shares(sharded: bool) -> dict[str, Tensor]:
    model, parts = trained(), list(images(2, 1.5).split((10, 14)))
    if sharded:
        fully_shard(model, reshard_after_forward=True)
    found = rebased(model, parts[rank() :: size()])
    return {name: full_tensor(value).clone() for name, value in found.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_processes_take_the_statistics_of_all_their_images(sharded: bool, tmp_path: Path) -> None:
    alone = in_shares(False)
    for found in together(2, tmp_path, in_shares, sharded):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)
