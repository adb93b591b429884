"""Optimizers that the masks were not told of: what they may have written to is masked before the next forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_nets import SmallNet, assert_pruned_are_zero, handmade_plan, randomized
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from prunekit.masks.weight_masks import WeightMasks, WriteDetector
from prunekit.planning.plan import Plan


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_an_optimizer_that_nobody_told_of_cannot_bring_weights_back(kind: type[Optimizer]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False))
    keep = (torch.arange(8) % 2 == 0).view(8, 1, 1, 1)
    names = {name: tuple(p.shape) for name, p in model.named_parameters()}
    chart = type(handmade_plan().channel_map)(dict.fromkeys(names, (None,) * 4), names, 1, (), (), {}, (), None)
    plan = Plan(chart, np.array([True]), element_masks=dict.fromkeys(names, keep))
    optimizer = kind(model.parameters(), lr=0.1, fused=True)  # on images of one pixel only a kernel's center moves
    with WeightMasks(model, plan):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 3, 1, 1)).sum().backward()
            optimizer.step()
            assert any((p[~keep.flatten()] != 0).any() for p in model.parameters())
            model(torch.randn(4, 3, 1, 1))
            assert all((p[~keep.flatten()] == 0).all() for p in model.parameters())


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Tensors into which zeros are written from now on."""
    found: list[Tensor] = []
    real = WriteDetector.zero_
    monkeypatch.setattr(WriteDetector, "zero_", lambda self, tensor: (found.append(tensor), real(self, tensor)))
    return found


def test_a_step_on_the_memory_of_weights_is_undone_whatever_tensor_it_knows_it_by(written: list[Tensor]) -> None:
    """An optimizer of one flat tensor, of whose memory the weights are parts, writes nowhere that is looked at."""
    model, plan = randomized(SmallNet()), handmade_plan(3)
    flat = nn.Parameter(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    nn.utils.vector_to_parameters(flat.detach(), model.parameters())
    with WeightMasks(model, plan):
        probed = flat.detach() * 0  # an entry that nothing looks at
        weight = model.conv2.weight
        assert isinstance(weight, Tensor)
        spot = _unseen(weight, plan.mask("conv2.weight"))
        probed[(weight.data_ptr() - flat.data_ptr()) // 4 + spot] = 1.0
        flat.grad = probed
        written.clear()
        SGD([flat], lr=0.1, fused=True).step()
        assert weight.detach().flatten()[spot] != 0
        model(torch.randn(2, 3, 8, 8))
        assert any(tensor is weight for tensor in written)
    assert_pruned_are_zero(model, plan)


def _unseen(weight: Tensor, mask: Tensor | None) -> int:
    """A pruned entry of a weight, by its place in memory, that is not probed before a forward."""
    assert mask is not None
    places = (~mask.expand(weight.shape)).flatten().nonzero().flatten().tolist()
    return int(places[1])  # the probes are spread evenly: the first and the last of them


class Elsewhere(SGD):
    """A user's optimizer, which writes to more than it was given."""

    def __init__(self, parameters: Any, lr: float, also: Tensor, place: int) -> None:
        super().__init__(parameters, lr=lr)
        self.also, self.place = also, place

    def step(self, closure: Any = None) -> Any:
        self.also.data.view(-1)[self.place] = 1.0
        return super().step(closure)


@pytest.mark.parametrize("how", ["class", "hook", "global hook"])
def test_a_users_own_optimizer_or_hook_may_write_anywhere(how: str, request: pytest.FixtureRequest) -> None:
    model, other, plan = randomized(SmallNet()), nn.Linear(2, 2), handmade_plan(3)
    weight = model.conv2.weight
    assert isinstance(weight, Tensor)
    place = _unseen(weight, plan.mask("conv2.weight"))
    optimizer: Optimizer = SGD(other.parameters(), lr=0.1)
    if how == "class":
        optimizer = Elsewhere(other.parameters(), 0.1, weight, place)
    else:
        register = optimizer.register_step_pre_hook if how == "hook" else register_optimizer_step_pre_hook
        request.addfinalizer(register(lambda *_: weight.data.view(-1).__setitem__(place, 1.0)).remove)
    other(torch.randn(1, 2)).sum().backward()
    with WeightMasks(model, plan):
        optimizer.step()
        assert weight.detach().flatten()[place] != 0
        model(torch.randn(2, 3, 8, 8))
        assert weight.detach().flatten()[place] == 0
    assert_pruned_are_zero(model, plan)
