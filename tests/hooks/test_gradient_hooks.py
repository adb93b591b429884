"""Gradient hooks on inputs and results that are overwritten in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from equivalence import assert_only_rounded
from in_place import CNN_FAMILIES, out_of_place
from torch import Tensor, nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.video.resnet import BasicBlock, Conv2Plus1D, R2Plus1dStem, VideoResNet

from prunekit.hooks.hook import count_hooks
from prunekit.hooks.owner import HookOwner
from prunekit.utils.context import paused_garbage_collection

OTHERS: dict[str, Callable[[], nn.Module]] = {
    "convnext": lambda: models.ConvNeXt([CNBlockConfig(32, 64, 1), CNBlockConfig(64, None, 1)], 0.1, num_classes=3),
    "swin": lambda: models.SwinTransformer([4, 4], 24, [2, 2], [2, 4], [7, 7], num_classes=3),
    "vit": lambda: models.VisionTransformer(64, 16, 2, 4, 32, 64, num_classes=3),
    "lraspp": lambda: models.get_model("lraspp_mobilenet_v3_large", num_classes=3, weights_backbone=None),
    "r2plus1d": lambda: VideoResNet(BasicBlock, [Conv2Plus1D] * 4, [1, 1, 1, 1], R2Plus1dStem, num_classes=3),
}
"""Kinds of network that are no plain classifiers by convolutions."""

Gradients = dict[tuple[str, str, int], list[Tensor]]


class Every(HookOwner):
    """Records the gradients of every input and every result of every module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.seen: Gradients = {}

    def register(self) -> None:
        for path, module in self.model.named_modules():
            if not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
                self._watch(path, module)

    def _watch(self, path: str, module: nn.Module) -> None:
        self.own_output_gradients(module, lambda gradient, index: self._note(path, "output", index, gradient))
        self.own_input_gradients(module, lambda gradient, index: self._note(path, "input", index, gradient))

    def _note(self, path: str, side: str, index: int, gradient: Tensor) -> None:
        self.seen.setdefault((path, side, index), []).append(gradient.clone())


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = OTHERS[name]() if name in OTHERS else models.get_model(name, weights=None, num_classes=3)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5  # the in-place kernel rounds otherwise; a half is exact in both
    if name == "vgg11_bn":  # the family's own features; its classifier alone has 100 million weights
        model.avgpool = nn.AdaptiveAvgPool2d(1)
        model.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.5, inplace=True), nn.LazyLinear(3))
    return model.double()


def image(name: str) -> Tensor:
    return torch.randn((1, 3, 4, 32, 32) if name == "r2plus1d" else (2, 3, 64, 64), dtype=torch.float64)


def numbered(seen: Gradients) -> dict[tuple[str, str, int, int], Tensor]:
    """Return all gradients, each with the number of its call."""
    return {(*key, number): one for key, gradients in seen.items() for number, one in enumerate(gradients)}


def run(model: nn.Module, x: Tensor, *, in_place: bool) -> tuple[Gradients, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(1)
    with nullcontext() if in_place else out_of_place(model), Every(model) as every:
        output = model(x)
        output = output["out"] if isinstance(output, dict) else output
        output.square().sum().backward()
    return every.seen, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CNN_FAMILIES, *OTHERS])
def test_every_module_gives_the_gradients_it_has_without_in_place_operations(name: str) -> None:
    model, x = build(name), image(name)
    if name == "vgg11_bn":
        model(x)  # gives the lazy layer its size
    seen, parameters = run(model, x, in_place=True)
    expected, plain = run(model, x, in_place=False)
    assert count_hooks(model) == 0
    assert_only_rounded(numbered(seen), numbered(expected))
    assert_only_rounded(parameters, plain)
    ran = {path for path, side, _ in seen if side == "output"}
    leaves = {path for path, module in model.named_modules() if not any(module.children()) and path in ran}
    assert len(leaves) > 10


