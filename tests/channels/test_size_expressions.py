"""Sizes that a module's Python states are replaced where a trial needs it, and only there."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import linecache
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equivalence import TOLERANCE, parity, randomized, settled_plan
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nets_stated import CLASSES, WIDTH, Batched, Chunks, Looping, Quotient, ReadOffAPart, UnequalParts, Unscaled
from torch import nn

from prunekit.channels.labels.code_places import CodePlace
from prunekit.channels.rewrite.source_rewriter import attribute_values, original_of, set_expressions
from prunekit.channels.trace import trace
from prunekit.channels.tracing.call_sites import attribute_read, definition, place_of, slice_of_axis
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.channels.trial.trial import run_trial
from prunekit.compaction.compact_model import compact
from prunekit.compaction.model_folder import load, save
from prunekit.errors import ArtifactError
from prunekit.planning.plan import Plan, load_plan
from prunekit.utils.files import with_checksum

EXAMPLE = (torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(3)),)


def around(*modules: nn.Module) -> nn.Sequential:
    """With the width in front of them and behind them free."""
    return randomized(nn.Sequential(nn.Linear(6, WIDTH), *modules, nn.Linear(WIDTH, 4))).eval()  # type: ignore[return-value]


def uneven_plan(net: nn.Module) -> Plan:
    """A plan under which the width is no multiple of the heads that are left."""
    plan = next(
        plan for seed in range(20) if (plan := settled_plan(net, EXAMPLE, seed, 0.4)).kept("0.weight", 0).size % 3
    )
    assert any(CodePlace.named(size.name) for size in plan.channel_map.sizes)
    return plan


@pytest.mark.parametrize("cls", CLASSES)
def test_masked_equals_compact_for_any_number_of_examples(cls: type[nn.Module]) -> None:
    net = around(cls(), cls())
    plan = settled_plan(net, EXAMPLE, share=0.5)
    assert parity(net, plan, EXAMPLE) <= TOLERANCE
    assert parity(net, plan, (torch.randn(7, 5, 6),)) <= TOLERANCE
    names = {name for name, _ in net.named_parameters() if name.startswith(("1.", "2."))}
    assert names == {name for name in plan.kept_indices if name.startswith(("1.", "2."))}
    assert not any("trial found a difference" in lock.reason for lock in plan.channel_map.locks)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_folder_holds_sizes_and_places_but_no_code(cls: type[nn.Module], tmp_path: Path) -> None:
    net = around(cls())
    plan = settled_plan(net, EXAMPLE, share=0.5)
    small = compact(net, plan)
    save(small, tmp_path / "small", plan)
    again = load(tmp_path / "small", model=around(cls()))
    assert torch.equal(again(*EXAMPLE), small(*EXAMPLE))
    assert isinstance(again[1], cls)  # type: ignore[index]
    plan.save(tmp_path / "plan")
    assert attribute_values(net, load_plan(tmp_path / "plan").channel_map, plan.keep) == attribute_values(
        net, plan.channel_map, plan.keep
    )


@pytest.mark.slow
@settings(max_examples=15)
@example(CLASSES, 0, 0.5)  # all of them in one net; a trial's time grows with the square of what has to be stated
@given(st.lists(st.sampled_from(CLASSES), min_size=2, max_size=3), st.integers(0, 10_000), st.floats(0.1, 0.9))
def test_sizes_follow_any_plan(classes: Sequence[type[nn.Module]], seed: int, share: float) -> None:
    net = around(*(cls() for cls in classes))
    assert parity(net, settled_plan(net, EXAMPLE, seed, share), EXAMPLE) <= TOLERANCE


def test_the_dense_model_and_its_class_stay_as_they_are() -> None:
    net = around(Quotient())
    before, own = Quotient.forward, dict(vars(net[1]))
    small = compact(net, uneven_plan(net))
    assert type(net[1]) is Quotient
    assert Quotient.forward is before
    assert dict(vars(net[1])) == own
    assert type(small[1]) is not Quotient  # type: ignore[index]
    assert type(small[1]).__name__ == "Quotient"  # type: ignore[index]


def test_the_scale_of_attention_is_that_of_the_dense_width() -> None:
    """Against a narrow model written by hand."""
    net = around(Unscaled()).double()
    example = (EXAMPLE[0].double(),)
    plan = settled_plan(net, example, share=0.5)
    small: Any = compact(net, plan)
    attention = small[1]
    x = small[0](*example)
    q, k, v = (layer(x) for layer in (attention.q, attention.k, attention.v))
    assert q.shape[-1] < WIDTH
    scores = (q @ k.transpose(1, 2) * WIDTH**-0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    assert torch.allclose(attention(x), attention.o(scores.softmax(-1) @ v), rtol=1e-12)


def test_a_line_that_runs_several_times_leaves_as_many_channels_each_time() -> None:
    plan = settled_plan(around(Looping()), EXAMPLE, share=0.5)
    kept = [plan.kept(f"1.layers.{i}.weight", 0) for i in range(3)]
    assert {(np_kept < 4).sum() for np_kept in kept} == {(kept[0] < 4).sum()}
    assert kept[0].size < 10


def test_sizes_that_grow_with_the_batch_are_not_stated() -> None:
    plan = settled_plan(around(Batched()), EXAMPLE, share=0.5)
    names = [size.name for size in plan.channel_map.sizes]
    assert names
    assert not any("n * v.shape[1]" in name for name in names)


def halves(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A function that a class takes as its forward; both halves are as wide as a number says."""
    parts = self.a(x).view(*x.shape[:2], 2, 6)
    return self.b(parts[:, :, 0] * parts[:, :, 1])  # type: ignore[no-any-return]


class Borrowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(6, WIDTH)

    forward = halves


def test_a_method_of_another_name_is_left_as_it_is() -> None:
    net = around(Borrowed())
    plan = settled_plan(net, EXAMPLE, share=0.5)
    assert plan.kept("1.a.weight", 0).size == WIDTH
    assert plan.kept("0.weight", 0).size < WIDTH
    assert any("halves" in lock.reason or "view" in lock.reason for lock in plan.channel_map.locks)


class PerSample(nn.Module):
    """A kernel for each sample, made of several: samples and channels are one axis, both widths one size."""

    def __init__(self) -> None:
        super().__init__()
        self.width = WIDTH
        self.experts, self.route = nn.Parameter(torch.randn(3, WIDTH, WIDTH)), nn.Linear(WIDTH, 3)

    def kernels(self, x: torch.Tensor) -> torch.Tensor:
        return self.route(x.mean(1)).softmax(-1) @ self.experts.view(3, -1)  # type: ignore[no-any-return]


class PerSampleByAttribute(PerSample):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        kernels = self.kernels(x).view(b * self.width, self.width, 1)
        flat = x.transpose(1, 2).reshape(1, b * self.width, t)
        return nn.functional.conv1d(flat, kernels, groups=b).view(b, self.width, t).transpose(1, 2)


class PerSampleByNumber(PerSample):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernels = self.kernels(x).view(12 * x.size(0), 12, 1)
        flat = x.transpose(1, 2).reshape(1, len(x) * 12, -1)
        return nn.functional.conv1d(flat, kernels, groups=len(x)).view(len(x), 12, -1).transpose(1, 2)


@pytest.mark.parametrize("cls", [PerSampleByAttribute, PerSampleByNumber])
def test_the_width_in_a_product_with_the_batch_is_stated(cls: type[nn.Module]) -> None:
    assert WIDTH == 12
    net = around(cls())

    def unequal(chart: ChannelMap) -> Keep:
        keep = np.ones(chart.n_labels, dtype=bool)
        for axis, count in ((1, 3), (2, 5)):
            keep[chart.labels["1.experts"][axis][:count]] = False  # type: ignore[index]
        return keep

    settled = run_trial(net, trace(net, EXAMPLE), unequal, [EXAMPLE])
    plan = Plan(settled.channel_map, settled.keep)
    assert [plan.kept("1.experts", axis).size for axis in (1, 2)] == [9, 7]
    assert parity(net, plan, (torch.randn(7, 5, 6),)) <= TOLERANCE
    compact(net, plan)(torch.randn(1, 5, 6))


def test_a_compact_model_can_be_copied_trained_exported_and_pruned_again() -> None:
    net = around(Quotient())
    small = compact(net, uneven_plan(net))
    twin = copy.deepcopy(small)
    twin(*EXAMPLE).sum().backward()
    exported = torch.export.export(small, EXAMPLE).module()
    assert torch.allclose(exported(*EXAMPLE), small(*EXAMPLE), rtol=1e-5)
    again = settled_plan(small, EXAMPLE, seed=1, share=0.5)
    assert again.kept_indices
    assert parity(small, again, EXAMPLE) <= TOLERANCE


def test_an_error_in_a_method_still_names_its_own_line() -> None:
    net = around(Quotient())
    small: Any = compact(net, uneven_plan(net))
    code = type(small[1]).forward.__code__
    assert (code.co_filename, code.co_firstlineno) == (
        Quotient.forward.__code__.co_filename,
        Quotient.forward.__code__.co_firstlineno,
    )


