"""Repair where forward runs functions as operators, transforms of functions, or tensors that are no plain memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equivalence import Net
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import prunekit

pytestmark = pytest.mark.filterwarnings("ignore")  # torch says of some of these that they may change


def branches(net: Any, x: Tensor) -> Tensor:
    y = net.a(x).relu()
    chosen: Tensor = torch.cond(y.sum() > -1, lambda y: net.b(y).relu(), lambda y: net.b(y) * 2, (y,))
    return net.c(chosen)[:, 0]  # type: ignore[no-any-return]


compiled_attention = torch.compile(flex_attention, backend="eager")


def compiled(net: Any, x: Tensor) -> Tensor:
    y = net.a(x).relu()
    q = net.b(y).unflatten(-1, (2, 8)).transpose(1, 2)
    attended = compiled_attention(q, q, q)
    return net.c(attended.transpose(1, 2).flatten(2))[:, 0]  # type: ignore[union-attr, no-any-return]


def per_sample(net: Any, x: Tensor) -> Tensor:
    y = torch.vmap(lambda row: torch.func.grad(lambda r: net.a(r).relu().square().sum())(row))(x)
    return net.c(net.b(net.a(x + y).relu()).relu())[:, 0]  # type: ignore[no-any-return]


def sparse(net: Any, x: Tensor) -> Tensor:
    links = torch.eye(5, dtype=x.dtype).roll(1, 0).to_sparse()
    y = torch.stack([links @ rows for rows in net.a(x).relu()])
    return net.c(net.b(y).relu())[:, 0].to_sparse()  # type: ignore[no-any-return]


def ragged(net: Any, x: Tensor) -> Tensor:
    y = net.b(net.a(x).relu()).relu()
    rows = torch.nested.as_nested_tensor([each[: 2 + i % 3] for i, each in enumerate(y)], layout=torch.jagged)
    return torch.nested.to_padded_tensor(net.c(rows), 0.0)[:, 0]


@pytest.mark.parametrize("forward", [branches, compiled, per_sample, sparse, ragged])
def test_layers_that_can_be_followed_are_repaired(forward: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Net(forward, a=nn.Linear(6, 24), b=nn.Linear(24, 16), c=nn.Linear(16, 3)).eval()
    x = torch.randn(96, 5, 6, generator=torch.Generator().manual_seed(1))
    result = prunekit.prune(
        model, calibration=x, ratios={"a": 0.5}, macs=0.95, repair=prunekit.RepairSettings(joint_steps=0)
    )
    assert result.repair is not None
    assert result.repair.kept, result.repair
    assert result.repair.after < 0.7 * result.repair.before