class Native(Every):
    """The same by PyTorch's own full-backward hooks, which need a model without in-place operations."""

    def _watch(self, path: str, module: nn.Module) -> None:
        def note(module: nn.Module, inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...]) -> None:
            for side, gradients in (("input", inputs), ("output", outputs)):
                for index, gradient in enumerate(gradients):
                    if gradient is not None:
                        self._note(path, side, index, gradient)

        if not any(module.children()) and not isinstance(module, nn.Identity):
            self.own(module.register_full_backward_hook(note))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg11_bn", "resnet18", "densenet121", "efficientnet_b0", "swin"])
def test_equal_to_pytorchs_own_hooks_where_those_can_be_used(name: str) -> None:
    model, x = build(name), image(name).requires_grad_()  # PyTorch warns of hooks on a module without such an input
    if name == "vgg11_bn":
        model(x)
    seen, _ = run(model, x, in_place=True)
    torch.manual_seed(1)
    model.zero_grad()
    with out_of_place(model), Native(model) as native:
        model(x).square().sum().backward()
    assert len(native.seen) > 40
    assert_only_rounded(numbered({key: seen[key] for key in native.seen}), numbered(native.seen))


@pytest.mark.slow
def test_hooks_change_no_gradient_of_a_parameter() -> None:
    model, x = build("resnet18"), image("resnet18")
    _, hooked = run(model, x, in_place=True)
    model.zero_grad()
    torch.manual_seed(1)
    model(x).square().sum().backward()
    assert_only_rounded(hooked, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


class Scaled(HookOwner):
    """Multiplies the gradients of one module's results or inputs."""

    def __init__(self, module: nn.Module, side: str, factor: float = 2.0) -> None:
        super().__init__()
        self.module, self.side, self.factor = module, side, factor
        self.seen: list[Tensor] = []

    def register(self) -> None:
        own = self.own_output_gradients if self.side == "output" else self.own_input_gradients
        own(self.module, self._change)

    def _change(self, gradient: Tensor, index: int) -> Tensor:
        self.seen.append(gradient.clone())
        return gradient * self.factor


@pytest.mark.parametrize("side", ["output", "input"])
def test_a_gradient_is_seen_and_changed(side: str) -> None:
    first, second = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
    x, pull = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    with Scaled(first if side == "output" else second, side) as owner:
        (second(first(x)) * pull).sum().backward()
    between = pull @ second.weight.detach()
    torch.testing.assert_close(owner.seen, [between])
    assert first.bias.grad is not None
    assert second.bias.grad is not None
    torch.testing.assert_close(first.bias.grad, 2 * between.sum(0))
    torch.testing.assert_close(second.bias.grad, pull.sum(0))


def test_the_gradient_of_an_input_is_this_readers_alone() -> None:
    module, x = nn.Linear(3, 3, bias=False).double(), torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    with Scaled(module, "input", 10.0) as owner:
        (module(x) + x).sum().backward()
    alone = torch.ones(2, 3, dtype=torch.float64) @ module.weight.detach()
    torch.testing.assert_close(owner.seen, [alone])
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 10 * alone + 1)


