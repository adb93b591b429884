"""A rule for an operator of somebody else's, written as the guide in `prunekit.channels.trace` says."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import pytest
import torch
from equivalence import parity
from torch import Tensor, nn

import prunekit
from prunekit.channels import trace
from prunekit.channels.labels.label_flow import LabelFlow
from prunekit.channels.rules import rule
from prunekit.channels.rules.rule import RULES


@torch.library.custom_op("mylib::channel_scale", mutates_args=())
def channel_scale(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale.view(-1, 1, 1)


@channel_scale.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 8, 3), nn.Conv2d(8, 4, 1)
        self.scale = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.ops.mylib.channel_scale(self.body(self.stem(x)), self.scale))


def rule_of_the_guide() -> str:
    """The example in the docstring, as it stands there."""
    found = re.search(
        r"^    from prunekit\.channels\.\w+.* import .*?(?=^\S)", trace.__doc__ or "", re.DOTALL | re.MULTILINE
    )
    assert found is not None
    return textwrap.dedent(found[0])


@pytest.fixture
def taught() -> Iterator[None]:
    exec(rule_of_the_guide(), {"__name__": "users_rules"})  # the guide's own lines, not a copy of them
    yield
    del RULES["mylib.channel_scale"]


def test_without_a_rule_it_locks_and_says_so() -> None:
    chart = trace.trace(Scaled(), (torch.randn(2, 3, 8, 8),))
    assert [group.name for group in chart.groups] == ["stem"]
    assert (
        "mylib.channel_scale has no rule" in {lock.operator: lock.reason for lock in chart.locks}["mylib.channel_scale"]
    )


def test_the_guide_teaches_it(taught: None) -> None:
    model, example = Scaled().double(), (torch.randn(2, 3, 8, 8, dtype=torch.float64),)
    pruned = prunekit.prune(model, example, channels=0.5)
    assert dict(pruned.model.named_parameters())["scale"].shape == (4,)
    assert parity(model, pruned.plan, example) < 1e-12


def test_an_installed_package_teaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        def load(self) -> None:
            exec(rule_of_the_guide(), {"__name__": "packaged_rules"})

    monkeypatch.setattr("prunekit.channels.rules.rule.installed_rules", lambda: {"mylib.channel_scale": Point()})
    try:
        chart = trace.trace(Scaled(), (torch.randn(2, 3, 8, 8),))
        assert [group.name for group in chart.groups] == ["scale", "stem"]
    finally:
        del RULES["mylib.channel_scale"]


def test_a_rule_that_claims_too_much_is_caught_by_the_trial() -> None:
    @rule.register_rule("mylib.channel_scale")
    def careless(flow: LabelFlow, call: rule.OperatorCall) -> None:
        flow.set(call.out, flow.fields(call.args[0]))  # forgets the scale

    try:
        pruned = prunekit.prune(Scaled(), (torch.randn(2, 3, 8, 8),), channels=0.5)
        assert {name: tuple(p.shape) for name, p in pruned.model.named_parameters() if name != "head.bias"} == {
            "scale": (8,), "stem.weight": (3, 3, 1, 1), "stem.bias": (3,), "body.weight": (8, 3, 3, 3),
            "body.bias": (8,), "head.weight": (4, 8, 1, 1),
        }  # fmt: skip
    finally:
        del RULES["mylib.channel_scale"]


def test_a_rule_says_more_of_an_operator_by_traits() -> None:
    @rule.register_rule("mylib.channel_scale", traits=[rule.Trait.COUNTED])
    def counts(flow: LabelFlow, call: rule.OperatorCall) -> None:
        flow.add_macs(float(call.out.numel()), [])

    try:
        flow_of_inputs = trace.trace(OnInputs(), torch.randn(1, 2, 1, 1))  # its inputs have no labels
        assert flow_of_inputs.layer_macs() == {"": 2, "head": 2}
    finally:
        del RULES["mylib.channel_scale"]
        rule.Trait.COUNTED.names.remove("mylib.channel_scale")


class OnInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.ops.mylib.channel_scale(x, torch.ones(2)).flatten(1))
