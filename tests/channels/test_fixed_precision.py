"""Models whose code names a precision are compared in float64 all the same: to its rounding, not to float32's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence import TOLERANCE, Net, image, masked_double, randomized, settled_plan, zero_removed
from net_registry import conv, tokens
from torch import Tensor, nn
from torchvision.ops import nms

import prunekit
from prunekit.channels.float64 import AS_DOUBLE, ROUNDING
from prunekit.compaction.compact_model import compact
from prunekit.errors import ModelError, VerificationError
from prunekit.measure.verification import compare_outputs, verify

Case = tuple[nn.Module, tuple[Any, ...], str]


class FloatRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def norm_in_float32() -> Case:
    return Net(lambda net, x: net.b(net.norm(net.a(x))),
               a=nn.Linear(6, 16), norm=FloatRMSNorm(16), b=nn.Linear(16, 3)), tokens(), "a.weight"  # fmt: skip


def sum_in_float32() -> Case:
    """Masked and compact sum other numbers of terms: rounded to float32 they differ."""

    def forward(net: Any, x: Tensor) -> Tensor:
        scores = (net.q(x).float()[:, :, None] * net.k(x).float()[:, None]).sum(-1)
        causal = torch.zeros(5, 5, dtype=torch.float32).masked_fill_(torch.ones(5, 5).triu(1).bool(), -math.inf)
        return torch.as_tensor(net.b(F.softmax(scores + causal, -1, dtype=torch.float32).type_as(x) @ net.v(x)))

    q, k, v = nn.Linear(6, 64), nn.Linear(6, 64), nn.Linear(6, 32)
    return Net(forward, q=q, k=k, v=v, b=nn.Linear(32, 3)), tokens(), "q.weight"


def grid_in_float32() -> Case:
    """Torch samples only where both tensors have one type; made by hand, from Python's numbers and whole ones."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).relu()
        line = (torch.arange(4) / 3).float() * torch.tensor([2.0]) - 1
        grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1)[None].to(torch.float32)
        return torch.as_tensor(net.b(F.grid_sample(y, grid.expand(len(y), -1, -1, -1), align_corners=False)))

    return Net(forward, a=conv(3, 16), b=conv(16, 4)), image(), "a.weight"


def written_into_float32() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).relu()
        out = torch.zeros(y.shape, dtype=torch.float32).copy_(y)
        return torch.as_tensor(net.b(out.mul_(y.half()).to(net.b.weight.dtype)))

    return Net(forward, a=conv(3, 16), b=conv(16, 4)), image(), "a.weight"


def asks_for_float32() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        if x.dtype != torch.float32 or y.dtype != torch.float32:
            raise TypeError(f"expected float32, got {x.dtype}")
        return torch.as_tensor(net.b(y.relu()))

    return Net(forward, a=conv(3, 16), b=conv(16, 4)), image(), "a.weight"


CASES = [norm_in_float32, sum_in_float32, grid_in_float32, written_into_float32, asks_for_float32]


@pytest.mark.parametrize("case", CASES)
def test_compared_in_float64_whatever_the_code_names(case: Callable[[], Case]) -> None:
    model, example, pruned = case()
    randomized(model).eval()
    plan = settled_plan(model, example)
    assert plan.kept(pruned, 0).size < dict(model.named_parameters())[pruned].shape[0]
    masked = masked_double(model, plan).float()
    assert verify(masked, compact(masked, plan), plan, [example]).max_relative_difference <= TOLERANCE


def test_a_norm_in_float32_computes_in_float64() -> None:
    norm, x = FloatRMSNorm(16).double(), torch.randn(3, 16, dtype=torch.float64)
    with AS_DOUBLE[0]():
        got = norm(x)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(), rtol=1e-14, atol=1e-14)


class OnlyBytes(nn.Module):
    """Runs in numbers of one size alone, as a kernel that is written for one type does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.bytes, self.a, self.norm, self.b = dtype.itemsize, nn.Linear(6, 32), nn.LayerNorm(32), nn.Linear(32, 3)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.element_size() != self.bytes:
            raise TypeError(f"expected {self.bytes} bytes a number")
        return self.b(self.norm(self.a(x)).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_the_trial_accepts_in_its_own_precision_is_verified_in_it(dtype: torch.dtype) -> None:
    model, example = OnlyBytes(dtype), (torch.randn(64, 6, generator=torch.Generator().manual_seed(0)).to(dtype),)
    pruned = prunekit.prune(model, example, macs=0.6)
    assert pruned.plan.widths()["a"][0] < 32
    masked = zero_removed(copy.deepcopy(model), pruned.plan)
    proof = verify(masked, pruned.model, pruned.plan, [example, (example[0] + 1,)])
    assert proof.dtype == str(dtype).removeprefix("torch.")
    assert proof.max_relative_difference <= ROUNDING[dtype]
    assert compare_outputs(masked, masked, example) == 0
    with torch.no_grad():
        pruned.model.get_parameter("b.weight")[0, 0] += 1
    with pytest.raises(VerificationError, match=r"first at aten\.\w+ in b: values differ"):
        verify(masked, pruned.model, pruned.plan, [example])


class Boxes(nn.Module):
    """Selects by an operator that CPUs do not have in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 24, 3), nn.Conv2d(24, 5, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for each in self.b(self.a(x).relu()).flatten(2).mT:
            corner, size, score = each.split([2, 2, 1], 1)
            boxes = torch.cat([corner, corner + size.exp()], 1)
            found.append(boxes[nms(boxes, score[:, 0], 0.5)])
        return found


def test_operators_that_are_not_there_in_half_precision() -> None:
    images = torch.randn(16, 3, 6, 6, generator=torch.Generator().manual_seed(0)).half()
    model = Boxes().half()
    pruned = prunekit.prune(model, (images[:2],), macs=0.6)
    assert pruned.plan.widths()["a"][0] < 24
    assert {tensor.dtype for tensor in pruned.model.parameters()} == {torch.float16}
    with pytest.raises(ModelError, match=r"Boxes does not run on the images in float16 on cpu: .*\.half\(\)"):
        prunekit.prune(model, calibration=images, macs=0.6)


def test_a_kernel_for_one_type_in_a_model_of_another() -> None:
    """Coarse numbers make coarse ones of all that is computed from them; what comes before is compared as finely."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).relu()
        y = y + torch._weight_int8pack_mm(y.bfloat16(), net.bytes, net.scales.bfloat16()).to(y.dtype)
        return torch.as_tensor(net.c(net.b(y).relu()))

    packed = {"bytes": torch.arange(-128, 128, dtype=torch.int8).view(16, 16), "scales": nn.Parameter(torch.ones(16))}
    net = Net(forward, a=nn.Linear(6, 16), **packed, b=nn.Linear(16, 40), c=nn.Linear(40, 3))
    images = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    pruned = prunekit.prune(randomized(net), calibration=images, params=0.8)
    assert pruned.masked is not None
    assert pruned.plan.widths()["b"][0] < 40
    assert verify(pruned.masked, pruned.model, pruned.plan, [(images,)]).dtype == "bfloat16"


def test_code_that_no_way_of_running_it_satisfies_is_named() -> None:
    model = OnlyBytes(torch.float32).eval()
    plan = settled_plan(model, (torch.randn(4, 6),))
    masked = zero_removed(copy.deepcopy(model), plan)
    with pytest.raises(ModelError, match=r"does not run, neither in float64 nor as it is: TypeError: expected 4 bytes"):
        verify(masked, compact(masked, plan), plan, [(torch.randn(4, 6).half(),)])
