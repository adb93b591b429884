"""Other layouts and flushed numbers: what is computed stays."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from equivalence import Net, assert_unchanged, difference, image, randomized, snapshot
from torch import nn

import prunekit
from prunekit.deploy.deployment_transform import flush_subnormals_in_place, without_subnormals
from prunekit.errors import VerificationError


def net() -> nn.Module:
    parts = {"a": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4), "b": nn.Conv2d(4, 5, 3)}
    return randomized(Net(lambda net, x: net.b(net.norm(net.a(x)).relu()), **parts)).eval()


def test_weights_lie_channels_last_and_outputs_too() -> None:
    model = net()
    before = snapshot(model)
    moved = prunekit.channels_last(model, image())
    assert_unchanged(model, before)
    assert_unchanged(moved, before)
    assert moved.a.weight.is_contiguous(memory_format=torch.channels_last)
    assert not model.a.weight.is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        want, got = model(*image()), moved(*image())
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert difference(want, got) < 1e-5


def test_a_folder_keeps_the_layout(tmp_path: Path) -> None:
    model = net()
    plan = prunekit.plan(model, image(), channels=0.5)
    small = prunekit.compact(model, plan)
    moved = prunekit.channels_last(small, image())
    for name, saved in (("moved", moved), ("plain", small)):
        prunekit.save(saved, tmp_path / name, plan)
        loaded = prunekit.load(tmp_path / name, model)
        assert_unchanged(loaded, snapshot(small))
        for want, got in zip(saved.parameters(), loaded.parameters(), strict=True):
            assert want.stride() == got.stride()


def test_code_that_looks_at_strides_is_found_out() -> None:
    parts = {"a": nn.Conv2d(3, 4, 3)}
    model = Net(lambda net, x: net.a(x) * float(net.a.weight.stride()[1]), **parts)
    with pytest.raises(VerificationError, match="Net and its changed copy differ"):
        prunekit.channels_last(model, image())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_subnormal_numbers_are_counted_and_set_to_zero(dtype: torch.dtype) -> None:
    model = net().to(dtype)
    tiny = torch.finfo(dtype).tiny
    with torch.no_grad():
        model.a.weight[0, 0, 0] = torch.tensor([tiny / 2, -tiny / 4, tiny], dtype=dtype)
        model.norm.running_mean[1] = tiny / 2
        model.norm.num_batches_tracked.fill_(1)
    before = snapshot(model)
    if dtype is torch.float32:
        flushed = prunekit.flush_subnormals(model, image())
        assert flushed.counts == {"a.weight": 2, "norm.running_mean": 1}
        assert flushed.max_relative_difference < 1e-30
        assert flushed.model.a.weight[0, 0, 0].tolist() == [0, 0, tiny]
        assert_unchanged(model, before)
    assert flush_subnormals_in_place(model) == {"a.weight": 2, "norm.running_mean": 1}
    assert flush_subnormals_in_place(model) == {}
    changed = [name for name, tensor in snapshot(model).items() if not torch.equal(tensor, before[name])]
    assert changed == ["a.weight", "norm.running_mean"]


def test_float16_has_no_numbers_that_are_too_small() -> None:
    """Whatever computes with it does so in a wider format, where its smallest numbers are like any other."""
    model = net().half()
    with torch.no_grad():
        model.a.weight[0] = 3e-6
        model.norm.bias[:] = 6e-8
    assert flush_subnormals_in_place(copy.deepcopy(model)) == {}
    example = (image()[0].half(),)
    flushed = prunekit.flush_subnormals(model, example)
    assert (flushed.counts, flushed.max_relative_difference) == ({}, 0)
    folded = prunekit.fold_batchnorm(model, example).model
    assert (folded.get_parameter("a.weight")[0] != 0).all()


def test_precisions_in_one_model_are_told_apart_and_complex_numbers_have_two_parts() -> None:
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))
    small = torch.full((4,), 5e-7, dtype=torch.half)
    model = Net(lambda net, x: (x @ net.a).real.float() * net.scale, a=weight, scale=small)
    with torch.no_grad():
        model.a[0, 0] = torch.complex(torch.tensor(1e-40), torch.tensor(1.0))  # type: ignore[operator, index]
    example = (torch.randn(2, 4, dtype=torch.cfloat),)
    flushed = prunekit.flush_subnormals(model, example)
    assert flushed.counts == {"a": 1}
    assert flushed.model.a[0, 0] == 1j  # type: ignore[index]
    assert (flushed.model.scale > 0).all()  # type: ignore[operator]


def test_numbers_that_matter_stay_and_that_is_said() -> None:
    net = Net(lambda net, x: net.a(x) + net.prior.log(), a=nn.Linear(3, 2), prior=torch.tensor([1e-40, 1.0]))
    with pytest.raises(VerificationError):
        prunekit.flush_subnormals(net, (torch.randn(2, 3),))
    found = without_subnormals(net, (torch.randn(2, 3),))
    assert found.model is net
    assert len(found.notes) == 1
    assert found.notes[0].startswith("1 subnormal numbers stay: Net and its changed copy differ: ")


def test_a_model_without_subnormal_numbers_is_left_bit_for_bit() -> None:
    model = net()
    flushed = prunekit.flush_subnormals(model, image())
    assert flushed.counts == {}
    assert flushed.max_relative_difference == 0
    assert_unchanged(flushed.model, snapshot(model))


def test_interrupted_in_a_job_the_process_is_as_before() -> None:
    """A job calls `without_subnormals` outside of any public call."""

    class Interrupted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.set_default_dtype(torch.float64)
            raise KeyboardInterrupt

    model = Interrupted(4, 2)
    model.weight.data[0] = 1e-40
    with pytest.raises(KeyboardInterrupt):
        without_subnormals(model, (torch.ones(1, 4),))
    assert torch.get_default_dtype() == torch.float32