class Spread(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.reshape(-1, x.shape[1] // len(
            x.shape
        ) * 3, 1)  # fmt: skip
        return y.flatten(1)


def test_an_expression_over_several_lines_keeps_the_others_where_they_are() -> None:
    found = definition(Spread.forward.__code__)
    assert found is not None
    expression = next(node for node in ast.walk(found[0]) if isinstance(node, ast.BinOp))
    place = place_of(Spread.forward.__code__, expression)
    module = Spread()
    set_expressions(module, {str(place): 4})
    lines, first = inspect.getsourcelines(type(module).forward)
    before, there = inspect.getsourcelines(Spread.forward)
    assert (first, len(lines), lines[-1]) == (there, len(before), before[-1])
    assert lines[1].endswith("x.reshape(-1, self._size_forward_1_26\\\n")
    assert module(torch.ones(2, 8)).shape == (4, 4)


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls not in (UnequalParts, Chunks)])
def test_the_source_that_python_shows_is_that_of_the_method_as_it_runs(cls: Any) -> None:
    net = around(cls())
    plans = (settled_plan(net, EXAMPLE, seed, 0.4) for seed in range(20))
    small: Any = compact(
        net, next(plan for plan in plans if any(CodePlace.named(s.name) for s in plan.channel_map.sizes))
    )
    recompiled = [module for module in small.modules() if original_of(type(module)) is not type(module)]
    assert recompiled
    for module in recompiled:
        changed = {name: method for name, method in vars(type(module)).items() if inspect.isfunction(method)}
        assert changed
        for name, method in changed.items():
            lines, first = inspect.getsourcelines(method)
            old = inspect.unwrap(getattr(original_of(type(module)), name))
            before = inspect.getsource(old)
            assert (first, len(lines)) == (old.__code__.co_firstlineno, len(before.splitlines()))
            sizes = [
                size
                for size in vars(module)
                if size.startswith((f"_size_{name}_", f"_order_{name}_", f"_part_{name}_"))
            ]
            assert sizes
            assert all(size in "".join(lines) and size not in before for size in sizes)
            shown = ast.parse(textwrap.dedent("".join(lines))).body[0]
            assert isinstance(shown, ast.FunctionDef)
            assert shown.name == name


def test_a_size_that_is_none_or_an_expression_that_is_not_there_is_refused(tmp_path: Path) -> None:
    module = Quotient()
    net = around(Quotient())
    name = next(size.name for size in uneven_plan(net).channel_map.sizes if CodePlace.named(size.name))
    for value in (-1, 2.0, "2", True, None, [1, "2"]):
        with pytest.raises(ValueError, match="is no size"):
            set_expressions(module, {name: value})
    place = CodePlace.named(name)
    assert place is not None
    moved = CodePlace(place.function, place.line + 1, place.column, place.text)
    other = CodePlace(place.function, place.line, place.column, "len(x)")
    for wrong in (moved, other, CodePlace("backward", 0, 0, "x"), CodePlace("num_heads", 0, 0, "x")):
        with pytest.raises(KeyError):
            set_expressions(module, {str(wrong): 2})
    assert type(module) is Quotient


def test_a_folder_whose_models_source_changed_is_refused(tmp_path: Path) -> None:
    net = around(Quotient())
    plan = uneven_plan(net)
    save(compact(net, plan), tmp_path / "small", plan)
    manifest = tmp_path / "small" / "prunekit.json"
    changed = json.loads(manifest.read_text().replace("width // self.num_heads", "width // self.heads"))
    manifest.write_text(json.dumps(with_checksum(changed)))
    with pytest.raises(ArtifactError, match="does not fit the model"):
        load(tmp_path / "small", model=around(Quotient()))


@pytest.mark.parametrize(
    ("text", "axis", "axes", "found"),
    [
        ("x[a:b]", 0, 3, "a:b"),
        ("x[:, a:]", 1, 3, "a:"),
        ("x[:, a:]", 0, 3, ":"),
        ("x[..., :b]", 2, 3, ":b"),
        ("x[..., :b, :]", 1, 3, ":b"),
        ("x[0, a:b]", 0, 2, "a:b"),
        ("x[None, a:b]", 1, 3, "a:b"),
        ("x[..., a:b, 0]", 1, 3, "a:b"),
        ("x[index, a:b]", 1, 3, None),
        ("x[0]", 0, 3, None),
        ("f(a)", 0, 3, None),
    ],
)
def test_which_slice_is_of_an_axis(text: str, axis: int, axes: int, found: str | None) -> None:
    """Axes as they are when the slice is taken: earlier items have been applied."""
    bounds = slice_of_axis(ast.parse(text, mode="eval").body, axis, axes)
    assert (None if bounds is None else ast.unparse(bounds)) == found


