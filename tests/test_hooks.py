from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prunekit.errors import ModelError
from prunekit.hooks import HookOwner, count_hooks, refuse_compiled


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


class OutputGradient(HookOwner):
    def __init__(self, module: nn.Module, *, rewritten: bool, factor: float = 2.0) -> None:
        super().__init__()
        self.module, self.rewritten, self.factor = module, rewritten, factor
        self.seen: list[Tensor] = []

    def register(self) -> None:
        def change(gradient: Tensor) -> Tensor:
            self.seen.append(gradient.clone())
            return gradient * self.factor

        self.own_output_gradient(self.module, change, rewritten=self.rewritten)


def test_hooks_live_inside_the_with_only() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with Counting(model) as owner:
        assert owner.active
        model(x)
    model(x)
    assert (owner.calls, owner.active, count_hooks(model)) == (1, False, 0)


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


@pytest.mark.parametrize("rewritten", [False, True])
def test_output_gradient_is_seen_and_changed(rewritten: bool) -> None:
    first, second = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
    x, pull = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), torch.randn(5, 2, dtype=torch.float64)
    with OutputGradient(first, rewritten=rewritten) as owner:
        (second(first(x)) * pull).sum().backward()
    torch.testing.assert_close(owner.seen[0], pull @ second.weight.detach())
    assert first.bias.grad is not None
    torch.testing.assert_close(first.bias.grad, 2 * (pull @ second.weight.detach()).sum(0))
    assert count_hooks(first) == 0


def test_output_written_to_in_place_needs_the_guard() -> None:
    def run(rewritten: bool) -> Tensor:
        torch.manual_seed(0)
        norm, relu = nn.BatchNorm1d(4), nn.ReLU(inplace=True)
        x = torch.randn(6, 4, requires_grad=True)
        with OutputGradient(norm, rewritten=rewritten) as owner:
            relu(norm(x)).sum().backward()
        return owner.seen[0]

    with pytest.raises(RuntimeError, match="modified inplace"):
        run(rewritten=False)
    assert set(run(rewritten=True).unique().tolist()) == {0.0, 1.0}  # the ReLU's gradient: it ran after the norm


def test_a_module_that_works_in_place_is_guarded_unasked() -> None:
    relu, x = nn.ReLU(inplace=True), torch.randn(6, 4, requires_grad=True)
    with OutputGradient(relu, rewritten=False) as owner:
        relu(x * 1).sum().backward()
    assert len(owner.seen) == 1


@pytest.mark.parametrize("rewritten", [False, True])
def test_a_graph_recorded_inside_is_left_alone_outside(rewritten: bool) -> None:
    module, x = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    with OutputGradient(module, rewritten=rewritten) as owner:
        loss = module(x).sum()
    loss.backward()
    assert module.bias.grad is not None
    assert module.bias.grad.tolist() == [4.0, 4.0]
    assert owner.seen == []


def test_only_the_first_output_of_a_tuple_is_changed() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 1, x * 1

    for rewritten in (False, True):
        x = torch.ones(2, requires_grad=True)
        module = Pair()
        with OutputGradient(module, rewritten=rewritten, factor=10.0):
            one, two = module(x)
            (one + two).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [11.0, 11.0]


def test_compiled_models_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    refuse_compiled(model, "Masks")
    with pytest.raises(ModelError, match="Masks: the model is compiled"):
        refuse_compiled(torch.compile(model, backend="eager"), "Masks")  # type: ignore[arg-type]
    model[0].compile(backend="eager")
    with pytest.raises(ModelError, match="Masks: 0 is compiled"):
        refuse_compiled(model, "Masks")
