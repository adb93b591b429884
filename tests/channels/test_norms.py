"""Norms over channels, judged by narrow models written by hand: weights copied index by index, in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from equivalence import difference, random_keep, randomized
from hand_norms import CenteredByHand, GlobalResponse, MeanSquareByHand, RootMeanSquare, StandardisedConv, SumOfSquares
from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d

from prunekit.channels.trace import trace
from prunekit.channels.trial.trial import run_trial
from prunekit.compaction.compact_model import compact
from prunekit.compaction.model_folder import load, save
from prunekit.hooks.hook import count_hooks
from prunekit.masks.masked_model import masked
from prunekit.masks.weight_masks import WeightMasks
from prunekit.measure.verification import verify
from prunekit.planning.plan import Plan, load_plan

Make = Callable[[int], nn.Module]
ANY = [0, 2, 3, 5, 7]
PAIRED = [0, 1, 3, 4, 5, 7]  # positions 0, 1 and 3 of both groups of four

LAST: dict[str, Make] = {
    "LayerNorm": nn.LayerNorm,
    "LayerNorm without bias": lambda width: nn.LayerNorm(width, bias=False),
    "LayerNorm without affine": lambda width: nn.LayerNorm(width, elementwise_affine=False),
    "RMSNorm": nn.RMSNorm,
    "RMSNorm without affine": lambda width: nn.RMSNorm(width, elementwise_affine=False),
    "RMSNorm by hand": RootMeanSquare,
    "LayerNorm by hand": CenteredByHand,
    "mean of squares, no parameters": lambda width: MeanSquareByHand(),
    "sum of squares over the width": SumOfSquares,
}
FIRST: dict[str, tuple[Make, list[int]]] = {
    "GroupNorm of one group": (lambda width: nn.GroupNorm(1, width), ANY),
    "GroupNorm of one group without affine": (lambda width: nn.GroupNorm(1, width, affine=False), ANY),
    "GroupNorm of two groups": (lambda width: nn.GroupNorm(2, width), PAIRED),
    "GroupNorm of two groups without affine": (lambda width: nn.GroupNorm(2, width, affine=False), PAIRED),
    "GroupNorm of single channels": (lambda width: nn.GroupNorm(width, width), ANY),
    "GroupNorm of single channels without affine": (lambda width: nn.GroupNorm(width, width, affine=False), ANY),
    "LayerNorm2d": (lambda width: LayerNorm2d(width), ANY),
    "LayerNorm2d without affine": (lambda width: LayerNorm2d(width, elementwise_affine=False), ANY),
    "global response": (GlobalResponse, ANY),
}


def stack(make: Make, width: int, *, first: bool) -> nn.Sequential:
    """Makes `width` channels, normalizes them, and reads them again; the norm is on axis 1 or on the last axis."""
    if first:
        return nn.Sequential(nn.Conv2d(3, width, 1), make(width), nn.GELU(), nn.Conv2d(width, 4, 1)).double()
    return nn.Sequential(nn.Linear(3, width), make(width), nn.GELU(), nn.Linear(width, 4)).double()


CASES = [(name, make, ANY, False) for name, make in LAST.items()]
CASES += [(name, make, kept, True) for name, (make, kept) in FIRST.items()]
norms = pytest.mark.parametrize(
    ("make", "kept", "first"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)


@torch.no_grad()
def by_hand(dense: nn.Sequential, make: Make, kept: list[int], *, first: bool) -> nn.Sequential:
    """The narrow model, every number copied from its place in the dense one."""
    narrow = stack(make, len(kept), first=first)
    for new, old in enumerate(kept):
        narrow[0].weight[new] = dense[0].weight[old]  # type: ignore[index, operator]
        narrow[0].bias[new] = dense[0].bias[old]  # type: ignore[index, operator]
        narrow[3].weight[:, new] = dense[3].weight[:, old]  # type: ignore[index, operator]
        for name, parameter in narrow[1].named_parameters():
            parameter[new] = dense[1].get_parameter(name)[old]
    narrow[3].bias.copy_(dense[3].bias)  # type: ignore[operator, arg-type]
    return narrow


def example(*, first: bool) -> Tensor:
    shape = (2, 3, 4, 4) if first else (2, 5, 3)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def planned(model: nn.Module, kept: list[int], x: Tensor, name: str = "0.weight") -> Plan:
    """A plan that keeps just these rows of a weight; what is tied to others must be asked for together."""
    chart = trace(model, (x,))
    labels = chart.labels[name][0]
    assert labels is not None
    assert labels.all(), chart.locks
    keep = np.ones(chart.n_labels, dtype=bool)
    keep[np.delete(labels, kept)] = False
    plan = Plan(chart, keep)
    assert plan.kept(name, 0).tolist() == kept
    return plan


@norms
def test_masked_and_compact_are_the_model_written_by_hand(make: Make, kept: list[int], first: bool) -> None:
    dense, x = randomized(stack(make, 8, first=first)), example(first=first)
    hand = by_hand(dense, make, kept, first=first)
    plan = planned(dense, kept, x)
    small = compact(dense, plan)
    with torch.no_grad():
        want, other = hand(x), dense(x)
        assert difference(want, small(x)) <= 1e-12
        with masked(dense, plan, restore=True):
            assert difference(want, dense(x)) <= 1e-12
            assert verify(dense, small, plan, [(x,)]).max_relative_difference <= 1e-12
        assert torch.equal(dense(x), other), "a norm is as it was when the masks are gone"
    assert count_hooks(dense) == 0
    assert repr(small) == repr(hand), "what modules say of themselves"
    settled = run_trial(dense, plan.channel_map, lambda chart: plan.keep, [(x,)])
    assert settled.channel_map.locks == plan.channel_map.locks


@norms
def test_gradients_are_those_of_the_model_written_by_hand(make: Make, kept: list[int], first: bool) -> None:
    dense, x = randomized(stack(make, 8, first=first)), example(first=first)
    hand = by_hand(dense, make, kept, first=first)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    hand(inputs[0]).sin().sum().backward()
    with masked(dense, planned(dense, kept, x)):
        dense(inputs[1]).sin().sum().backward()
    assert difference(inputs[0].grad, inputs[1].grad) <= 1e-12
    for name, parameter in hand.named_parameters():
        gradient, expected = dense.get_parameter(name).grad, parameter.grad
        assert gradient is not None
        axis = 1 if name == "3.weight" else 0
        rows = range(4) if name == "3.bias" else kept
        for new, old in enumerate(rows):
            assert torch.allclose(gradient.select(axis, old), expected.select(axis, new), rtol=1e-9, atol=1e-12), name  # type: ignore[union-attr]
        removed = [index for index in range(gradient.shape[axis]) if index not in rows]
        assert not gradient.index_select(axis, torch.tensor(removed, dtype=torch.int64)).any()


@norms
def test_training_under_masks_stays_the_training_of_the_compact_model(make: Make, kept: list[int], first: bool) -> None:
    model, x = randomized(stack(make, 8, first=first)), example(first=first)
    plan = planned(model, kept, x)
    small = compact(model, plan)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1) for net in (model, small)]
    with masked(model, plan, optimizers[0]):
        for net, optimizer in zip((model, small), optimizers, strict=True):
            for _ in range(3):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
        with torch.no_grad():
            assert difference(small(x), model(x)) <= 1e-9
    assert verify(model, compact(model, plan), plan, [(x,)]).max_relative_difference <= 1e-9


@pytest.mark.parametrize("make", [nn.LayerNorm, RootMeanSquare, LAST["LayerNorm without affine"]])
def test_plans_and_models_are_saved_with_their_norms(make: Make, tmp_path: Any) -> None:
    dense, x = randomized(stack(make, 8, first=False)), example(first=False)
    plan = planned(dense, ANY, x)
    plan.save(tmp_path)
    again = load_plan(tmp_path)
    assert again.channel_map.norms.keys() == {"1"}
    small = compact(dense, again)
    with masked(dense, again), torch.no_grad():
        assert difference(small(x), dense(x)) <= 1e-12
        save(small, tmp_path / "model", again)
        assert difference(small(x), load(tmp_path / "model", model=stack(make, 8, first=False))(x)) <= 1e-12


def test_a_plan_that_spares_a_norm_leaves_it_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)).double()
    plan = planned(model, [1, 2, 4], example(first=False), "2.weight")
    with masked(model, plan):
        assert not model[1]._forward_hooks


def test_copies_made_under_masks_carry_nothing() -> None:
    model, x = randomized(stack(nn.LayerNorm, 8, first=False)), example(first=False)
    with masked(model, planned(model, ANY, x)), torch.no_grad():
        twin = copy.deepcopy(model)
        assert count_hooks(twin) == 0
        assert difference(model(x), twin(x)) > 1e-3, "its norm averages over the zeros too"


def test_hooks_of_others_see_the_dense_width() -> None:
    model, x = randomized(stack(nn.LayerNorm, 8, first=False)), example(first=False)
    plan, seen = planned(model, ANY, x), list[Tensor]()
    model[1].register_forward_hook(lambda module, args, output: seen.extend([args[0], output]))
    with masked(model, plan), torch.no_grad():
        model(x)
    assert [tensor.shape[-1] for tensor in seen] == [8, 8]
    assert not seen[1][..., [1, 4, 6]].any()


def test_half_precision() -> None:
    model, x = randomized(stack(nn.LayerNorm, 8, first=False)).float(), example(first=False).float()
    plan = planned(model, ANY, x)
    small = compact(model, plan)
    with masked(model, plan), torch.autocast("cpu", torch.bfloat16):
        model(x).square().mean().backward()
        with torch.no_grad():
            assert difference(small(x).float(), model(x).float()) <= 0.02
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
def test_under_torch_compile() -> None:
    model, x = randomized(stack(nn.LayerNorm, 8, first=False)), example(first=False)
    plan = planned(model, ANY, x)
    small = compact(model, plan)
    with WeightMasks(model, plan), torch.no_grad():
        assert difference(small(x), torch.compile(model, backend="eager")(x)) <= 1e-12
    torch._dynamo.reset()


def test_weight_standardization_is_taken_over_kept_inputs() -> None:
    def net(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, width, 1), nn.ReLU(), StandardisedConv(width, 4, 3)).double()

    dense, x = randomized(net(8)), example(first=True)
    hand = net(len(ANY))
    with torch.no_grad():
        for new, old in enumerate(ANY):
            hand[0].weight[new] = dense[0].weight[old]  # type: ignore[index, operator]
            hand[0].bias[new] = dense[0].bias[old]  # type: ignore[index, operator]
            hand[2].weight[:, new] = dense[2].weight[:, old]  # type: ignore[index, operator]
        hand[2].bias.copy_(dense[2].bias)  # type: ignore[operator, arg-type]
    plan = planned(dense, ANY, x)
    with masked(dense, plan), torch.no_grad():
        assert difference(hand(x), dense(x)) <= 1e-12
        assert difference(hand(x), compact(dense, plan)(x)) <= 1e-12


class Twice(nn.Module):
    """One norm without parameters for two streams of the same width."""

    def __init__(self, second: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(3, second)
        self.norm, self.fixed = MeanSquareByHand(), second
        self.c = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        other = self.norm(self.b(x)) if self.fixed == 8 else self.norm(torch.ones_like(x)).sum()
        out: Tensor = self.c(self.norm(self.a(x)) + other)
        return out


def test_a_norm_of_two_streams_keeps_the_same_of_both() -> None:
    model, x = randomized(Twice(8)).double(), example(first=False)
    plan = planned(model, ANY, x, "a.weight")
    assert plan.kept("b.weight", 0).tolist() == ANY
    with masked(model, plan), torch.no_grad():
        assert difference(compact(model, plan)(x), model(x)) <= 1e-12


def test_a_norm_that_also_runs_on_something_else_locks() -> None:
    chart = trace(Twice(5), (example(first=False).float(),))
    assert not chart.norms
    assert any(lock.module == "norm" and "also runs on other tensors" in lock.reason for lock in chart.locks)


class Around(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


NO_NORM: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "softmax": lambda module, x: x.softmax(-1) * module.scale,
    "running sum": lambda module, x: x.cumsum(-1) * module.scale,
}


@pytest.mark.parametrize("name", NO_NORM)
def test_what_is_no_norm_locks(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 8), Around(NO_NORM[name]), nn.Linear(8, 4))
    chart = trace(model, (example(first=False).float(),))
    assert not chart.norms
    assert any(lock.module == "1" and lock.channels == 8 for lock in chart.locks), chart.locks


def test_a_function_in_a_bigger_module_locks_and_is_named() -> None:
    class Bigger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(nn.functional.layer_norm(self.a(x), (8,)))  # type: ignore[no-any-return]

    chart = trace(Bigger(), (example(first=False).float(),))
    found = [lock for lock in chart.locks if lock.operator == "aten.native_layer_norm"]
    assert [lock.channels for lock in found] == [8]
    assert "Bigger" in found[0].reason
    assert "in a module of its own" in found[0].reason


def test_a_norm_of_a_forward_is_free_in_a_module_of_its_own() -> None:
    class Pixels(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (x.square().mean(-1, keepdim=True) + 1e-8).sqrt()

    class Generator(nn.Module):
        def __init__(self, norm: nn.Module | None) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 4)
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.norm(self.a(x)) if self.norm else Pixels.forward(self, self.a(x)))  # type: ignore[arg-type,no-any-return]

    given = (example(first=False).float(),)
    locks = trace(Generator(None), given).locks
    assert any("in a module of its own, which takes these channels" in lock.reason for lock in locks)
    assert [len(group.labels) for group in trace(Generator(Pixels()), given).groups] == [8]


class Sized(RootMeanSquare):
    """Remembers its width under a name of its own."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.reshape(-1, self.size)).reshape(hidden.shape)

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.size = width


def test_the_trial_sets_a_size_in_the_code_of_a_norm() -> None:
    model, x = randomized(stack(Sized, 8, first=False)), example(first=False)
    settled = run_trial(model, trace(model, (x,)), random_keep, [(x,)])
    assert not [lock for lock in settled.channel_map.locks if lock.reason.startswith("the trial")]
    assert [size.name for size in settled.channel_map.sizes] == ["size"]
    assert not settled.keep.all()