def test_names_of_places_are_read_back() -> None:
    place = CodePlace("forward", 3, 14, "C // self.num_heads")
    assert CodePlace.named(str(place)) == place
    assert CodePlace.named("num_heads") is None


def test_a_width_read_off_a_part_is_set_there() -> None:
    net = around(ReadOffAPart())
    plan = settled_plan(net, EXAMPLE, share=0.7)
    assert plan.kept("1.a.weight", 0).size < 8  # with the dense width the module would raise
    small: Any = compact(net, plan)
    assert small[1].cell.width == small[1].cell.turn.out_features < 8
    assert net.get_submodule("1.cell").width == 8


@pytest.mark.parametrize(("method", "read"), [
    ("return x.view(self.width)", "width"),
    ("return x.view(self.part.width)", "part.width"),
    ("n = self.part.width\n  return x.view(n)", "part.width"),
    ("m = self.width\n  n = m\n  return x.view(n)", "width"),
    ("n = self.width\n  n += 1\n  return x.view(n)", None),
    ("n, m = self.width, 2\n  return x.view(n)", None),
    ("return x.view(self.width + 1)", None),
    ("return x.view(x.width)", None),
    ("return x.view(x)", None),
    ("return x.view(self)", None),
])  # fmt: skip
def test_which_attribute_is_read(method: str, read: str | None) -> None:
    run = class_in(f"class Reading:\n def run(self, x):\n  {method}\n", "Reading", "reading.py").run.__code__
    found = definition(run)
    assert found is not None
    call: Any = found[0].body[-1]
    assert attribute_read(run, call.value.args[0]) == read


def class_in(source: str, name: str, file: str) -> Any:
    """A class from source that stands in a file, as far as Python's own tools can tell."""
    namespace: dict[str, Any] = {"nn": nn}
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), namespace)
    return namespace[name]


FIXED = """class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 8), nn.Linear(8, 12)
    def forward(self, x):
        return self.b(self.a(x).view(len(x), -1, 8))
"""


def test_a_package_whose_name_begins_like_torchs_is_a_models_own() -> None:
    net = around(class_in(FIXED, "Fixed", f"{Path(torch.__file__).parent}vision_of_ours/fixed.py")())
    plan = settled_plan(net, EXAMPLE, share=0.5)
    assert plan.kept("1.a.weight", 0).size < 8
    assert parity(net, plan, EXAMPLE) <= TOLERANCE


def test_a_module_that_was_written_nowhere_is_locked_and_said() -> None:
    namespace: dict[str, Any] = {"nn": nn}
    exec(FIXED.replace("8", "6"), namespace)  # as in a session whose lines are kept in no file
    net = around(namespace["Fixed"]())
    plan = settled_plan(net, EXAMPLE, share=0.5)
    assert plan.kept("1.a.weight", 0).size == 6
    assert any(lock.module == "1" and "invalid for input of size" in lock.reason for lock in plan.channel_map.locks)


class Distances(nn.Module):
    """Attention to a table of positions, which one method takes apart into heads as it does tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 3
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.table = nn.Embedding(9, WIDTH)

    def apart(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        x = x.view((*x.size()[:-1], heads, -1))
        return x.permute(0, 2, 1, 3).contiguous().view(-1, x.size(1), x.size(-1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, v = self.apart(self.q(x), self.heads), self.apart(self.v(x), self.heads)
        table = self.apart(self.k(self.table.weight.unsqueeze(0)), self.heads).repeat(x.size(0), 1, 1)
        steps = torch.arange(x.size(1))
        places = (steps[:, None] - steps + 4).expand(q.size(0), -1, -1)
        mixed = torch.bmm(torch.bmm(q, table.transpose(1, 2)).gather(2, places).softmax(-1), v)
        mixed = mixed.view(-1, self.heads, mixed.size(-2), mixed.size(-1)).permute(0, 2, 1, 3).contiguous()
        return self.o(mixed.view((*mixed.size()[:-2], -1)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(4))
def test_an_axis_with_labels_in_one_call_and_none_in_another_has_its_own_size_in_each(seed: int) -> None:
    net = around(Distances(), Distances())
    plan = settled_plan(net, EXAMPLE, seed, 0.5)
    assert parity(net, plan, EXAMPLE) <= TOLERANCE
    assert parity(net, plan, (torch.randn(3, 4, 6),)) <= TOLERANCE
    assert not any("x.size(1)" in size.name for size in plan.channel_map.sizes)
