"""Experiments on a model: what they run, and that nothing is left of them. Times are not looked at."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

import prunekit
from prunekit.hooks.hook import count_hooks
from prunekit.measure.causes import experiments
from prunekit.measure.causes.breakdown import record_calls

CPU = torch.device("cpu")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(256, 5)).eval()


class Watched(nn.Module):
    """Notes the circumstances of every call in a list that copies share."""

    def __init__(self, seen: list[object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, 1, 1))
        self.note = seen.append

    def forward(self, x: Tensor) -> Tensor:
        flushed = bool((torch.tensor([1e-40]) * 1.0 == 0).item())
        last = x.is_contiguous(memory_format=torch.channels_last)
        self.note((len(x), torch.get_num_threads(), flushed, last))
        return x * self.weight.sum()


X = torch.randn(3, 2, 4, 4)


def test_copies_beyond_the_largest_are_at_its_speed() -> None:
    copy_ms = experiments.copy_times(CPU)
    assert copy_ms(0) == copy_ms(1 << 14) > 0
    assert min(copy_ms(1 << 20), copy_ms(1 << 23)) <= copy_ms(3 << 20) <= max(copy_ms(1 << 20), copy_ms(1 << 23))
    assert copy_ms(1 << 30) == pytest.approx(16 * copy_ms(1 << 26))


def test_each_way_is_what_it_says() -> None:
    seen: list[object] = []
    model = Watched(seen)
    plain = (3, 1, False, False)
    assert experiments.with_channels_last(model, (X,), CPU) is not None
    assert set(seen) == {plain, (3, 1, False, True)}
    seen.clear()
    if torch.set_flush_denormal(False):
        assert experiments.with_flushing(model, (X,)) is not None
        assert set(seen) == {plain, (3, 1, True, False)}
    seen.clear()
    assert set(experiments.with_thread_counts((1, 2), model, (X,), now=3)) == {1, 2}
    assert set(seen) == {(3, threads, False, False) for threads in (1, 2, 3)}
    assert torch.get_num_threads() == 1
    seen.clear()
    experiments.with_larger_batch(model, model, (X,), 4, CPU)
    assert set(seen) == {(12, 1, False, False)}
    seen.clear()
    model(X)
    assert seen == [plain]


@pytest.mark.parametrize("flush", [False, True])
def test_flushing_is_as_it_was(flush: bool) -> None:
    if not torch.set_flush_denormal(flush):
        pytest.skip("this processor cannot flush")
    try:
        experiments.with_flushing(nn.Identity(), (X,))
        assert bool((torch.tensor([1e-40]) * 1.0 == 0).item()) is flush
    finally:
        torch.set_flush_denormal(False)


def test_channels_last_needs_images_and_kernels() -> None:
    assert experiments.with_channels_last(nn.Linear(4, 4), (X,), CPU) is None
    assert experiments.with_channels_last(nn.Conv1d(2, 2, 1), (X[0],), CPU) is None


def test_masks_are_found_and_a_copy_is_without() -> None:
    model, x = net(), torch.randn(1, 3, 8, 8)
    assert experiments.mask_hooks(model) == 0
    plan = prunekit.plan(model, (x,), channels=0.5)
    with prunekit.masked(model, plan):
        hooks = count_hooks(model)
        assert experiments.mask_hooks(model) > 0
        want = model(x)
        with torch.no_grad():
            experiments.without_masks(model, (x,), CPU)
        assert count_hooks(model) == hooks
        assert torch.equal(model(x), want)
    assert experiments.mask_hooks(model) == 0
    for name in ("0", "2"):
        torch_prune.l1_unstructured(model.get_submodule(name), "weight", 0.5)
    assert experiments.mask_hooks(model) == 2
    with torch.no_grad():
        model(x)
        experiments.without_masks(model, (x,), CPU)
    assert experiments.mask_hooks(model) == 2


def test_channels_of_zeros_are_counted() -> None:
    model, x = net(), torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        model[0].weight[[1, 5, 7]] = 0
        model[2].weight[:, [1, 5, 7]] = 0
    layers = {path: call.layer for (path, _), call in record_calls(model, (x,)).items() if call.layer is not None}
    assert set(layers) == {"0", "2", "4"}
    assert experiments.zero_channels(model, layers) == {"0": (3, 16)}
    assert 0 <= experiments.share_without(layers["0"], (3, 13), CPU) < 1


def test_a_layer_is_run_at_its_pruned_widths_rounded() -> None:
    layer = record_calls(nn.Conv2d(13, 21, 3), (torch.randn(1, 13, 6, 6),))["", "convolution"].layer
    assert layer is not None
    found = list(experiments.width_times("conv", 5.0, layer, (13, 64), CPU))
    assert [(one.step, one.now.widths, one.down.widths, one.up.widths) for one in found] == [
        (8, (13, 21), (13, 16), (13, 24)),
        (16, (13, 21), (13, 16), (13, 32)),
    ]
    assert all(one.now.ms > 0 and one.row_ms == 5 for one in found)
    assert list(experiments.width_times("conv", 5.0, layer, (13, 21), CPU)) == []


@pytest.mark.parametrize(("groups", "widths", "more"), [(1, (26, 42), 4.0), (13, (26, 26), 2.0)])
def test_a_layer_is_run_at_the_dense_widths(groups: int, widths: tuple[int, int], more: float) -> None:
    conv = nn.Conv2d(13, 13 if groups > 1 else 21, 3, groups=groups)
    layer = record_calls(conv, (torch.randn(1, 13, 6, 6),))["", "convolution"].layer
    assert layer is not None
    found = experiments.kernel_times("conv", 5.0, layer, widths, CPU)
    assert found is not None
    assert (found.now.widths, found.dense.widths, found.more_macs) == (layer.widths, widths, more)
    assert found.row_ms == 5
    assert min(found.now.ms, found.dense.ms) > 0
    assert experiments.kernel_times("conv", 5.0, layer, layer.widths, CPU) is None
