"""Weights that are computed before each forward pass: weight normalization, spectral normalization and
`torch.nn.utils.prune`, by hooks and by parametrizations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import Net, randomized, settled_plan
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm

import prunekit
from prunekit.channels.trace import trace
from prunekit.measure.verification import verify
from prunekit.planning.plan import load_plan

IMAGES = (torch.randn(4, 3, 10, generator=torch.Generator().manual_seed(0)),)


def by_hook(layer: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning, match="deprecated"):
        return nn.utils.weight_norm(layer)


def by_parametrization(layer: nn.Module) -> nn.Module:
    return parametrizations.weight_norm(layer)


def masked_by_torch(layer: nn.Module) -> nn.Module:
    return prune.random_unstructured(layer, "weight", 0.3)  # type: ignore[no-untyped-call, no-any-return]


def net(computed: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    convs = {"a": nn.Conv1d(3, 16, 3), "b": nn.Conv1d(16, 20, 3)}
    parts = {name: computed(conv) for name, conv in convs.items()} | {"c": nn.Linear(20, 4)}
    return Net(lambda net, x: net.c(net.b(net.a(x).relu()).relu().mean(2)), **parts)


def stepped(model: nn.Module) -> nn.Module:
    """Its computed weights are then attributes with a graph behind them."""
    model.train()(*IMAGES).sum().backward()
    model.zero_grad()
    return model


@pytest.mark.parametrize(
    "computed", [by_hook, by_parametrization, masked_by_torch, spectral_norm, parametrizations.spectral_norm]
)
def test_computed_weights_are_pruned_trained_and_saved(computed: Any, tmp_path: Path) -> None:
    model = stepped(net(computed)).eval()
    plan = settled_plan(model, IMAGES)
    assert set(plan.widths()) == {"a", "b"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    with prunekit.masked(model, plan, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(*IMAGES).square().sum().backward()
            optimizer.step()
            assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    small = prunekit.compact(model, plan)
    assert verify(model, small, plan, [IMAGES]).max_relative_difference <= 1e-9
    prunekit.save(small, tmp_path / "small", plan)
    again = prunekit.load(tmp_path / "small", model=net(computed))
    torch.testing.assert_close(again(*IMAGES), small(*IMAGES))
    prunekit.transfer(optimizer, model, small, plan)
    small(*IMAGES).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("computed", [by_hook, by_parametrization])
def test_what_is_divided_by_its_norm_keeps_its_values_under_masks(computed: Any, tmp_path: Path) -> None:
    model = net(computed).eval()
    plan = settled_plan(model, IMAGES)
    rows = {name for name, axis in plan.channel_map.divided if axis == 0}
    assert len(rows) == 2
    for name in rows:
        kept, parameter = torch.from_numpy(plan.kept(name, 0)), model.get_parameter(name)
        with prunekit.masked(model, plan):
            gone = torch.ones(parameter.shape[0], dtype=torch.bool).index_fill(0, kept, value=False)
            assert (parameter[gone] != 0).any()
    plan.save(tmp_path)
    assert load_plan(tmp_path).channel_map.divided == plan.channel_map.divided
    small = prunekit.compact(model, plan)
    prunekit.compaction.compact_model.spread_(model, small, plan)
    assert bool(model(*IMAGES).isfinite().all())
    assert verify(model, small, plan, [IMAGES]).max_relative_difference <= 1e-9


def test_rows_that_are_computed_before_they_are_normalized_stay_and_it_says_what_to_do() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        weight = torch._weight_norm(net.rows * 2, net.lengths, 0)
        return torch.as_tensor(net.b(torch.nn.functional.linear(x, weight).relu()))

    rows, lengths = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.rand(8, 1))
    model = randomized(Net(forward, rows=rows, lengths=lengths, b=nn.Linear(8, 3)))
    chart = trace(model, (torch.randn(2, 6),))
    assert chart.free_share(["rows"]) == 0
    assert any("torch.nn.utils.remove_weight_norm(module)" in lock.reason for lock in chart.locks)


class FlatConv(nn.Conv2d):
    """Computes its kernel from a flattened one and further parameters."""

    def __init__(self, inputs: int, outputs: int, compute: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__(inputs, outputs, (2, 3))
        self.compute = compute
        self.others = nn.ParameterList(torch.rand(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.compute(self.weight.flatten(1), *(other.flatten(1) for other in self.others))
        return torch.as_tensor(self._conv_forward(x, weight.view_as(self.weight), self.bias))


def flat_spectral(sn: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        convs = [nn.Conv2d(3, 8, (3, 2)), nn.ConvTranspose2d(8, 10, 2), nn.Conv2d(10, 12, (1, 2), groups=2)]
        a, b, c = (sn(conv) for conv in convs)
        return nn.Sequential(a, nn.ReLU(), b, nn.ReLU(), c, nn.Flatten(), sn(nn.Linear(12 * 20, 4)))

    return build


def flat(compute: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        conv = FlatConv(8, 10, compute, *shapes)
        return nn.Sequential(nn.Conv2d(3, 8, (3, 2)), nn.ReLU(), conv, nn.ReLU(), nn.Conv2d(10, 4, 1))

    return build


FLAT = {
    "hooks": flat_spectral(spectral_norm),
    "parametrizations": flat_spectral(parametrizations.spectral_norm),
    "a factor for each entry": flat(lambda weight, factors: weight * factors, (1, 48)),
    "factors first": flat(lambda weight, factors: factors * weight, (1, 48)),
    "another kernel": flat(lambda weight, other: weight + other, (10, 8, 2, 3)),
    "low rank": flat(lambda weight, down, up: weight + up @ down, (4, 48), (10, 4)),
}


@pytest.mark.parametrize("build", FLAT.values(), ids=FLAT)
def test_kernels_that_meet_a_vector_when_flattened_lose_input_channels(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    images = (torch.randn(2, 3, 6, 5, generator=torch.Generator().manual_seed(0)),)
    model = build().train()
    model(*images).sum().backward()
    model.zero_grad()
    plan = settled_plan(model.eval(), images)
    assert {"0", "2"} <= set(plan.widths())
    with prunekit.masked(model, plan, torch.optim.SGD(model.parameters()), restore=False):
        pass
    small = prunekit.compact(model, plan)
    assert verify(model, small, plan, [images]).max_relative_difference <= 1e-9
    prunekit.save(small, tmp_path / "small", plan)
    again = prunekit.load(tmp_path / "small", model=build())
    for training in (False, True, True):  # each step in train mode moves the vectors of spectral norm
        masked, *others = (one.train(training)(*images) for one in (model, small, again))
        for other in others:
            torch.testing.assert_close(other, masked)


@pytest.mark.parametrize("computed", [by_hook, masked_by_torch, spectral_norm, parametrizations.spectral_norm])
def test_layers_whose_weights_are_computed_know_their_new_sizes(computed: Any) -> None:
    torch.manual_seed(0)
    convs = nn.Conv1d(3, 8, 3), nn.Conv1d(8, 24, 3, groups=4)  # which loses whole groups
    head = nn.Sequential(nn.Linear(24, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 4))
    a, b, head[0] = computed(convs[0]), computed(convs[1]), computed(head[0])
    model = Net(lambda net, x: net.head(net.b(net.a(x).relu()).relu().mean(2)), a=a, b=b, head=head).eval()
    plan = settled_plan(model, IMAGES)
    with prunekit.masked(model, plan, torch.optim.SGD(model.parameters())):
        pass
    small: Any = prunekit.compact(model, plan)
    assert verify(model, small, plan, [IMAGES]).max_relative_difference <= 1e-9
    sizes = small.a.out_channels, small.b.in_channels, small.b.groups, small.b.out_channels
    assert sizes == (6, 6, 3, 18)
    assert (small.head[0].in_features, small.head[0].out_features) == (18, small.head[3].in_features)
    assert small.head[3].in_features < 12
