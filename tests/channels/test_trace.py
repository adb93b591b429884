"""What a trace and a trial leave alone, what they say, and what goes in and out of a model."""

from __future__ import annotations

import copy
import random
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equivalence import Net, assert_unchanged, image, parity, random_keep, randomized, settled_plan, snapshot
from torch import Tensor, nn

import prunekit
from prunekit.channels.labels.constraints import LockRecord
from prunekit.channels.map_builder import NOT_USED, with_extra
from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap, group_labels
from prunekit.channels.trial.trial import run_trial
from prunekit.compaction.compact_model import compact
from prunekit.errors import ModelError, PlanError, PrunekitError
from prunekit.hooks.hook import count_hooks
from prunekit.planning.plan import Plan


def plain() -> nn.Sequential:
    body = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU())
    net = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(6, 5))
    return randomized(net)  # type: ignore[return-value]


def two_layers(inputs: int = 4, hidden: int = 8, outputs: int = 4) -> dict[str, nn.Module]:
    return {"a": nn.Linear(inputs, hidden), "b": nn.Linear(hidden, outputs)}


# What must not change


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_the_callers_model_is_as_it_was(training: bool, dtype: torch.dtype) -> None:
    model = plain().train(training).to(dtype)
    model[1].eval()
    model[0].weight.requires_grad_(False)
    model[8].weight.grad = torch.ones_like(model[8].weight)
    example = (image()[0].to(dtype),)
    before, modes = snapshot(model), [module.training for module in model.modules()]
    frozen = [parameter.requires_grad for parameter in model.parameters()]
    plan = settled_plan(model, example)
    assert plan.removed > 0
    assert_unchanged(model, before)
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == frozen
    assert model[8].weight.grad is not None
    assert {tensor.dtype for tensor in model.parameters()} == {dtype}
    assert count_hooks(model) == 0
    assert not any("_prunekit_fields" in vars(tensor) for tensor in (*model.parameters(), *model.buffers()))


