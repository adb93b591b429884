"""Owners of hooks: registered on enter, removed on exit, and warnings where hooks never run."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from prunekit.errors import ModelError
from prunekit.hooks.hook import HookWarning, count_hooks, recomputing, refuse_compiled
from prunekit.hooks.owner import HookOwner


class Counting(HookOwner):
    def __init__(self, model: nn.Module, *, fails: bool = False) -> None:
        super().__init__()
        self.model, self.fails, self.calls = model, fails, 0

    def register(self) -> None:
        def hook(*_: Any) -> None:
            self.calls += 1

        self.own(self.model.register_forward_hook(hook))
        if self.fails:
            raise ValueError("half way")


def test_hooks_live_inside_the_with_only() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with Counting(model) as owner:
        assert owner.active
        model(x)
    model(x)
    assert (owner.calls, owner.active, count_hooks(model)) == (1, False, 0)


def test_an_owner_with_nothing_but_hooks_needs_no_class() -> None:
    model, calls = nn.Linear(2, 2), list[int]()
    owner = HookOwner(lambda hooks: hooks.own_forward_pre(model, lambda *_: calls.append(1)))
    for _ in range(2):
        with owner:
            model(torch.ones(1, 2))
    assert (len(calls), count_hooks(model)) == (2, 0)


def test_an_error_inside_or_while_registering_leaves_no_hook() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(KeyError), Counting(model):
        raise KeyError
    with pytest.raises(ValueError, match="half way"), Counting(model, fails=True):
        pass
    assert count_hooks(model) == 0


def test_an_owner_registers_once_at_a_time_and_again_later() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    owner = Counting(model)
    with owner, pytest.raises(RuntimeError, match="already active"), owner:
        pass
    assert count_hooks(model) == 0
    with owner:
        model(x)
    assert owner.calls == 1


def test_owners_nest_and_each_removes_its_own() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with Counting(model) as outer:
        with Counting(model) as inner:
            model(x)
        inner.remove()
        model(x)
    assert (outer.calls, inner.calls) == (2, 1)


def test_count_hooks_sees_every_kind() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    parameter = model[0].weight
    handles = [
        model[0].register_forward_hook(lambda *_: None),
        model[0].register_forward_pre_hook(lambda *_: None),
        model.register_full_backward_hook(lambda *_: None),
        model.register_full_backward_pre_hook(lambda *_: None),
        model[0].register_load_state_dict_post_hook(lambda *_: None),
        parameter.register_hook(lambda g: g),
        parameter.register_post_accumulate_grad_hook(lambda p: None),
    ]
    assert count_hooks(model) == len(handles)
    for handle in handles:
        handle.remove()
    assert count_hooks(model) == 0


class Recorder(HookOwner):
    """Notes the order in which its hooks run."""

    def __init__(self, module: nn.Module, name: str, order: list[str]) -> None:
        super().__init__()
        self.module, self.name, self.order = module, name, order

    def note(self, what: str) -> None:
        self.order.append(f"{what} {self.name}")

    def register(self) -> None:
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        self.own_forward_pre(self.module, lambda *_: self.note("forward-pre"))
        self.own_forward(self.module, lambda *_: self.note("forward"))
        self.own_output_gradients(self.module, lambda *_: self.note("grad_output"))
        self.own_input_gradients(self.module, lambda *_: self.note("grad_input"))
        self.own_tensor_gradient(weight, lambda *_: self.note("tensor"))
        self.own_parameter_gradient(weight, lambda *_: self.note("parameter"))


def test_every_kind_runs_in_the_order_of_the_owners() -> None:
    module, order = nn.Linear(3, 2), list[str]()
    with Recorder(module, "a", order), Recorder(module, "b", order):
        module(torch.randn(4, 3, requires_grad=True)).sum().backward()
    kinds = ("forward-pre", "forward", "grad_output", "grad_input", "tensor", "parameter")
    for kind in kinds:
        assert [entry for entry in order if entry.startswith(f"{kind} ")] == [f"{kind} a", f"{kind} b"]
    assert len(order) == 2 * len(kinds)
    assert count_hooks(module) == 0


class Changing(HookOwner):
    """Adds to what passes a module, with one kind of hook."""

    def __init__(self, module: nn.Module, how: str) -> None:
        super().__init__()
        self.module, self.how = module, how

    def register(self) -> None:
        if self.how == "input":
            self.own_forward_pre(self.module, lambda module, args, named: ((args[0] + 1, *args[1:]), named))
        else:
            self.own_forward(self.module, lambda module, args, named, result: result + 1)


@pytest.mark.parametrize(("how", "expected"), [("input", 8.0), ("output", 7.0)])
def test_inputs_and_results_may_be_changed(how: str, expected: float) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, factor: float) -> Tensor:
            return x * factor

    with Changing(module := Scaled(), how):
        assert module(torch.tensor(3.0), factor=2.0).item() == expected
    assert module(torch.tensor(3.0), factor=2.0).item() == 6.0


def test_a_copy_carries_no_hook_that_acts() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    order: list[str] = []
    with Recorder(model[0], "a", order):  # type: ignore[arg-type]
        assert count_hooks(model) > 0
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert count_hooks(copied) == 0
            copied(torch.randn(1, 3, requires_grad=True)).sum().backward()
        assert order == []
        assert b"prunekit" not in pickle.dumps(model), "a file of it is loaded where prunekit is not installed"
        model(torch.randn(1, 3))
        assert order == ["forward-pre a", "forward a"]


def test_hooks_on_what_never_runs_are_warned_of() -> None:
    attention = nn.MultiheadAttention(4, 2)
    with pytest.warns(HookWarning, match=r"out_proj never run"), Changing(attention.out_proj, "output"):
        pass
    compiled = nn.Linear(2, 2)
    compiled.compile(backend="eager")
    with pytest.warns(HookWarning, match=r"Linear is compiled, .* ignored"), Changing(compiled, "output"):
        pass


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_second_forward_of_checkpointing_can_be_told(reentrant: bool) -> None:
    told: list[bool] = []

    class Counter(HookOwner):
        def register(self) -> None:
            self.own_forward(module[0], lambda *_: told.append(recomputing()))  # the last one may be left out

    module, x = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid()), torch.randn(3, 2, requires_grad=True)
    with Counter():
        checkpoint(module, x, use_reentrant=reentrant).sum().backward()
    assert told == [False, True]


def test_attention_with_hooks_takes_no_fast_path_around_them() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, seen = torch.randn(2, 5, 8), list[str]()
    with torch.no_grad(), Recorder(model.layers[1].linear1, "a", seen):  # type: ignore[arg-type, union-attr]
        hooked = model(x)
    assert seen == ["forward-pre a", "forward a"]
    with torch.no_grad():
        torch.testing.assert_close(hooked, model(x))


def test_compiled_models_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    refuse_compiled(model, "Masks")
    with pytest.raises(ModelError, match="Masks: the model is compiled"):
        refuse_compiled(torch.compile(model, backend="eager"), "Masks")  # type: ignore[arg-type]
    model[0].compile(backend="eager")
    with pytest.raises(ModelError, match="Masks: 0 is compiled"):
        refuse_compiled(model, "Masks")