class Overwrites(nn.Module):
    """Writes to its input, which is a part of something larger."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(3.0)


@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[:, 1:], lambda x: x.t(), lambda x: x.view(2, 6)[:, ::2]])
@pytest.mark.parametrize("inside", [False, True])
def test_an_overwritten_input_and_parts_of_one(part: object, inside: bool) -> None:
    assert callable(part)
    module: nn.Module = nn.Sequential(Overwrites()) if inside else Overwrites()
    base = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    with Scaled(module, "input", 10.0) as owner:
        whole = base * 1
        pull = torch.randn_like(part(whole))
        (module(part(whole)) * pull).sum().backward()
    assert len(owner.seen) == 1
    torch.testing.assert_close(owner.seen[0], 3 * pull)
    expected = torch.zeros(3, 4, dtype=torch.float64)
    part(expected).copy_(30 * pull)
    assert base.grad is not None
    torch.testing.assert_close(base.grad, expected)


def test_a_view_that_is_read_and_then_overwritten_has_one_gradient_from_both() -> None:
    module, x = nn.Flatten(), torch.randn(2, 2, 2, requires_grad=True)
    with Scaled(module, "output", 10.0) as owner:
        result = module(x * 1)
        read = result.sum()
        (read + result.mul_(2).sum()).backward()
    assert [gradient.unique().tolist() for gradient in owner.seen] == [[3.0]]
    assert x.grad is not None
    assert x.grad.unique().tolist() == [30.0]


def test_modules_that_hand_their_input_through_before_it_is_overwritten() -> None:
    module, x = nn.Identity(), torch.randn(4, requires_grad=True)
    with Scaled(module, "output") as outer, Scaled(module, "input") as inner:
        given = x * 1
        result = module(given)
        result += 1
        result.sum().backward()
    assert len(outer.seen) == len(inner.seen) == 1
    assert x.grad is not None
    assert x.grad.tolist() == [4.0] * 4


@pytest.mark.parametrize("side", ["output", "input"])
def test_a_graph_recorded_inside_is_left_alone_outside(side: str) -> None:
    module, x = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    with Scaled(module, side) as owner:
        loss = module(x).sum()
    loss.backward()
    assert module.bias.grad is not None
    assert module.bias.grad.tolist() == [4.0, 4.0]
    assert owner.seen == []


@dataclass(slots=True)
class Boxed:
    """What has no `__dict__`."""

    x: Tensor
    name: str


class Plain:
    """What is no dataclass."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.parametrize("box", [lambda x: Boxed(x, "a"), Plain, lambda x: {"x": Plain(x)}])
def test_tensors_in_objects_are_hooked_as_they_are_found(box: Callable[[Tensor], Any]) -> None:
    class Open(nn.Module):
        def forward(self, given: Any) -> Tensor:
            return (given["x"] if isinstance(given, dict) else given).x * 2

    x = torch.ones(3, requires_grad=True)
    with Scaled(Open(), "input", 10.0) as owner:
        given = box(x)
        owner.module(given).sum().backward()
    assert [gradient.tolist() for gradient in owner.seen] == [[2.0] * 3]
    assert x.grad is not None
    assert x.grad.tolist() == [20.0] * 3
    assert (given["x"] if isinstance(given, dict) else given).x is x


class Nested(nn.Module):
    """Two tensors in, two out, in containers; one of them twice."""

    def forward(self, given: dict[str, Tensor], other: Tensor) -> dict[str, object]:
        one = given["x"] * 2
        return {"one": one, "two": (other * 3, one)}


def test_tensors_in_containers_are_told_by_their_position() -> None:
    seen: list[tuple[str, int, float]] = []

    class Positions(HookOwner):
        def register(self) -> None:
            self.own_output_gradients(module, lambda g, index: seen.append(("output", index, float(g))))
            self.own_input_gradients(module, lambda g, index: seen.append(("input", index, float(g))))

    module, x, y = Nested(), torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
    with Positions():
        result = module({"x": x}, other=y)
        (result["one"] + 5 * result["two"][0]).backward()
    assert sorted(seen) == [("input", 0, 2.0), ("input", 1, 15.0), ("output", 0, 1.0), ("output", 1, 5.0)]


def test_a_forward_that_raises_leaves_nothing_for_the_next_one() -> None:
    module = nn.Linear(3, 2)
    with Scaled(module, "input") as owner:
        with pytest.raises(RuntimeError):
            module(torch.randn(4, 5, requires_grad=True))
        module(torch.randn(4, 3, requires_grad=True)).sum().backward()
    assert len(owner.seen) == 1


def test_a_graph_is_freed_without_the_garbage_collector() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(inplace=True))
    kept: list[weakref.ref[Tensor]] = []

    class Watched(Every):
        def register(self) -> None:
            super().register()
            for module in model:
                self.own_forward(module, lambda module, args, named, result: kept.append(weakref.ref(result)))

    with paused_garbage_collection(), Watched(model):
        for _ in range(2):
            model(torch.randn(1, 3, 2, 2, requires_grad=True)).sum().backward()
        model(torch.randn(1, 3, 2, 2, requires_grad=True))  # and one that never runs backward
        assert len(kept) == 12
        assert [reference for reference in kept if reference() is not None] == []