class Counting(nn.Module):
    """Updates buffers in place at every forward, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.a(x).relu()
        self.level.mul_(0.9).add_(y.detach().mean() * 0.1)
        return self.b(y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_trace_does_not_touch_buffers_that_forward_updates(dtype: torch.dtype) -> None:
    model = Counting().to(dtype)
    trace(model, (image()[0].to(dtype),))
    assert (int(model.calls), float(model.level)) == (0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_trial_does_not_touch_buffers_that_forward_updates(dtype: torch.dtype) -> None:
    model = Counting().to(dtype)
    settled_plan(model, (image()[0].to(dtype),))
    assert (int(model.calls), float(model.level)) == (0, 0.0)


def random_states() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[union-attr]


class ReplacesItsBuffer(nn.Module):
    """Divides by a parameter and by a buffer, in place of which forward leaves something else."""

    def __init__(self, left: Any) -> None:
        super().__init__()
        self.a, self.b, self.left = nn.Linear(6, 8), nn.Linear(8, 3), left
        self.by = nn.Parameter(torch.rand(8) + 1)
        self.register_buffer("spread", torch.rand(8) + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) / self.by / self.spread + self.by + self.spread
        spread = self.spread
        del self.spread
        self.left(self, spread)
        return self.b(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "left",
    [
        lambda net, spread: None,
        lambda net, spread: setattr(net, "spread", [spread]),
        lambda net, spread: net.register_buffer("spread", None),
        lambda net, spread: net.register_buffer("spread", torch.stack([spread, spread])),
    ],
)
def test_what_is_divided_by_keeps_its_values_also_where_forward_replaces_it(left: Any) -> None:
    net, example = randomized(ReplacesItsBuffer(left)), torch.randn(4, 6)
    result = prunekit.prune(net, example, channels=0.5)
    assert {("by", 0), ("spread", 0)} <= result.plan.channel_map.divided
    masked = copy.deepcopy(net)
    result.plan.zero(masked)
    assert torch.allclose(result.model(example), masked(example), rtol=1e-4)


def test_random_states_are_as_they_were() -> None:
    model, example = plain().train(), image()
    before = random_states()
    settled_plan(model, example)
    assert random_states() == before


def test_random_states_are_as_they_were_with_functional_dropout() -> None:
    model = Net(lambda net, x: net.b(F.dropout(net.a(x), 0.5, net.training)), **two_layers())
    example = (torch.ones(2, 4),)
    before = random_states()
    trace(model, example)
    assert random_states() == before


def test_hooks_are_gone_when_forward_raises() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        net.a(x)
        raise ValueError("boom")

    model = Net(forward, a=nn.Linear(4, 8))
    with pytest.raises(ModelError, match="boom"):
        trace(model, (torch.ones(2, 4),))
    assert count_hooks(model) == 0
    assert torch.is_grad_enabled()
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_model_that_looks_at_values_is_traced_for_real() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.b(y if float(y.sum()) > 1e9 else y.relu())

    model, example = Net(forward, **two_layers()), (torch.ones(2, 4),)
    randomized(model)
    before = snapshot(model)
    assert parity(model, settled_plan(model, example), example) <= 1e-9
    assert_unchanged(model, before)


def test_a_model_without_values_can_be_traced() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1))
    chart = trace(model, (torch.empty(1, 3, 8, 8, device="meta"),))
    assert chart.n_labels == 9
    assert chart.macs() == 3 * 9 * 8 * 36 + 8 * 5 * 36


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_trial_hands_back_is_the_compact_model(dtype: torch.dtype) -> None:
    """It ran in float64 while it was tried; nothing of that is left."""
    model, example = plain().to(dtype).train(), (image()[0].to(dtype),)
    model[0].weight.requires_grad_(False)
    settled = run_trial(model, trace(model, example), random_keep, [example])
    wanted = compact(model, Plan(settled.channel_map, settled.keep))
    assert_unchanged(settled.compact, snapshot(wanted))
    assert [type(p) for p in settled.compact.parameters()] == [nn.Parameter] * 8
    assert [p.requires_grad for p in settled.compact.parameters()] == [p.requires_grad for p in wanted.parameters()]
    assert [m.training for m in settled.compact.modules()] == [m.training for m in wanted.modules()]
    assert count_hooks(settled.compact) == 0


def test_random_states_are_as_they_were_when_traced_for_real() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = F.dropout(net.a(x), 0.5, net.training)
        return net.b(y if float(y.sum()) > 1e9 else y.relu())

    model, example = Net(forward, **two_layers()), (torch.ones(2, 4),)
    before = random_states()
    trace(model, example)
    assert random_states() == before


# Maps are values


def test_a_map_is_not_changed_by_locks_in_another() -> None:
    model, example = plain(), image()
    first = trace(model, example)
    rows = first.traced.trace.labels["0.weight"][0]
    assert rows is not None
    locked = with_extra(first, [LockRecord("for the test", "0", "", rows)])
    assert locked.n_labels == first.n_labels - 8
    assert "for the test" in {lock.reason for lock in locked.locks}
    again = with_extra(first, [])
    assert again.n_labels == first.n_labels
    assert again.locks == first.locks
    for name, axes in first.labels.items():
        for before, after in zip(axes, again.labels[name], strict=True):
            assert (before is None and after is None) or np.array_equal(before, after)  # type: ignore[arg-type]


def test_two_traces_of_one_model_are_equal() -> None:
    model, example = plain(), image()
    first, second = trace(model, example), trace(model, example)
    assert first.n_labels == second.n_labels
    assert [group.name for group in first.groups] == [group.name for group in second.groups]
    assert all(np.array_equal(a.labels, b.labels) for a, b in zip(first.groups, second.groups, strict=True))


def test_groups_partition_the_free_labels_and_have_names_of_their_own() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.d(net.c(x) * torch.cat([net.a(x), net.b(x)], 1))

    parts = {"c": nn.Linear(3, 12), "a": nn.Linear(3, 8), "b": nn.Linear(3, 4), "d": nn.Linear(12, 2)}
    chart = trace(Net(forward, **parts), (torch.ones(2, 3),))
    assert [(group.name, group.labels.size) for group in chart.groups] == [("c", 8), ("c#2", 4)]
    assert set(chart.groups[1].slots) == {(f"{m}.{n}", 0) for m in "bc" for n in ("weight", "bias")} | {("d.weight", 1)}
    together = np.sort(np.concatenate([group.labels for group in chart.groups]))
    assert together.tolist() == list(range(1, chart.n_labels))
    assert chart.group_of.tolist() == [-1, *[0] * 8, *[1] * 4]
    assert Plan(chart, np.ones(13, dtype=bool)).widths() == {"c": (8, 8), "c#2": (4, 4)}


def test_grouping_agrees_with_signatures_one_by_one() -> None:
    generator = np.random.default_rng(0)
    labels = {f"m{i}.weight": (generator.integers(0, 9, 12), generator.integers(0, 9, 5)) for i in range(3)}
    found = group_labels(labels, 9)
    for group in found:
        for label in group.labels:
            on = {(name, i) for name, axes in labels.items() for i, axis in enumerate(axes) if label in axis}
            assert on == set(group.slots)
    signatures = [group.slots for group in found]
    assert len(set(map(frozenset, signatures))) == len(signatures)


def test_a_map_counts_what_it_keeps() -> None:
    model, example = plain(), image()
    chart = trace(model, example)
    keep = random_keep(chart, seed=3)
    a, b = (int(keep[chart.labels[name][0]].sum()) for name in ("0.weight", "3.weight"))  # type: ignore[index]
    assert chart.layer_macs(keep) == {"0": 3 * 9 * a * 36, "3": a * b * 9 * 16, "8": b * 5}
    assert chart.macs(keep) == sum(chart.layer_macs(keep).values())
    assert chart.parameters_kept(keep, ["0.weight", "0.bias", "8.weight"]) == 27 * a + a + 5 * b
    assert chart.free_share(["8.bias"]) == 0.0
    assert chart.free_share(["8.weight"]) == chart.free_share(["0.weight", "1.bias"]) == 1.0
    assert chart.free_share([]) == 0.0


def test_macs_are_for_one_sample() -> None:
    model = plain()
    assert trace(model, image(batch=1)).macs() == trace(model, image(batch=5)).macs()


def test_macs_of_an_operator_without_labels_count() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Conv2d(1, 4, 1))
    assert trace(model, image(channels=1)).macs() == 64 + 4 * 64


def test_activations_carry_labels_by_call() -> None:
    twice = nn.Conv2d(8, 8, 1)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), twice, nn.ReLU(inplace=True), twice, nn.Conv2d(8, 2, 1))
    chart = trace(model, image())
    free = chart.labels["0.weight"][0]
    for key in [("0", "output", 0), ("1", "input", 0), ("1", "output", 1), ("2", "output", 0), ("4", "input", 0)]:
        assert np.array_equal(chart.activations[key], free), key  # type: ignore[arg-type]
    assert ("0", "output", 1) not in chart.activations
    assert not chart.activations["4", "output", 0].any()


def test_a_map_from_a_file_says_that_it_has_no_trace() -> None:
    chart = ChannelMap({}, {}, 1, (), (), {}, (), None)
    with pytest.raises(ValueError, match="trace the model again"):
        _ = chart.traced


# What is not used, and other branches


def test_unused_parameters_are_locked_and_it_says_why() -> None:
    model = Net(lambda net, x: net.b(net.a(x).relu()), **two_layers(), dead=nn.Linear(10, 10))
    chart = trace(model, (torch.ones(2, 4),))
    assert not any(axis.any() for axis in chart.labels["dead.weight"])  # type: ignore[union-attr]
    assert (NOT_USED, "dead") in {(lock.reason, lock.module) for lock in chart.locks}


class Mixer(nn.Module):
    def forward(self, x: Tensor, mixed: bool = False) -> Tensor:
        return x.softmax(1) if mixed else x.relu()


def test_a_lock_names_the_call_of_a_module_that_is_called_several_times() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.mixer(net.a(x))
        x = net.again(net.b(x), mixed=True)  # the same module by another name
        return net.c(net.mixer(x))

    mixer = Mixer()
    net = Net(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 6), c=nn.Linear(6, 2), mixer=mixer, again=mixer)
    reasons = [lock.reason for lock in trace(net, (torch.randn(3, 4),)).locks if lock.module == "mixer"]
    assert len(reasons) == 1
    assert "(of 3 calls of this module, number 2 at test_trace.py:" in reasons[0]
    assert "x = net.again(net.b(x), mixed=True)" in reasons[0]

    def every(net: Any, x: Tensor) -> Tensor:
        return net.c(net.mixer(net.b(net.mixer(net.a(x), mixed=True)), mixed=True))

    net = Net(every, a=nn.Linear(4, 8), b=nn.Linear(8, 6), c=nn.Linear(6, 2), mixer=mixer)
    assert not any("calls of this module" in lock.reason for lock in trace(net, (torch.randn(3, 4),)).locks)


def test_a_second_example_shows_another_branch() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.b(y) if x.shape[0] == 2 else net.c(y.relu())

    model = randomized(Net(forward, **two_layers(), c=nn.Linear(8, 3)))
    both = ((torch.randn(2, 4),), (torch.randn(3, 4),))
    alone, chart = trace(model, both[0]), trace(model, *both)
    assert any(lock.module == "c" and "not used" in lock.reason for lock in alone.locks)
    assert not any("not used" in lock.reason for lock in chart.locks)
    settled = run_trial(model, chart, random_keep, list(both))
    plan = Plan(settled.channel_map, settled.keep)
    assert plan.kept("c.weight", 1).size < 8
    assert max(parity(model, plan, example) for example in both) <= 1e-9


def test_locked_where_only_the_second_example_fixes_a_size() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.b(y) if x.shape[0] == 2 else net.b(y / y.shape[1])

    model = randomized(Net(forward, **two_layers()))
    settled = run_trial(model, trace(model, (torch.ones(2, 4),), (torch.ones(3, 4),)), random_keep,
                     [(torch.ones(2, 4),), (torch.ones(3, 4),)])  # fmt: skip
    assert not settled.channel_map.groups
    assert any("the trial found" in lock.reason for lock in settled.channel_map.locks)


# What goes in and comes out


Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Scores:
    logits: Tensor


def assert_outputs_stay(forward: Any, example: tuple[Any, ...], outputs: int = 4) -> None:
    model = randomized(Net(forward, **two_layers(outputs=outputs)))
    plan = settled_plan(model, example)
    assert plan.kept("a.weight", 0).size < 8
    assert plan.kept("b.weight", 0).size == outputs, "an output was pruned"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: {"logits": y},
        lambda y: (y, None, 3),
        lambda y: [[y]],
        lambda y: Pair(y, y),
        lambda y: Scores(y),
        lambda y: {"nested": (Scores(y),)},
        lambda y: SimpleNamespace(logits=y),
    ],
)
def test_outputs_are_never_pruned(wrap: Any) -> None:
    assert_outputs_stay(lambda net, x: wrap(net.b(net.a(x))), (torch.randn(2, 4),))


@pytest.mark.parametrize(
    ("example", "read"),
    [
        ({"x": [torch.randn(2, 4)]}, lambda value: value["x"][0]),
        ((torch.randn(2, 4), "text", None, 2), lambda value: value[0]),
        (Pair(torch.randn(2, 4), torch.randn(2, 4)), lambda value: value.left + value.right),
        (Scores(torch.randn(2, 4)), lambda value: value.logits),
    ],
)
def test_inputs_of_many_kinds(example: Any, read: Any) -> None:
    assert_outputs_stay(lambda net, value: net.b(net.a(read(value))), (example,))


def test_integer_inputs_reach_the_model_as_they_are() -> None:
    parts = {"e": nn.Embedding(10, 8), "a": nn.Linear(8, 6), "b": nn.Linear(6, 3)}
    model = randomized(Net(lambda net, i: net.b(net.a(net.e(i)).relu()), **parts))
    example = (torch.tensor([[1, 9], [0, 3]]),)
    plan = settled_plan(model, example)
    assert plan.kept("a.weight", 0).size < 6
    assert parity(model, plan, example) <= 1e-9


def test_an_example_of_ones_hides_nothing() -> None:
    """All pixels alike make every position alike; the trial looks at noise in its place."""
    model = Net(lambda net, x: net.b(net.a(x) - net.a(x).mean(-1, keepdim=True)), a=nn.Linear(4, 8), b=nn.Linear(8, 4))
    example = (torch.ones(2, 4),)
    assert parity(randomized(model), settled_plan(model, example), (torch.randn(2, 4),)) <= 1e-9


def test_an_example_that_does_not_fit_is_a_clear_error() -> None:
    with pytest.raises(PrunekitError):
        trace(plain(), (torch.ones(1, 4, 8, 8),))


def test_an_example_that_is_a_list_is_a_clear_error() -> None:
    with pytest.raises(PrunekitError):
        trace(plain(), [torch.ones(1, 3, 8, 8)])


def test_a_dtype_fixed_in_the_models_code() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.b(net.a(x).softmax(0).float())

    model, example = randomized(Net(forward, **two_layers())), (torch.randn(2, 4),)
    assert settled_plan(model, example).removed > 0


@pytest.mark.slow
def test_a_plan_is_tried_as_often_as_it_takes() -> None:
    """Each of these classes refuses another width, so that each trial finds out about one of them."""

    def fixed(x: Tensor, width: int) -> Tensor:
        if x.shape[-1] != width:
            raise ValueError(f"expected {width} channels")
        return x

    def refusing(width: int) -> nn.Module:
        def forward(block: Any, x: Tensor) -> Tensor:
            return x + fixed(block.a(x).relu(), width).sum(-1, keepdim=True)

        block: Any = type(f"Refuses{width}", (nn.Module,), {"forward": forward})()
        block.a = nn.Linear(3, width)
        return block  # type: ignore[no-any-return]

    model = nn.Sequential(*[refusing(width) for width in range(2, 24)], nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3))
    plan = settled_plan(randomized(model), (torch.randn(2, 3),))
    assert list(plan.widths()) == ["22"]
    assert plan.removed
    assert sum("expected" in lock.reason for lock in plan.channel_map.locks) == 22


def test_locks_that_change_nothing_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        if y.shape[-1] < 8:
            raise ValueError("too narrow")
        return torch.as_tensor(net.b(y))

    monkeypatch.setattr("prunekit.channels.map_builder.with_extra", lambda channel_map, records: channel_map)
    with pytest.raises(
        PlanError, match="further locks change nothing; the last to differ was the Python code in the top"
    ):
        settled_plan(randomized(Net(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 3))), (torch.randn(2, 4),))


@pytest.mark.slow
def test_as_many_steps_as_convergence_needs() -> None:
    """The number of calls follows the values: it differs between batches, and between dense and pruned model."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).relu()
        for _ in range(60):
            before, y = y, torch.tanh(net.c(net.b(y).relu()) + y) * 0.7
            if float((y - before).abs().max()) < 1e-3:
                break
        return torch.as_tensor(net.d(y).mean((2, 3)))

    parts = {"a": nn.Conv2d(3, 12, 3), "b": nn.Conv2d(12, 20, 1), "c": nn.Conv2d(20, 12, 1), "d": nn.Conv2d(12, 3, 1)}
    model = randomized(Net(forward, **parts))
    images = torch.randn(32, 3, 6, 6, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 3, 32).view(
        -1, 1, 1, 1
    )
    for data in ({"example": images[:4]}, {"calibration": images}):
        done = prunekit.prune(model, macs=0.8, **data)
        assert done.plan.widths()["b"][0] < 20
        assert done.max_relative_difference <= 1e-9
