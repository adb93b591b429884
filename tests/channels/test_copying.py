"""A model's structure with other tensors in it, and its narrow copy."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from equivalence import TOLERANCE, Net, image, parity, randomised, settled_plan, zero_removed
from torch import nn

from prunekit.channels.copying import named_tensors, with_tensors
from prunekit.channels.slicing import RESIZERS, cut, narrow, resizer
from prunekit.compaction import compact
from prunekit.errors import ModelError, VerificationError
from prunekit.measure.verify import verify


def copied(model: nn.Module) -> Any:
    return with_tensors(model, {name: tensor.detach().clone() for name, tensor in named_tensors(model)})


def test_parameters_stay_parameters_and_frozen_ones_frozen() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False)
    twin = copied(model)
    assert [p.requires_grad for p in twin.parameters()] == [False, True, True, True]
    assert all(isinstance(p, nn.Parameter) for p in twin.parameters())
    assert [name for name, _ in twin.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert not {id(t) for _, t in named_tensors(twin)} & {id(t) for _, t in named_tensors(model)}


def test_ties_and_shared_modules_stay_so() -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    model.append(model[0])
    assert [name for name, _ in named_tensors(model)] == ["0.weight", "0.bias", "1.bias"]
    twin = copied(model)
    assert twin[1].weight is twin[0].weight
    assert twin[2] is twin[0]


def test_attributes_are_copied_and_keep_their_kind() -> None:
    model = nn.Linear(3, 4)
    shared: dict[str, int] = {}
    attributes = {
        "cache": defaultdict(list),
        "ordered": OrderedDict(),
        "seen": set(),
        "numbers": [1, [2]],
        "first": shared,
        "second": shared,
        "plain": torch.ones(2),
    }
    for name, value in attributes.items():
        setattr(model, name, value)
    twin = copied(model)
    twin.cache["new"].append(1)
    twin.numbers[1].append(3)
    twin.plain.zero_()
    assert type(twin.ordered) is OrderedDict
    assert twin.seen == set()
    assert twin.first is twin.second
    assert twin.first is not shared
    assert (model.cache, model.numbers, model.plain.tolist()) == ({}, [1, [2]], [1.0, 1.0])


def test_a_module_with_its_own_way_of_copying_is_asked() -> None:
    class Counted(nn.Linear):
        copies = 0

        def __deepcopy__(self, memo: dict[int, Any]) -> Counted:
            Counted.copies += 1
            twin = Counted(self.in_features, self.out_features)
            memo[id(self)] = twin
            return twin

    assert isinstance(copied(nn.Sequential(Counted(2, 2)))[0], Counted)
    assert Counted.copies == 1


def test_what_cannot_be_copied_is_said() -> None:
    model = nn.Linear(3, 4)
    model.last = model(torch.ones(1, 3))
    with pytest.raises(ModelError, match=r"Linear cannot be copied: .*expected a module whose attributes"):
        copied(model)


def test_a_module_with_its_own_new_and_reduce() -> None:
    class Odd(nn.Linear):
        def __reduce__(self) -> Any:
            return (nn.Linear, (self.in_features, self.out_features))

    assert type(copied(nn.Sequential(Odd(2, 3)))[0]) is nn.Linear


def test_narrow_leaves_the_model_and_its_modes_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).train()
    model[1].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    rows = np.array([0, 2])
    vectors = {f"1.{name}": (rows,) for name in ("weight", "bias", "running_mean", "running_var")}
    small = narrow(model, {"0.weight": (rows, None, None, None), "0.bias": (rows,), **vectors})
    assert small(*image()).shape == (2, 2, 8, 8)
    assert (small[0].out_channels, small[1].num_features) == (2, 2)  # type: ignore[index, union-attr]
    assert (model[0].out_channels, model[1].num_features) == (4, 4)
    assert [module.training for module in small.modules()] == [module.training for module in model.modules()]
    assert all(parameter.grad is None for parameter in small.parameters())
    assert model[0].weight.grad is not None
    small[0].weight.data.zero_()  # type: ignore[index, union-attr]
    assert model[0].weight.abs().min() > 0


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_cut_entries(layout: torch.memory_format) -> None:
    tensor = torch.arange(48.0).reshape(4, 3, 2, 2).contiguous(memory_format=layout)
    got = cut(tensor, (np.array([1, 3]), np.array([0, 2]), None, None))
    assert torch.equal(got, tensor[[1, 3]][:, [0, 2]])


def test_subclasses_are_resized_and_a_second_resizer_is_refused() -> None:
    class Mine(nn.Conv2d):
        pass

    model = nn.Sequential(Mine(3, 6, 1))
    small = narrow(model, {"0.weight": (np.array([0, 5]), None, None, None), "0.bias": (np.array([0, 5]),)})
    assert type(small[0]) is Mine  # type: ignore[index]
    assert small[0].out_channels == 2  # type: ignore[index, union-attr]
    before = dict(RESIZERS)
    with pytest.raises(ValueError, match="Linear already has a resizer"):
        resizer(nn.Linear)(lambda module: None)
    assert before == RESIZERS


def test_functions_as_attributes_are_shared() -> None:
    model = Net(lambda net, x: net.a(x), a=nn.Linear(2, 2))
    assert copied(model).function is model.function


def test_complex_parameters_stay_trainable_and_are_compared_to_rounding() -> None:
    class Spectral(nn.Module):
        """A filter of complex weights over the positions, and one buffer of phases."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 12), nn.Linear(12, 3)
            self.filter = nn.Parameter(torch.randn(4, 1, dtype=torch.cfloat))
            self.register_buffer("phase", torch.polar(torch.ones(4, 1), torch.arange(4.0)[:, None]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.down(self.up(x).relu())
            return torch.fft.ifft(torch.fft.fft(y, dim=1) * self.filter * self.phase, dim=1)

    model, example = randomised(Spectral()), (torch.randn(2, 4, 4),)
    plan = settled_plan(model, example)
    small: Any = compact(model, plan)
    assert small.up.out_features < 12
    assert all(parameter.requires_grad for parameter in small.parameters())
    assert parity(model, plan, example) <= TOLERANCE
    small.filter.data += 1e-3
    with pytest.raises(VerificationError, match=r"first at aten\.mul in the top-level forward: values differ"):
        verify(zero_removed(copy.deepcopy(model), plan), small, plan, [example])
