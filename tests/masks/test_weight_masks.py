"""Weight masks: pruned entries are exactly zero after every step and before every forward, and nothing else changes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from small_nets import SmallNet, assert_pruned_are_zero, handmade_plan, pruned_entries, random_plan, randomized, step
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel
from torchvision import models

from prunekit.channels.trace import trace
from prunekit.errors import ModelError, PlanError, UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.hooks.step_hooks import inner_optimizer
from prunekit.masks.gradient_masks import GradientMasks
from prunekit.masks.weight_masks import WeightMasks, WriteDetector
from prunekit.planning.plan import Plan

OPTIMIZERS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (Adam, {"lr": 0.05, "weight_decay": 0.1}),
    (AdamW, {"lr": 0.05, "weight_decay": 0.5}),
]
KINDS: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]


def warmed(model: nn.Module, optimizer: Optimizer, steps: int = 2) -> None:
    """Dense steps first, so that momentum and second moments of what will be pruned are not zero."""
    for _ in range(steps):
        step(model, optimizer)


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS)
@pytest.mark.parametrize("how", KINDS)
def test_zero_after_every_step(kind: type[Optimizer], settings: dict[str, Any], how: dict[str, bool]) -> None:
    model, plan = randomized(SmallNet()), handmade_plan(2, 5, 6)
    optimizer = kind(model.parameters(), **settings, **how)
    warmed(model, optimizer)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    with WeightMasks(model, plan, optimizer):
        assert_pruned_are_zero(model, plan)
        for _ in range(3):
            step(model, optimizer)
            assert_pruned_are_zero(model, plan)
    assert_pruned_are_zero(model, plan)
    moved = [not torch.equal(kept[name], p) for name, p in model.named_parameters()]
    assert all(moved)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda parameters: SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=0.1, foreach=True),
        lambda parameters: AdamW(parameters, lr=1e-3, weight_decay=0.5, fused=True),
    ],
)
def test_zero_after_every_step_of_a_real_resnet(optimizer_of: Callable[[Any], Optimizer]) -> None:
    torch.manual_seed(0)
    block = models.resnet.BasicBlock
    model = models.ResNet(block, [1, 1, 1, 1], num_classes=5, width_per_group=64)
    plan = random_plan(trace(model, (torch.randn(1, 3, 32, 32),)))
    optimizer = optimizer_of(model.parameters())
    images = torch.randn(4, 3, 32, 32)
    model(images).square().sum().backward()
    optimizer.step()
    with WeightMasks(model, plan, optimizer), GradientMasks(model, plan):
        for _ in range(2):
            optimizer.zero_grad()
            model(images).square().sum().backward()
            optimizer.step()
            assert_pruned_are_zero(model, plan)
    assert count_hooks(model) == 0


def test_a_mask_without_the_optimizer_would_not_hold() -> None:
    model, plan = randomized(SmallNet()), handmade_plan(2, 5)
    optimizer = AdamW(model.parameters(), lr=0.1)
    warmed(model, optimizer)
    with WeightMasks(model, plan):
        step(model, optimizer)
        assert any((values != 0).any() for values in pruned_entries(model, plan).values())
        model(torch.randn(2, 3, 8, 8))
        assert_pruned_are_zero(model, plan)


def test_writes_that_move_no_version_counter_are_undone_before_the_forward() -> None:
    model, plan = randomized(SmallNet()), handmade_plan(3)
    optimizer = SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 3, 8, 8)
    with WeightMasks(model, plan, optimizer), torch.inference_mode():
        before = model(x)
        for name, parameter in model.named_parameters():
            mask = plan.mask(name)
            if mask is not None:
                parameter.data.masked_fill_(~mask, torch.nan)
        assert torch.equal(model(x), before)
    assert_pruned_are_zero(model, plan)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_one_pruned_entry_written_by_any_counted_operation_is_undone(dtype: torch.dtype) -> None:
    model, plan = randomized(SmallNet()).to(dtype).eval(), handmade_plan(3)
    with WeightMasks(model, plan), torch.no_grad():
        for name, parameter in model.named_parameters():
            mask = plan.mask(name)
            if mask is not None:
                for index in (~mask.expand(parameter.shape)).nonzero().tolist():
                    parameter[tuple(index)] = 1.0
                    model(torch.randn(1, 3, 8, 8, dtype=dtype))
                    assert parameter[tuple(index)] == 0, (name, index)


def test_a_forward_writes_nothing_where_nothing_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = randomized(SmallNet()), handmade_plan(3)
    written: list[tuple[int, ...]] = []
    real = WriteDetector.zero_
    monkeypatch.setattr(WriteDetector, "zero_", lambda self, tensor: (written.append(tensor.shape), real(self, tensor)))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    with WeightMasks(model, plan, optimizer):
        on_enter = len(written)
        for _ in range(2):
            model(torch.randn(2, 3, 8, 8))  # in train mode: the norms write to their statistics
        assert len(written) == on_enter
        step(model, optimizer)
        assert len(written) == 2 * on_enter
        model.conv1.weight.data.add_(1.0)  # type: ignore[union-attr, operator]
        model(torch.randn(2, 3, 8, 8))
        assert len(written) == 2 * on_enter + 2  # the weight and the bias of that module


def test_load_state_dict_cannot_bring_pruned_weights_back() -> None:
    for assign in (False, True):
        model, plan = randomized(SmallNet()), handmade_plan(1, 8)
        dense = copy.deepcopy(model.state_dict())
        with WeightMasks(model, plan):
            model.load_state_dict(dense, assign=assign)
            assert_pruned_are_zero(model, plan)
            model.conv2.load_state_dict({"weight": torch.ones(8, 8, 3, 3)})  # type: ignore[union-attr]
            assert_pruned_are_zero(model, plan)


def test_kept_entries_and_the_variance_are_not_touched() -> None:
    model, plan = randomized(SmallNet()), handmade_plan(4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with WeightMasks(model, plan):
        pass
    for name, tensor in model.state_dict().items():
        mask = plan.mask(name)
        if mask is None or name.endswith("running_var"):
            assert torch.equal(tensor, before[name]), name
        else:
            assert torch.equal(tensor, before[name] * mask), name


def test_a_pruned_channel_is_as_good_as_gone() -> None:
    model, plan = randomized(SmallNet()).eval(), handmade_plan(2, 7)
    seen: dict[str, torch.Tensor] = {}
    model.bn1.register_forward_hook(lambda m, a, out: seen.update(bn1=out.clone()))  # type: ignore[union-attr]
    with WeightMasks(model, plan):
        model(torch.randn(2, 3, 8, 8))
    assert (seen["bn1"][:, [1, 6]] == 0).all()
    assert (seen["bn1"][:, [0, 2, 3, 4, 5, 7]] != 0).any()


@pytest.mark.parametrize("fails", [False, True])
def test_restore_brings_the_pruned_values_back(fails: bool) -> None:
    model, plan = randomized(SmallNet()), handmade_plan(2, 5)
    dense = {name: values.clone() for name, values in pruned_entries(model, plan).items()}
    optimizer = SGD(model.parameters(), lr=0.1)
    try:
        with WeightMasks(model, plan, optimizer, restore=True):
            step(model, optimizer)
            trained = model.fc.bias.detach().clone()  # type: ignore[union-attr, operator]
            assert_pruned_are_zero(model, plan)
            if fails:
                raise KeyError
    except KeyError:
        pass
    for name, values in pruned_entries(model, plan).items():
        assert torch.equal(values, dense[name]), name
    assert torch.equal(model.fc.bias, trained)  # type: ignore[union-attr, arg-type]


def test_restore_when_entering_fails() -> None:
    model, plan = randomized(SmallNet()), handmade_plan(2, 5)
    before = copy.deepcopy(model.state_dict())
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ModelError, match="compiled"), WeightMasks(compiled, _prefixed(plan), restore=True):  # type: ignore[arg-type]
        pass
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def _prefixed(plan: Any) -> Any:
    """A plan under the names that a compiled model gives its parameters."""
    chart = plan.channel_map
    rename = lambda mapping: {f"_orig_mod.{name}": value for name, value in mapping.items()}  # noqa: E731
    return type(plan)(
        type(chart)(
            **{**chart.__dict__, "labels": rename(chart.labels), "shapes": rename(chart.shapes)},
        ),
        plan.keep,
    )


def test_masks_nest_and_each_removes_its_own() -> None:
    model, outer, inner = randomized(SmallNet()), handmade_plan(1), handmade_plan(1, 2, 3)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with WeightMasks(model, outer, optimizer):
        hooks = count_hooks(model)
        with WeightMasks(model, inner, optimizer, restore=True):
            step(model, optimizer)
            assert_pruned_are_zero(model, inner)
        assert count_hooks(model) == hooks
        assert any((values != 0).any() for values in pruned_entries(model, inner).values())
        assert_pruned_are_zero(model, outer)
        step(model, optimizer)
        assert_pruned_are_zero(model, outer)
    assert count_hooks(model) == 0
    assert not optimizer._optimizer_step_post_hooks


def test_nothing_stays_after_an_exception() -> None:
    model, plan = randomized(SmallNet()), handmade_plan(1)
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(KeyError), WeightMasks(model, plan, optimizer):
        raise KeyError
    assert count_hooks(model) == 0
    assert not optimizer._optimizer_step_post_hooks
    randomized(model)
    step(model, optimizer)
    assert any((values != 0).any() for values in pruned_entries(model, plan).values())


def test_a_copy_starts_pruned_and_carries_no_hook_that_acts() -> None:
    model, plan = randomized(SmallNet()), handmade_plan(2, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 3, 8, 8)
    with WeightMasks(model, plan, optimizer):
        average = AveragedModel(model)
        for _ in range(2):
            step(model, optimizer)
            average.update_parameters(model)
        assert_pruned_are_zero(average.module, plan)
        clone = copy.deepcopy(model)
        assert_pruned_are_zero(clone, plan)
        assert count_hooks(clone) == 0
        randomized(clone)
        clone(x)
    assert any((values != 0).any() for values in pruned_entries(clone, plan).values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_also_when_cast_inside(dtype: torch.dtype) -> None:
    model, plan = randomized(SmallNet()), handmade_plan(2, 3)
    with WeightMasks(model, plan, restore=True):
        model.to(dtype)
        randomized(model)
        model.eval()(torch.randn(2, 3, 8, 8, dtype=dtype))
        assert_pruned_are_zero(model, plan)
    assert model.fc.weight.dtype == dtype  # type: ignore[union-attr]


def test_element_masks_are_masked_too() -> None:
    model = randomized(SmallNet())
    plan = handmade_plan(2)
    keep = torch.rand(8, 8, 3, 3, generator=torch.Generator().manual_seed(0)) > 0.5
    plan = type(plan)(plan.channel_map, plan.keep, element_masks={"conv2.weight": keep})
    with WeightMasks(model, plan):
        weight = model.conv2.weight.detach()  # type: ignore[union-attr, operator]
        assert (weight[~keep] == 0).all()
        assert_pruned_are_zero(model, plan)


def test_tied_weights_are_guarded_at_both_owners() -> None:
    model, plan = randomized(SmallNet()), handmade_plan(2)
    model.twice.weight = nn.Parameter(torch.ones(8, 8, 1, 1))  # type: ignore[union-attr]
    alias = nn.Conv2d(8, 8, 1, bias=False)
    alias.weight = model.twice.weight  # type: ignore[union-attr, assignment]
    model.alias = alias
    with WeightMasks(model, plan):
        alias.weight.data.fill_(1.0)
        alias(torch.randn(1, 8, 2, 2))
        assert alias.weight[1].abs().sum() == 0
        assert alias.weight[0, 0] == 1


def test_a_plan_for_another_model_is_refused() -> None:
    plan = handmade_plan(2)
    model = SmallNet()
    model.conv1 = nn.Conv2d(3, 6, 3)
    with pytest.raises(
        PlanError, match=r"'conv1.weight' of shape \(6, 3, 3, 3\) does not fit the plan, which has \(8, 3"
    ):
        WeightMasks(model, plan)
    with pytest.raises(
        PlanError, match=r"'weight' of shape \(2, 2\) does not fit the plan, which has none of that name"
    ):
        WeightMasks(nn.Linear(2, 2), plan)


def test_wrapped_optimizers() -> None:
    class Wrapper(Optimizer):
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer

    model, plan = randomized(SmallNet()), handmade_plan(2)
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
    warmed(model, inner)
    assert inner_optimizer(Wrapper(Wrapper(inner))) is inner
    with WeightMasks(model, plan, Wrapper(inner)):
        step(model, inner)
        assert_pruned_are_zero(model, plan)


def test_accelerate_wraps_the_optimizer_and_it_still_holds() -> None:
    model, plan = randomized(SmallNet()), handmade_plan(2, 5, 6)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    warmed(model, optimizer)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        wrapped = accelerate.Accelerator(cpu=True).prepare(optimizer)
        assert wrapped is not optimizer
        assert inner_optimizer(wrapped) is optimizer
        with WeightMasks(model, plan, wrapped):
            for _ in range(3):
                step(model, wrapped)
                assert_pruned_are_zero(model, plan)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
    assert not any(torch.equal(old, new) for old, new in zip(kept, model.parameters(), strict=True))


@pytest.mark.slow
def test_a_model_compiled_inside_is_masked() -> None:
    model, plan = randomized(SmallNet()).eval(), handmade_plan(2, 3)
    x = torch.randn(2, 3, 8, 8)
    with WeightMasks(model, plan), torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(x), expected)
        for parameter, mask in ((p, plan.mask(n)) for n, p in itertools.islice(model.named_parameters(), 3)):
            assert mask is not None
            parameter.data.masked_fill_(~mask, 7.0)
        torch.testing.assert_close(compiled(x), expected)
    torch._dynamo.reset()


def test_attentions_output_projection_is_masked_before_attention_reads_it() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2))
    keep = torch.rand(4, 4) > 0.5
    chart = handmade_plan().channel_map
    names = {name: tuple(p.shape) for name, p in model.named_parameters()}
    chart = type(chart)({n: (None,) * len(s) for n, s in names.items()}, names, 1, (), (), {}, (), None)
    plan = Plan(chart, np.array([True]), element_masks={"0.out_proj.weight": keep})
    x = torch.randn(3, 2, 4)
    with WeightMasks(model, plan):
        expected = model[0](x, x, x)[0]
        model[0].out_proj.weight.data.fill_(7.0)
        model[0](x, x, x)
        assert (model[0].out_proj.weight[~keep] == 0).all()
        assert (model[0].out_proj.weight[keep] == 7).all()
    assert expected.shape == x.shape


def test_a_parametrization_that_comes_later_is_refused() -> None:
    model, plan = randomized(SmallNet()), handmade_plan(2, 5)
    with WeightMasks(model, plan):
        nn.utils.parametrizations.weight_norm(model.conv1)  # type: ignore[arg-type]
        with pytest.raises(ModelError, match=r"conv1\.weight is no longer a parameter"):
            model(torch.randn(2, 3, 8, 8))


def test_transforms_of_torch_func_are_refused_in_plain_words() -> None:
    model, plan, x = randomized(SmallNet()).eval(), handmade_plan(2, 5), torch.randn(2, 3, 8, 8)

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with WeightMasks(model, plan), pytest.raises(ModelError, match=r"torch\.func puts in their place"):
        torch.func.grad(loss)(values)
    assert torch.func.grad(loss)(values).keys() == values.keys()


def test_an_optimizer_of_another_model_is_refused() -> None:
    model = SmallNet()
    plan = random_plan(trace(model, (torch.zeros(1, 3, 16, 16),)))
    with pytest.raises(UsageError, match="expected one of this SmallNet's parameters, but this SGD has none of them"):
        WeightMasks(model, plan, SGD(SmallNet().parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"optimizer: expected a torch.optim.Optimizer, .* got str"):
        WeightMasks(model, plan, "sgd")  # type: ignore[arg-type]
