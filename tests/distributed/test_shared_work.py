"""Processes that share calibration, orders of removal and repair come to the plan and the weights of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from process_group import together
from torch import Tensor, nn
from torch.nn import functional as F

import prunekit as pk
from prunekit.distributed.process_group import rank
from prunekit.distributed.shared_work import dealt, owned, shared_mean, sharing_work
from prunekit.errors import DataError, RunError, UsageError

SEEN = [0]
"""Samples that models have run on in this process."""


class Residual(nn.Module):
    """Convolutions, one of them depthwise, with norms, a shortcut, and two layers that are fitted together."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.first, self.bn1 = nn.Conv2d(12, 40, 1, bias=False), nn.BatchNorm2d(40)
        self.depthwise, self.bn2 = nn.Conv2d(40, 40, 3, padding=1, groups=40, bias=False), nn.BatchNorm2d(40)
        self.last, self.bn3 = nn.Conv2d(40, 12, 1, bias=False), nn.BatchNorm2d(12)
        self.up, self.down, self.head = nn.Linear(12, 32), nn.Linear(32, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        SEEN[0] += len(x)
        x = F.relu(self.bn(self.stem(x)))
        x = x + self.bn3(self.last(F.relu6(self.bn2(self.depthwise(F.relu(self.bn1(self.first(x))))))))
        x = F.relu(x).mean((2, 3))
        return self.head(x + self.down(F.relu(self.up(x))))  # type: ignore[no-any-return]


class Texts(nn.Module):
    """Two blocks of attention and gated units behind norms over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, 24), nn.RMSNorm(24)
        self.query, self.key, self.value, self.out = (nn.Linear(24, 24, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(24, 48), nn.Linear(24, 48), nn.Linear(48, 24)
        self.head = nn.Linear(24, 32)

    def forward(self, ids: Tensor) -> Tensor:
        SEEN[0] += len(ids)
        x = self.embed(ids)
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(2, (4, 6)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = F.rms_norm(x, (24,))
        return self.head(x + self.down(F.silu(self.gate(y)) * self.up(y)))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Experts in a stack, of which the first gets no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 12), nn.Linear(12, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 32, 12)), nn.Parameter(torch.randn(4, 12, 32))

    def forward(self, x: Tensor) -> Tensor:
        SEEN[0] += len(x)
        x = self.stem(x)
        numbers, found = 1 + (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), torch.zeros_like(x)
        for number in range(4):
            rows = torch.where(numbers == number)[0]
            hidden = F.relu(F.linear(x[rows], self.up[number]))
            found = found.index_add(0, rows, F.linear(hidden, self.down[number]))
        return self.head(x + found)  # type: ignore[no-any-return]


def images() -> tuple[nn.Module, Tensor, dict[str, Any]]:
    model = Residual()
    for name, values in model.named_buffers():
        if name.endswith("running_mean"):
            values.normal_(0, 0.1)
        elif name.endswith("running_var"):
            values.uniform_(0.5, 2)
    return model, torch.randn(72, 3, 9, 9), {"macs": 0.6}


def texts() -> tuple[nn.Module, Tensor, dict[str, Any]]:
    return Texts(), torch.randint(0, 32, (40, 10)), {"params": 0.7}


def few_rows() -> tuple[nn.Module, Tensor, dict[str, Any]]:
    """Layers that read more columns than there are rows."""
    layers = nn.Linear(6, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 4)
    return nn.Sequential(*layers), torch.randn(40, 6), {"params": 0.6}


def experts() -> tuple[nn.Module, Tensor, dict[str, Any]]:
    return Experts(), torch.randn(96, 6), {"params": 0.6}


Case = Callable[[], tuple[nn.Module, Tensor, dict[str, Any]]]


def pruned(case: Case) -> tuple[dict[str, Any], dict[str, Tensor], list[str], int]:
    torch.manual_seed(0)
    model, samples, budget = case()
    model = model.double().eval()
    samples = samples.double() if samples.is_floating_point() else samples
    before = SEEN[0]
    with sharing_work():
        found = pk.prune(model, calibration=samples, progress=False, **budget)
    assert found.repair is not None
    layers = [layer.weight for layer in found.repair.layers if layer.applied]
    return found.plan.widths(), found.model.state_dict(), layers, SEEN[0] - before


@pytest.mark.slow
@pytest.mark.parametrize("case", [images, texts, few_rows, experts])
@pytest.mark.parametrize("processes", [2, 4])
def test_plan_and_weights_are_those_of_one_process(case: Case, processes: int, tmp_path: Path) -> None:
    widths, weights, layers, seen = pruned(case)
    assert layers
    for other in together(processes, tmp_path, pruned, case):
        assert other[0] == widths
        assert other[2] == layers
        assert other[1].keys() == weights.keys()
        assert other[3] <= seen * {2: 0.7, 4: 0.5}[processes]
        for name, value in weights.items():
            torch.testing.assert_close(other[1][name], value, rtol=1e-6, atol=1e-9)


def test_each_process_gets_a_part() -> None:
    assert [*dealt(range(3))] == [0, 1, 2]
    assert owned([1.0, 5.0]) == [0, 1]
    with sharing_work():  # there is no group
        assert float(shared_mean(torch.tensor(3.0), 2)) == 3


def shares() -> tuple[list[int], list[int], float, list[int]]:
    with sharing_work():
        mean = shared_mean(torch.tensor(6.0 * rank()), 2 * rank())
        found = [*dealt(range(5))], owned([1.0, 5.0, 2.0, 2.0]), float(mean)
        with sharing_work(share=False):
            return *found, [*dealt(range(2))]


@pytest.mark.slow
def test_means_count_rows_and_owners_get_the_same_cost(tmp_path: Path) -> None:
    found = together(3, tmp_path, shares)
    assert [part for part, *_ in found] == [[0, 3], [1, 4], [2]]
    assert [own for _, own, *_ in found] == [[1], [2, 0], [3]]
    assert [mean for *_, mean, _ in found] == [10.0] * 3  # 0 rows, 2 of mean 6, 4 of mean 12
    assert [alone for *_, alone in found] == [[0, 1]] * 3


def apart(what: str) -> str:
    torch.manual_seed(0)
    model = Residual()
    samples = torch.randn(32, 3, 9, 9) + (rank() if what == "samples" else 0)
    if what == "weights" and rank():
        model.head.bias.data[0] += 1
    budget = {"speedup": 1.5} if what == "time" else {"macs": 0.6}
    try:
        with sharing_work():
            pk.prune(model, calibration=samples, progress=False, **budget)
    except (RunError, UsageError) as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("samples", "the calibration samples: expected the same in all 2 processes, but process 1 has something else"),
        ("weights", "the model's weights: expected the same in all 2 processes"),
        ("time", "budget: expected none of time in sharing_work"),
    ],
)
def test_processes_that_see_other_things_say_so(what: str, said: str, tmp_path: Path) -> None:
    for told in together(2, tmp_path, apart, what):
        assert said in told


def too_few() -> str:
    try:
        pruned(lambda: (Residual(), torch.randn(8, 3, 9, 9), {"macs": 0.6}))
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_more_processes_than_samples_is_an_error(tmp_path: Path) -> None:
    for told in together(8, tmp_path, too_few):
        assert "expected a sample to fit on for each of 8 processes, got" in told
