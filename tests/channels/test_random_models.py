"""Models that draw random numbers: compared models draw the same, and the caller's generators are restored."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from equivalence import Net, masked_double, randomized, settled_plan
from torch import Tensor, nn

import prunekit
from prunekit.measure.verification import compare_outputs, verify
from prunekit.utils.context import same_draws

Draw = Callable[[Any, int], Any]
DRAWS: dict[str, Draw] = {
    "python": lambda net, n: [random.gauss(0, 1) for _ in range(n)],
    "numpy": lambda net, n: np.random.standard_normal(n),
    "torch": lambda net, n: torch.randn(n).numpy(),
    "a Random": lambda net, n: [net.own.random() for _ in range(n)],
    "a Generator": lambda net, n: net.own.random(n),
    "a RandomState": lambda net, n: net.own.rand(n),
    "torch's Generator": lambda net, n: torch.rand(n, generator=net.own).numpy(),
}
OWN = {
    "a Random": lambda: random.Random(3),
    "a Generator": lambda: np.random.default_rng(3),
    "a RandomState": lambda: np.random.RandomState(3),
    "torch's Generator": lambda: torch.Generator().manual_seed(3),
}
EXAMPLE = (torch.randn(9, 6, generator=torch.Generator().manual_seed(0)),)


def noisy(kind: str, *, always: bool) -> nn.Module:
    """Noise on the samples, and a layer that is left out every other time."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).relu()
        if net.training or always:
            values = torch.as_tensor(np.asarray(DRAWS[kind](net, len(x) + 1)), dtype=y.dtype)
            y = y * values[:-1, None]
            if values[-1] > 0.5:
                y = y + net.b(y).relu()
        return torch.as_tensor(net.c(y + net.b(y)))

    net = Net(forward, a=nn.Linear(6, 32), b=nn.Linear(32, 32), c=nn.Linear(32, 3))
    object.__setattr__(net, "own", OWN[kind]() if kind in OWN else None)
    return randomized(net)


def states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index, union-attr]


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("kind", DRAWS)
def test_noise_locks_nothing_and_is_the_same_in_both_models(kind: str, always: bool) -> None:
    model, before = noisy(kind, always=always), states()
    own = copy.deepcopy(vars(model)["own"])
    plan = settled_plan(model, EXAMPLE)
    assert plan.channel_map.free_share(["a.weight", "b.weight"]) == 1
    masked = masked_double(model, plan).float()
    small = prunekit.compact(masked, plan)
    proof = verify(masked, small, plan, [EXAMPLE, (EXAMPLE[0] + 1,)])
    assert proof.max_relative_difference <= 1e-9
    assert compare_outputs(masked, copy.deepcopy(masked), EXAMPLE) == 0
    assert states() == before
    if own is not None:  # the model's own generator has not moved either
        assert list(DRAWS[kind](model, 4)) == list(DRAWS[kind](SimpleNamespace(own=own), 4))


def test_a_pass_begins_where_the_last_one_began() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for module, make in zip(model, OWN.values(), strict=False):
        object.__setattr__(module, "own", make())
    object.__setattr__(model, "own", random.SystemRandom())  # which has no state
    found = []
    for _ in range(2):
        with same_draws(model):
            found.append((random.random(), np.random.rand(), float(torch.rand(())),
                          model[0].own.random(), model[1].own.random()))  # fmt: skip
    assert found[0] == found[1]


def test_noise_in_the_dense_model_is_the_noise_in_the_pruned_one_that_a_repair_is_judged_by() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return torch.as_tensor(net.b(net.a(x).relu()) + 100 * torch.as_tensor(np.random.rand(len(x), 1)).to(x.dtype))

    model = randomized(Net(forward, a=nn.Linear(6, 32), b=nn.Linear(32, 3)))
    found = prunekit.prune(
        model, calibration=torch.randn(64, 6, generator=torch.Generator().manual_seed(1)), macs=0.5
    ).repair
    assert found is not None
    assert found.kept
    assert found.after < found.before
