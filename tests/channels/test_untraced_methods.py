"""Sizes that only methods read which no example runs: set if running those proves them, else named in notes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import TOLERANCE, difference, doubled, parity, random_keep, randomized
from torch import Tensor, nn

from prunekit.channels.trace import trace
from prunekit.channels.trial.trial import TrialResult, run_trial, with_untraced_sizes
from prunekit.compaction.compact_model import compact
from prunekit.compaction.model_folder import load, save
from prunekit.planning.plan import Plan
from prunekit.pruning.plan_search import PlanSearch
from prunekit.pruning.prune import prune
from prunekit.settings.pruning import BudgetSettings, PruneSettings

EXAMPLE = (torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(3)),)


def settled(net: nn.Module, example: Any = EXAMPLE) -> tuple[Plan, TrialResult, tuple[str, ...]]:
    found = run_trial(net, trace(net, example), lambda chart: random_keep(chart, 2, 0.4), [example])
    before = torch.get_rng_state()
    after, notes = with_untraced_sizes(net, found, [example])
    assert torch.equal(torch.get_rng_state(), before)
    return Plan(after.channel_map, after.keep), after, notes


class Gated(nn.Module):
    """Values and gates by halves; the same for a runtime that wants sizes, which stand in a tuple."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.parts, self.depth = (width, width), width
        self.a, self.b = nn.Linear(6, 2 * width), nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        values, gates = self.a(x).chunk(2, -1)
        return self.b(values * gates.sigmoid())

    def forward_sized(self, x: Tensor) -> Tensor:
        values, gates = self.a(x).split(self.parts, dim=-1)
        return self.b(values.reshape(*x.shape[:-1], self.depth) * gates.sigmoid())


class Branches(nn.Module):
    """Two layers of which one can be made, by a method that calls another for a part of itself."""

    def __init__(self, inputs: int = 6, outputs: int = 12) -> None:
        super().__init__()
        self.inputs, self.outputs, self.merged = inputs, outputs, None
        self.left, self.right = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x) if self.merged is None else self.merged(x)

    def blank(self) -> Tensor:
        return torch.zeros(self.outputs, self.inputs, dtype=self.left.weight.dtype)

    def merge(self) -> None:
        merged = nn.Linear(self.inputs, self.outputs).to(self.left.weight)
        merged.weight.data = self.blank() + (self.left.weight + self.right.weight).data
        merged.bias.data = (self.left.bias + self.right.bias).data
        self.merged: Any = merged
        del self.left, self.right


class Remembering(nn.Module):
    """A state that a method makes, of a width that a part of the model has."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.core = nn.Module()
        self.core.width, self.core.step = width, nn.Linear(width, width)
        self.inward, self.out, self.state = nn.Linear(6, width), nn.Linear(width, 4), None

    def reset(self) -> None:
        self.state = torch.zeros(self.core.width)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        state = self.core.step(self.inward(x).tanh())  # type: ignore[operator]
        return self.out(state if self.state is None else state + self.state)


class Nested(nn.Module):
    """A method that calls those of its parts, one of which merges in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Branches(6, 12), Branches(12, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())

    def merge(self) -> None:
        self.first.merge()
        self.second.merge()
        self.is_merged = True


def around(inner: nn.Module, outputs: int) -> nn.Sequential:
    return randomized(nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(outputs, 3))).eval()  # type: ignore[return-value]


CASES = [(Gated, 6, "forward_sized"), (Branches, 12, "merge"), (Remembering, 4, "reset"), (Nested, 9, "merge")]


def switched(module: Any, name: str) -> None:
    if name == "forward_sized":
        module.forward = module.forward_sized
    else:
        getattr(module, name)()


@torch.no_grad()
@pytest.mark.parametrize(("cls", "outputs", "name"), CASES)
def test_methods_that_no_example_runs_do_in_the_compact_model_what_they_do(
    cls: Any, outputs: int, name: str, tmp_path: Path
) -> None:
    net = around(cls(), outputs)
    plan, found, notes = settled(net)
    assert notes == ()
    assert parity(net, plan, EXAMPLE) <= TOLERANCE
    small: Any = found.compact
    save(small, tmp_path / "small", plan)
    dense = around(cls(), outputs)
    for model in (small, compact(net, plan), load(tmp_path / "small", model=dense)):
        twin: Any = model.double()
        want = twin(*doubled(EXAMPLE))
        switched(twin[1], name)
        if name == "reset":
            twin[1].state = twin[1].state.double()
        assert difference(want, twin(*doubled(EXAMPLE))) <= TOLERANCE


