"""What halving every width by hand leaves, against numbers counted by hand."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def least_left() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("coverage_least").least_left
    for name in ("coverage_least", "axis_flow", "axis_rules"):
        sys.modules.pop(name, None)


class Net(nn.Module):
    """Layers by name, and a function of them and the inputs."""

    def __init__(self, run: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.run = run

    def forward(self, *inputs: Tensor, cache: Tensor | None = None) -> Any:
        return self.run(self, *inputs)


def table(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


@dataclass(frozen=True)
class Counted:
    """A net with its inputs, and of each inner weight what halving leaves; all others are apart."""

    net: Net
    inputs: tuple[Tensor, ...]
    left: dict[str, int]
    outputs: Any = None


def attention(net: Net, x: Tensor) -> Tensor:
    """Fused projections, four heads, a scale that Python computes from the width, and a table of positions."""
    x = net.norm(x + net.positions)
    q, k, v = net.qkv(x).view(2, 5, 3, 4, 4).permute(2, 0, 3, 1, 4)
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
    return net.head((x + net.out((scores @ v).transpose(1, 2).reshape(2, 5, 16))).mean(1))


def experts(net: Net, x: Tensor) -> Tensor:
    """Two of four experts for each row, from stacks of their weights."""
    chosen = net.router(x).topk(2).indices
    inner = torch.einsum("bi,beio->beo", net.stream(x), net.up[chosen]).relu()
    return net.head(torch.einsum("beo,beoi->bi", inner, net.down[chosen]))


def times(net: Net, x: Tensor, t: Tensor) -> Tensor:
    angles = t[:, None] * torch.arange(1, 7)
    return net.head((net.inner(x) + net.time(torch.cat([angles.sin(), angles.cos()], 1))).relu())


def with_state(net: Net, x: Tensor) -> dict[str, Tensor]:
    keys = net.keys(x)
    return {"scores": net.head(keys.relu()), "cache": keys}


def detected(net: Net, x: Tensor) -> Tensor:
    """Scores of one class after the other, of which the best are put out."""
    scores = net.scores(net.inner(x).relu()).softmax(-1)
    return torch.cat([scores[:, number].sort().values for number in range(3)])


CASES = {
    "linear layers": Counted(
        Net(lambda net, x: net.b(net.a(x).relu()), a=nn.Linear(3, 9), b=nn.Linear(9, 4)),
        (torch.randn(2, 3),),
        {"a.weight": 5 * 3, "a.bias": 5},
    ),
    "an operator that prunekit has no rule for": Counted(
        Net(lambda net, x: net.b(torch.erfinv(net.a(x))), a=nn.Linear(3, 8), b=nn.Linear(8, 4)),
        (torch.randn(2, 3),),
        {"a.weight": 4 * 3, "a.bias": 4},
    ),
    "depthwise": Counted(
        Net(
            lambda net, x: net.head(net.norm(net.depth(net.stem(x))).mean((2, 3))),
            stem=nn.Conv2d(3, 8, 3),
            depth=nn.Conv2d(8, 8, 3, groups=8),
            norm=nn.BatchNorm2d(8),
            head=nn.Linear(8, 4),
        ),
        (torch.randn(2, 3, 9, 9),),
        {"stem.weight": 4 * 3 * 9, "stem.bias": 4, "depth.weight": 4 * 9, "depth.bias": 4, "norm.weight": 4,
         "norm.bias": 4},
    ),
    "groups": Counted(
        Net(
            lambda net, x: net.head(net.few(net.many(net.stem(x))).mean((2, 3))),
            stem=nn.Conv2d(3, 16, 1, bias=False),
            many=nn.Conv2d(16, 16, 1, groups=8, bias=False),
            few=nn.Conv2d(16, 16, 1, groups=2, bias=False),
            head=nn.Linear(16, 4),
        ),
        (torch.randn(2, 3, 4, 4),),
        {"stem.weight": 8 * 3, "many.weight": 8 * 2, "few.weight": 8 * 4},
    ),
    "attention": Counted(
        Net(attention, positions=table(1, 5, 16), norm=nn.LayerNorm(16), qkv=nn.Linear(16, 48), out=nn.Linear(16, 16),
            head=nn.Linear(16, 4)),
        (torch.randn(2, 5, 16),),
        {"norm.weight": 16, "norm.bias": 16, "qkv.weight": 24 * 16, "qkv.bias": 24, "out.weight": 16 * 8,
         "out.bias": 16},
    ),
    "a factor for each head and position in it": Counted(
        Net(lambda net, x: net.head((net.inner(x).view(2, 4, 4) * net.factor).flatten(1)), inner=nn.Linear(3, 16),
            factor=table(1, 4, 4), head=nn.Linear(16, 4)),
        (torch.randn(2, 3),),
        {"inner.weight": 8 * 3, "inner.bias": 8, "factor": 8},
    ),
    "positions of the input": Counted(
        Net(lambda net, x: net.head((net.inner(x) * net.mix(net.inner(x).mT).mT).mean(1)), inner=nn.Linear(3, 8),
            mix=nn.Linear(6, 6), head=nn.Linear(8, 4)),
        (torch.randn(2, 6, 3),),
        {"inner.weight": 4 * 3, "inner.bias": 4, "mix.weight": 6 * 6, "mix.bias": 6},
    ),
    "beside coordinates": Counted(
        Net(lambda net, x: net.head(net.b(torch.cat([net.a(x), x], 1)).relu()), a=nn.Linear(3, 8),
            b=nn.Linear(11, 6), head=nn.Linear(6, 4)),
        (torch.randn(5, 3),),
        {"a.weight": 4 * 3, "a.bias": 4, "b.weight": 3 * (4 + 3), "b.bias": 3},
    ),
    "flattened pixels": Counted(
        Net(lambda net, x: net.head(net.a(net.stem(x).flatten(1)).relu()), stem=nn.Conv2d(3, 8, 3), a=nn.Linear(32, 6),
            head=nn.Linear(6, 4)),
        (torch.randn(2, 3, 4, 4),),
        {"stem.weight": 4 * 27, "stem.bias": 4, "a.weight": 3 * 16, "a.bias": 3},
    ),
    "numbers that no parameter decides": Counted(
        Net(times, inner=nn.Linear(3, 8), time=nn.Linear(12, 8), head=nn.Linear(8, 4)),
        (torch.randn(2, 3), torch.tensor([3.0, 5.0])),
        {"inner.weight": 4 * 3, "inner.bias": 4, "time.weight": 4 * 12, "time.bias": 4},
    ),
    "stacks of experts": Counted(
        Net(experts, stream=nn.Linear(3, 8), router=nn.Linear(3, 4), up=table(4, 8, 10), down=table(4, 10, 8),
            head=nn.Linear(8, 5)),
        (torch.randn(6, 3),),
        {"stream.weight": 4 * 3, "stream.bias": 4, "router.weight": 2 * 3, "router.bias": 2, "up": 4 * 4 * 5,
         "down": 4 * 5 * 4},
    ),
    "an embedding that is the scores, too": Counted(
        Net(lambda net, x: net.inner(net.words(x)).relu() @ net.words.weight.T, words=nn.Embedding(9, 8),
            inner=nn.Linear(8, 8)),
        (torch.randint(0, 9, (2, 4)),),
        {"inner.weight": 4 * 4, "inner.bias": 4},
    ),
    "state is read by nobody": Counted(
        Net(with_state, keys=nn.Linear(3, 8), head=nn.Linear(8, 4)),
        (torch.randn(2, 3),),
        {"keys.weight": 4 * 3, "keys.bias": 4},
    ),
    "outputs that are named": Counted(
        Net(lambda net, x: (net.head(net.a(x).relu()), net.a(x)), a=nn.Linear(3, 8), head=nn.Linear(8, 4)),
        (torch.randn(2, 3),),
        {"a.weight": 4 * 3, "a.bias": 4},
        outputs=0,
    ),
    "features that are read": Counted(
        Net(lambda net, x: net.b(net.a(x).relu()) + net.c(x), a=nn.Linear(3, 8), b=nn.Linear(8, 4), c=nn.Linear(3, 4)),
        (torch.randn(2, 3),),
        {"a.weight": 4 * 3, "a.bias": 4},
    ),
    "classes one by one": Counted(
        Net(detected, inner=nn.Linear(3, 8), scores=nn.Linear(8, 3)),
        (torch.randn(7, 3),),
        {"inner.weight": 4 * 3, "inner.bias": 4},
    ),
    "the heads of a residual stream": Counted(
        Net(lambda net, x: net.head(F.relu(net.a(x) + net.c(net.b(net.a(x)).relu()))), a=nn.Linear(3, 8),
            b=nn.Linear(8, 10), c=nn.Linear(10, 8), head=nn.Linear(8, 4)),
        (torch.randn(2, 3),),
        {"a.weight": 4 * 3, "a.bias": 4, "b.weight": 5 * 4, "b.bias": 5, "c.weight": 4 * 5, "c.bias": 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_halving_every_width_leaves_what_is_counted_by_hand(name: str, least_left: Any) -> None:
    case = CASES[name]
    least = least_left(case.net.eval(), case.inputs, case.outputs)
    assert least.widths == case.left
    assert least.entries == sum(case.net.get_parameter(name).numel() for name in case.left)
    assert least.share == pytest.approx(sum(case.left.values()) / least.entries)
