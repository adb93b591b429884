"""Sparse mixtures of experts: a router chooses a few of several small networks for each token."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from equivalence import Net
from net_registry import Case, case, weight
from torch import Tensor, nn

EXPERTS, TAKEN, WIDTH, INNER = 4, 2, 8, 12


def words(length: int = 6) -> tuple[Tensor]:
    return (torch.randint(0, 9, (2, length), generator=torch.Generator().manual_seed(1)),)


def mixture(mixed: Any, **parts: nn.Module | Tensor) -> nn.Module:
    """A residual block of experts between words and classes; `mixed` computes the experts' result."""

    def forward(net: Any, ids: Tensor) -> Tensor:
        x = net.first(net.table(ids)).flatten(0, 1)
        shares, taken = net.router(x).softmax(-1).topk(TAKEN)
        return net.head(x + mixed(net, x, shares, taken))

    ends = {"first": nn.Linear(7, WIDTH), "router": nn.Linear(WIDTH, EXPERTS), "head": nn.Linear(WIDTH, 5)}
    return Net(forward, table=nn.Embedding(9, 7), **ends, **parts)


def stacks(gated: int = 2) -> dict[str, nn.Module | Tensor]:
    return {"up": weight(EXPERTS, gated * INNER, WIDTH), "down": weight(EXPERTS, WIDTH, INNER)}


@case("first.weight")
def experts_one_after_the_other() -> Case:
    def mixed(net: Any, x: Tensor, shares: Tensor, taken: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        chosen = F.one_hot(taken, EXPERTS).permute(2, 1, 0)
        for expert in chosen.sum((1, 2)).nonzero():
            place, token = torch.where(chosen[expert[0]])
            gate, up = F.linear(x[token], net.up[expert[0]]).chunk(2, -1)
            result.index_add_(0, token, F.linear(F.silu(gate) * up, net.down[expert[0]]) * shares[token, place, None])
        return result

    return mixture(mixed, **stacks()), words()


@case("first.weight")
def experts_by_gathered_matrices() -> Case:
    def mixed(net: Any, x: Tensor, shares: Tensor, taken: Tensor) -> Tensor:
        inner = torch.bmm(net.up[taken.flatten()], x.repeat_interleave(TAKEN, 0)[..., None])
        out = torch.bmm(net.down[taken.flatten()], F.gelu(inner)).squeeze(-1)
        return (out.view(len(x), TAKEN, -1) * shares[..., None]).sum(1)

    return mixture(mixed, **stacks(gated=1)), words()


@case("first.weight")
def experts_with_gates_between_values() -> Case:
    def mixed(net: Any, x: Tensor, shares: Tensor, taken: Tensor) -> Tensor:
        both = torch.einsum("td,tkfd->tkf", x, net.up[taken]) + net.bias[taken]
        gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
        return torch.einsum("tkf,tkdf,tk->td", gate * torch.sigmoid(gate) * up, net.down[taken], shares)

    return mixture(mixed, **stacks(), bias=weight(EXPERTS, 2 * INNER)), words()


@case("first.weight", "experts.0.0.weight", "experts.3.0.weight")
def list_of_experts_of_which_some_are_not_taken() -> Case:
    def mixed(net: Any, x: Tensor, shares: Tensor, taken: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for expert in taken.unique().tolist():
            token, place = torch.where(taken == expert)
            result = result.index_add(0, token, net.experts[expert](x[token]) * shares[token, place, None])
        return result

    def expert() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))

    return mixture(mixed, experts=nn.ModuleList(expert() for _ in range(EXPERTS))), (torch.tensor([[3]]),)