def test_the_sizes_are_those_of_what_is_kept() -> None:
    net = around(Gated(), 6)
    plan, found, _ = settled(net)
    small: Any = found.compact
    left = small[1].b.in_features
    assert 0 < left < 10
    assert (small[1].parts, small[1].depth) == ((left, left), left)
    assert net[1].parts == (10, 10)
    assert {(size.module, size.name, size.position) for size in plan.channel_map.sizes} == {
        ("1", "parts", 0),
        ("1", "parts", 1),
        ("1", "depth", None),
    }


class Literal(Gated):
    def forward_sized(self, x: Tensor) -> Tensor:
        values, gates = self.a(x).split((10, 10), dim=-1)
        return self.b(values * gates.sigmoid())


class OtherArguments(Gated):
    def forward_sized(self, x: Tensor, other: Tensor = torch.ones(1)) -> Tensor:  # noqa: B008
        return super().forward_sized(x) * other

    def exported(self, x: Tensor, times: int) -> Tensor:
        return self.b(self.a(x)[..., : self.depth] * times)


class Branching(Gated):
    exporting = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.exporting:
            values, gates = y.split(self.depth, dim=-1)
        else:
            values, gates = y.chunk(2, -1)
        return self.b(values * gates.sigmoid())


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (Literal, "Literal.forward_sized computes what forward does in the dense model and not in the compact one"),
        (OtherArguments, "OtherArguments.exported reads self.depth = 10, as in the dense model, where"),
        (Branching, "Branching.forward reads self.depth = 10, as in the dense model, where"),
    ],
)
def test_what_cannot_be_run_or_found_is_named(cls: Any, said: str) -> None:
    class Without(cls):  # type: ignore[misc]
        if cls is not Literal:
            forward_sized = None

    Without.__name__ = cls.__name__
    net = around(Without(), 6)
    _, found, notes = settled(net)
    small: Any = found.compact
    assert any(note.startswith(said) and note.endswith("(1)") for note in notes)
    assert small[1].depth == 10
    pruned = prune(net, EXAMPLE, channels=0.6)
    assert any(note.startswith(said) for note in pruned.notes)


def test_attributes_that_forward_reads_as_sizes_are_what_they_are() -> None:
    class Classes(nn.Module):
        """As many classes as hidden channels."""

        def __init__(self) -> None:
            super().__init__()
            self.classes = 8
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).relu()).view(*x.shape[:-1], self.classes)

        def best(self, scores: Tensor) -> Tensor:
            return scores.view(-1, self.classes).argmax(-1)

    net = randomized(Classes()).eval()
    _, found, notes = settled(net)
    small: Any = found.compact
    assert small.a.out_features < 8
    assert (small.classes, notes) == (8, ())


def test_methods_run_on_copies_only_and_no_others_are_run() -> None:
    class Counting(Gated):
        def refresh(self, times: int) -> Tensor:
            raise AssertionError("it takes other arguments")

        def write(self) -> None:
            raise AssertionError(f"it changes nothing of the module {self.depth}")

        def forward_sized(self, x: Tensor) -> Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward_sized(x)

    net = around(Counting(), 6)
    _, found, _ = settled(net)
    assert not hasattr(net[1], "calls")
    assert not hasattr(found.compact[1], "calls")  # type: ignore[index]


def test_a_plan_knows_the_sizes() -> None:
    net = around(Gated(), 6)
    planned = PlanSearch.trace(net, EXAMPLE, PruneSettings(BudgetSettings(channels=0.6))).find()
    small: Any = compact(net, planned.plan)
    assert small[1].depth == small[1].b.in_features == planned.compact[1].depth < 10  # type: ignore[index]
    assert planned.unseen == ()
