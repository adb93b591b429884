"""Measured sensitivity against the compact model, and its figures against their definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from equivalence import Net, assert_unchanged, randomized, snapshot
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.compaction.compact_model import compact
from prunekit.errors import DataError, ModelError, NonFiniteError, UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.measure.group_sensitivity import forward_passes, measure_sensitivity
from prunekit.planning.plan import Plan
from prunekit.planning.sensitivity_curves import keep_in_group, kept_counts


def images(count: int = 24, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def residual(self: Any, x: Tensor) -> Tensor:
    x = self.norm(self.stem(x)).relu()
    inner = F.relu_(self.bn(self.first(x)))
    x = F.relu_(self.second(inner).add_(x))
    return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def net() -> nn.Module:
    """A residual block behind a norm over channels, with much that is written to in place."""
    parts = {
        "stem": nn.Conv2d(3, 6, 3, padding=1),
        "norm": nn.GroupNorm(1, 6),
        "first": nn.Conv2d(6, 8, 3, padding=1, bias=False),
        "bn": nn.BatchNorm2d(8),
        "second": nn.Conv2d(8, 6, 3, padding=1),
        "head": nn.Linear(6, 4),
    }
    return randomized(Net(residual, **parts)).double().eval()


def mapped(model: nn.Module) -> tuple[ChannelMap, dict[str, Any]]:
    chart = trace(model, (images(2),))
    generator = np.random.default_rng(0)
    return chart, {group.name: generator.permutation(group.labels) for group in chart.groups}


def test_each_point_is_what_the_compact_model_computes() -> None:
    model, x = net(), images()
    labels = torch.arange(24) % 4
    chart, orders = mapped(model)
    assert len(orders) == 2
    found = measure_sensitivity(model, chart, orders, list(zip(x.split(10), labels.split(10), strict=True)))
    with torch.no_grad():
        want = model(x)
        for name, order in orders.items():
            assert [point.kept for point in found[name]] == list(kept_counts(order.size))
            for point in found[name]:
                plan = Plan(chart, keep_in_group(chart, order, point.kept))
                assert plan.widths()[name] == (point.kept, order.size)
                got = compact(model, plan).eval()(x)
                error = (got - want).square().mean() / want.var(0, correction=0).mean()
                kl = (want.softmax(1) * (want.log_softmax(1) - got.log_softmax(1))).sum(1).mean()
                assert point.error == pytest.approx(float(error), rel=1e-9, abs=1e-20)
                assert point.kl == pytest.approx(float(kl), rel=1e-8, abs=1e-14)
                assert point.loss == pytest.approx(float(F.cross_entropy(got, labels)), rel=1e-9)
                assert point.scores.get("top1") == pytest.approx(100 * float((got.argmax(1) == labels).double().mean()))
            assert found[name][0].error == 0
            assert all(point.error > 1e-4 for point in found[name][1:])


def test_the_model_is_left_as_it_was_and_runs_as_often_as_said() -> None:
    model = net().train()
    chart, orders = mapped(model)
    before, runs = snapshot(model), []
    handle = model.register_forward_hook(lambda module, inputs, output: runs.append(len(inputs[0])))
    measure_sensitivity(model, chart, orders, [images(8), images(8, 1)])
    handle.remove()
    assert runs.count(8) == 2 * forward_passes(orders)  # that reach the end; others are tries on two images
    assert_unchanged(model, before)
    assert model.training
    assert count_hooks(model) == 0


def test_labels_decide_what_is_measured_and_a_loss_may_be_given() -> None:
    model, x, labels = net(), images(8), torch.arange(8) % 4
    chart, orders = mapped(model)
    point = measure_sensitivity(model, chart, orders, [x])["first"][-1]
    assert (point.loss, point.scores) == (None, {})
    assert point.kl is not None
    weighted = measure_sensitivity(
        model, chart, orders, [(x, labels)], loss=lambda output, labels: output[:, 0].mean() + labels[0]
    )
    with torch.no_grad():
        small = compact(model, Plan(chart, keep_in_group(chart, orders["first"], 1))).eval()
        assert weighted["first"][-1].loss == pytest.approx(float(small(x)[:, 0].mean()))


def test_every_output_tensor_counts_the_same() -> None:
    def both(self: Any, x: Tensor) -> dict[str, Any]:
        x = self.stem(x).relu()
        return {"maps": [self.near(x) * 1000], "rest": (self.far(x).mean((1, 2, 3)), torch.tensor(3.0), len(x))}

    model = randomized(
        Net(both, stem=nn.Conv2d(3, 6, 3), near=nn.Conv2d(6, 2, 1), far=nn.Conv2d(6, 2, 1))
    ).double().eval()  # fmt: skip
    chart, orders = mapped(model)
    x = images(8)
    point = measure_sensitivity(model, chart, orders, [x.float().double()])["stem"][-1]
    assert (point.kl, point.loss, point.scores) == (None, None, {})
    with torch.no_grad():
        want, got = (
            model(x.float().double()),
            compact(model, Plan(chart, keep_in_group(chart, orders["stem"], 1)))(x.float().double()),
        )
    shares = [
        float((b - a).square().mean() / a.var(0, correction=0).mean())
        for a, b in ((want["maps"][0], got["maps"][0]), (want["rest"][0], got["rest"][0]))
    ]
    assert point.error == pytest.approx(sum(shares) / 2, rel=1e-9)


def whole(self: Any, x: Tensor) -> Tensor:
    return (self.stem(x).relu().mean((2, 3)) * 10).round().long()  # type: ignore[no-any-return]


def constant(self: Any, x: Tensor) -> Tensor:
    return self.stem(x).relu().mean((2, 3)) * 0 + 1  # type: ignore[no-any-return]


def broken(self: Any, x: Tensor) -> Tensor:
    return self.head(self.stem(x).relu().log().mean((2, 3)))  # type: ignore[no-any-return]


def growing(self: Any, x: Tensor) -> Tensor:
    hidden = self.stem(x).relu().mean((2, 3))
    return self.head(hidden).repeat(1, 1 + int((hidden[0] == 0).sum() > 0))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (
            whole,
            ModelError,
            "expected a model that returns a tensor of floating-point numbers.* got Tensor from the de",
        ),
        (constant, DataError, "output is the same for all 8 samples"),
        (broken, NonFiniteError, "in the input of head"),
        (growing, ModelError, r"group stem masked to 5 of 6 .*dense model's shapes \[\(8, 3\)\], got \[\(8, 6\)\]"),
    ],
)
def test_outputs_that_cannot_be_compared(function: Callable[..., Any], error: type[Exception], message: str) -> None:
    model = randomized(Net(function, stem=nn.Conv2d(3, 6, 3), head=nn.Linear(6, 3))).double().eval()
    with torch.no_grad():
        model.stem.bias.add_(2)
    chart = trace(randomized(Net(broken, stem=nn.Conv2d(3, 6, 3), head=nn.Linear(6, 3))).double(), (images(2),))
    orders = {"stem": next(group.labels for group in chart.groups if group.name == "stem")}
    with pytest.raises(error, match=message):
        measure_sensitivity(model, chart, orders, [images(8)])
    assert count_hooks(model) == 0


@pytest.mark.parametrize(
    ("batches", "loss", "error", "message"),
    [
        ([], None, DataError, "expected at least one batch of samples to measure on, got none"),
        ([images(4), (images(4), torch.zeros(4).long())], None, DataError, "targets with every batch or with none"),
        ([images(4)], lambda output, labels: output.sum(), UsageError, "a loss needs targets"),
        ([(images(4), torch.full((4,), 9))], None, DataError, "expected labels from 0 to 3"),
    ],
)
def test_images_and_labels_that_do_not_do(batches: Any, loss: Any, error: type[Exception], message: str) -> None:
    model = net()
    chart, orders = mapped(model)
    with pytest.raises(error, match=message):
        measure_sensitivity(model, chart, orders, batches, loss=loss)
