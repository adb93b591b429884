"""A model's structure with other tensors in it, and its narrow copy."""

from __future__ import annotations

import copy
import threading
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.state import AcceleratorState, GradientState
from equivalence import TOLERANCE, Net, image, parity, randomized, settled_plan, zero_removed
from torch import nn
from torch.nn.utils import prune as torch_prune

from prunekit.channels.cut.slicing import cut, narrow
from prunekit.compaction.compact_model import compact
from prunekit.compaction.model_folder import load, save
from prunekit.errors import ArtifactError, ModelError, VerificationError
from prunekit.hooks.model_copy import copied, named_tensors
from prunekit.measure.verification import verify


class Rated(nn.Module):
    """A recurrent average: a buffer that each forward pass computes from weights that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("level", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.level = self.level * self.rate + x.mean((0, 1)) * (1 - self.rate)
        return x - self.level


class Phases(nn.Module):
    """A filter of complex numbers."""

    def __init__(self, dtype: torch.dtype = torch.complex128) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.polar(torch.ones(6), torch.arange(6.0)).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.filter).imag.to(x.dtype)


def scripted(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and used
        traced = torch.jit.trace(torch.tanh, (torch.ones(2),))
    return Net(lambda net, x: net.tanh(net.a(x)), a=layer, tanh=traced)


def pruned_by_torch(layer: nn.Module) -> nn.Module:
    torch_prune.random_unstructured(layer, "weight", 0.5)
    return layer


COPIED: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: nn.utils.weight_norm(nn.Linear(6, 6)),
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
    "torch's mask": lambda: pruned_by_torch(nn.Linear(6, 6)),
    "scripted function": lambda: scripted(nn.Linear(6, 6)),
    "complex": lambda: nn.Sequential(nn.Linear(6, 6), Phases()),
    "computed buffer": lambda: nn.Sequential(nn.Linear(6, 6), Rated()),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("name", COPIED)
def test_a_copy_computes_the_same_with_tensors_of_its_own(name: str) -> None:
    """After a training step, also in another precision, and also what nobody can train: `copy.deepcopy` takes none."""
    model, x = COPIED[name](), torch.randn(2, 3, 6)
    model(x).sum().backward()
    model.eval()
    twin = copied(model)
    before = model(x).detach()
    assert torch.equal(copied(twin)(x), before)
    wide = copied(model, "cpu", torch.float64)
    assert {tensor.dtype for _, tensor in named_tensors(wide)} <= {torch.float64, torch.complex128}
    again = model(x) if name == "computed buffer" else before  # the model is at its second pass, as the copy was made
    assert torch.allclose(wide(x.double()), again.double(), atol=1e-6)
    half = copied(model, dtype=torch.bfloat16)
    assert {tensor.dtype for _, tensor in named_tensors(half)} <= {torch.bfloat16, torch.complex64}
    with torch.no_grad():
        for _, tensor in named_tensors(model):
            tensor.zero_()
    assert torch.equal(copied(twin)(x), before)


def test_parameters_stay_parameters_and_frozen_ones_frozen() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False)
    twin = copied(model)
    assert [p.requires_grad for p in twin.parameters()] == [False, True, True, True]
    assert all(isinstance(p, nn.Parameter) for p in twin.parameters())
    assert [name for name, _ in twin.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert not {id(t) for _, t in named_tensors(twin)} & {id(t) for _, t in named_tensors(model)}


def test_ties_and_shared_modules_stay_so() -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    model.append(model[0])
    assert [name for name, _ in named_tensors(model)] == ["0.weight", "0.bias", "1.bias"]
    twin = copied(model)
    assert twin[1].weight is twin[0].weight
    assert twin[2] is twin[0]


def test_attributes_are_copied_and_keep_their_kind() -> None:
    model = nn.Linear(3, 4)
    shared: dict[str, int] = {}
    attributes = {
        "cache": defaultdict(list),
        "ordered": OrderedDict(),
        "seen": set(),
        "numbers": [1, [2]],
        "first": shared,
        "second": shared,
        "plain": torch.ones(2),
    }
    for name, value in attributes.items():
        setattr(model, name, value)
    twin = copied(model)
    twin.cache["new"].append(1)
    twin.numbers[1].append(3)
    twin.plain.zero_()
    assert type(twin.ordered) is OrderedDict
    assert twin.seen == set()
    assert twin.first is twin.second
    assert twin.first is not shared
    assert (model.cache, model.numbers, model.plain.tolist()) == ({}, [1, [2]], [1.0, 1.0])


def test_a_module_with_its_own_way_of_copying_is_asked() -> None:
    class Counted(nn.Linear):
        copies = 0

        def __deepcopy__(self, memo: dict[int, Any]) -> Counted:
            Counted.copies += 1
            twin = Counted(self.in_features, self.out_features)
            memo[id(self)] = twin
            return twin

    assert isinstance(copied(nn.Sequential(Counted(2, 2)))[0], Counted)
    assert Counted.copies == 1


def test_what_cannot_be_copied_is_said() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    model[0].opened = [threading.Lock()]
    with pytest.raises(ModelError, match=r"cannot be copied, because of its attribute 0.opened: .*expected a module"):
        copied(model)


@dataclass
class Record:
    """What a layer keeps of its last call."""

    loss: torch.Tensor


def test_results_that_a_model_keeps_are_copied_without_history() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    kept = model[0](torch.ones(1, 3))
    model[0].last, model.losses, model[1].seen = kept, deque([kept.sum()]), {"a": (Record(kept), [kept.mean()])}
    twin = copied(model)
    copies = [twin[0].last, twin.losses[0], twin[1].seen["a"][0].loss, twin[1].seen["a"][1][0]]
    assert copies[0] is copies[2]
    assert all(tensor.is_leaf and not tensor.requires_grad for tensor in copies)
    assert torch.equal(copies[0], kept)
    assert kept.grad_fn is not None
    assert model[0].last is kept


def test_a_module_with_its_own_new_and_reduce() -> None:
    class Odd(nn.Linear):
        def __reduce__(self) -> Any:
            return (nn.Linear, (self.in_features, self.out_features))

    assert type(copied(nn.Sequential(Odd(2, 3)))[0]) is nn.Linear


def test_narrow_leaves_the_model_and_its_modes_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).train()
    model[1].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    rows = np.array([0, 2])
    vectors = {f"1.{name}": (rows,) for name in ("weight", "bias", "running_mean", "running_var")}
    small = narrow(model, {"0.weight": (rows, None, None, None), "0.bias": (rows,), **vectors})
    assert small(*image()).shape == (2, 2, 8, 8)
    assert (small[0].out_channels, small[1].num_features) == (2, 2)  # type: ignore[index, union-attr]
    assert (model[0].out_channels, model[1].num_features) == (4, 4)
    assert [module.training for module in small.modules()] == [module.training for module in model.modules()]
    assert all(parameter.grad is None for parameter in small.parameters())
    assert model[0].weight.grad is not None
    small[0].weight.data.zero_()  # type: ignore[index, union-attr]
    assert model[0].weight.abs().min() > 0


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_cut_entries(layout: torch.memory_format) -> None:
    tensor = torch.arange(48.0).reshape(4, 3, 2, 2).contiguous(memory_format=layout)
    got = cut(tensor, (np.array([1, 3]), np.array([0, 2]), None, None))
    assert torch.equal(got, tensor[[1, 3]][:, [0, 2]])


def test_subclasses_are_resized() -> None:
    class Mine(nn.Conv2d):
        pass

    model = nn.Sequential(Mine(3, 6, 1))
    small = narrow(model, {"0.weight": (np.array([0, 5]), None, None, None), "0.bias": (np.array([0, 5]),)})
    assert type(small[0]) is Mine  # type: ignore[index]
    assert small[0].out_channels == 2  # type: ignore[index, union-attr]


def test_functions_as_attributes_are_shared() -> None:
    model = Net(lambda net, x: net.a(x), a=nn.Linear(2, 2))
    assert copied(model).function is model.function


def test_scripted_functions_and_operators_are_shared() -> None:
    """Also in containers, where `copy.deepcopy` refuses them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and used
        traced = torch.jit.trace(torch.relu, (torch.ones(2),))
    relu = torch.ops.aten.relu
    model = nn.Linear(3, 4)
    model.first, model.table, model.chain = traced, {"relu": relu.default}, [traced, relu]
    twin = copied(model)
    assert twin.first is traced
    assert twin.table == model.table
    assert twin.table is not model.table
    assert twin.chain[0] is traced
    assert twin.chain[1] is relu


def test_complex_parameters_stay_trainable_and_are_compared_to_rounding() -> None:
    class Spectral(nn.Module):
        """A filter of complex weights over the positions, and one buffer of phases."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 12), nn.Linear(12, 3)
            self.filter = nn.Parameter(torch.randn(4, 1, dtype=torch.cfloat))
            self.register_buffer("phase", torch.polar(torch.ones(4, 1), torch.arange(4.0)[:, None]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.down(self.up(x).relu())
            return torch.fft.ifft(torch.fft.fft(y, dim=1) * self.filter * self.phase, dim=1)

    model, example = randomized(Spectral()), (torch.randn(2, 4, 4),)
    plan = settled_plan(model, example)
    small: Any = compact(model, plan)
    assert small.up.out_features < 12
    assert all(parameter.requires_grad for parameter in small.parameters())
    assert parity(model, plan, example) <= TOLERANCE
    small.filter.data += 1e-3
    with pytest.raises(VerificationError, match=r"first at aten\.mul in the top-level forward: values differ"):
        verify(zero_removed(copy.deepcopy(model), plan), small, plan, [example])


class Taps:
    """What hooks on some layers saw last."""

    def __init__(self) -> None:
        self.seen: dict[str, torch.Tensor] = {}
        self.handles: list[Any] = []

    def on(self, name: str, layer: nn.Module) -> None:
        self.handles.append(layer.register_forward_hook(partial(self.keep, name)))

    def keep(self, name: str, layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.seen[name] = output


SHARED: dict[str, torch.Tensor] = {}


def keep_in_the_file(layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    SHARED["first"] = output


class Tapped(nn.Module):
    """Its last layer reads what a hook on the first one stored: in an object of its own, itself, or a global."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.first, self.second, self.side, self.last = (
            nn.Linear(*size) for size in ((4, 12), (12, 8), (12, 6), (6, 3))
        )
        self.back = nn.Linear(8, 6)
        self.where, self.taps, self.stored = where, Taps(), SHARED
        model = weakref.ref(self)
        hooks = {
            "itself": lambda layer, inputs, output: setattr(self, "tap", output),
            "weakly": lambda layer, inputs, output: setattr(model(), "tap", output),
            "method": self.keep,
            "global": keep_in_the_file,
        }
        if where == "object":
            self.taps.on("first", self.first)
        else:
            self.first.register_forward_hook(hooks[where])

    def keep(self, layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.tap = output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        back = self.back(self.second(self.first(x).relu()))
        if self.where == "object":
            tap = self.taps.seen["first"]
        else:
            tap = self.stored["first"] if self.where == "global" else self.tap
        return self.last(back + self.side(tap))


@pytest.mark.parametrize("where", ["object", "itself", "weakly", "method", "global"])
def test_a_model_reads_what_its_own_hooks_stored(where: str, tmp_path: Path) -> None:
    """Also when it ran with gradients before, whose results nobody can copy."""
    model, example = randomized(Tapped(where)), (torch.randn(2, 4),)
    model(*example).sum().backward()
    plan = settled_plan(model, example)
    small = compact(model, plan)
    assert {"first.weight", "side.weight"} <= plan.kept_indices.keys()
    assert plan.kept("side.weight", 1).tolist() == plan.kept("first.weight", 0).tolist()
    save(small, tmp_path / "small", plan)
    loaded = load(tmp_path / "small", model=lambda: Tapped(where))
    masked, other = zero_removed(copied(model), plan), torch.randn(5, 4)
    with torch.no_grad():
        want = masked(other)
        small(*example)
        assert torch.allclose(small(other), want, atol=1e-5)
        assert torch.allclose(copied(small)(other), want, atol=1e-5)
        assert torch.equal(loaded(other), small(other))
        model.first(other[:1])
        assert torch.equal(loaded(other), small(other)), "each has its own"


def test_what_a_hook_shares_with_nobody_in_the_model_stays_shared() -> None:
    class Observer:
        def __init__(self) -> None:
            self.calls: list[int] = []

        def __call__(self, layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            self.calls.append(len(output))

    model, observer = nn.Sequential(nn.Linear(2, 2)), Observer()
    model[0].register_forward_hook(observer)
    twin = copied(model)
    twin(torch.zeros(3, 2))
    model(torch.zeros(4, 2))
    assert observer.calls == [3, 4]


def test_functions_in_attributes_call_the_layers_of_the_copy() -> None:
    model: Any = nn.Module()
    model.layer = nn.Linear(2, 2)
    model.run, model.runs = lambda x: model.layer(x), [lambda x, of=model: of.layer(x)]
    model.forward = lambda x: model.run(x) + model.runs[0](x)
    twin = copied(model)
    with torch.no_grad():
        twin.layer.weight.zero_()
        twin.layer.bias.fill_(1)
        assert twin(torch.randn(1, 2)).tolist() == [[2, 2]]


class Fast(nn.Linear):
    """It chooses between two ways of its own when it is made."""

    def __init__(self, n: int = 6, m: int = 4, *, fast: bool = True) -> None:
        super().__init__(n, m)
        if fast:
            self.forward = self.forward_fast

    def forward_fast(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def prepared(model: nn.Module) -> nn.Module:
    try:
        result: nn.Module = Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
        return result
    finally:  # Accelerate keeps what it was asked for in the process, where other tests would find it
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def autocast(model: Any) -> nn.Module:
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    return model  # type: ignore[no-any-return]


def aligned(model: nn.Module) -> nn.Module:
    return add_hook_to_module(model, AlignDevicesHook("cpu", io_same_device=True))


@pytest.mark.parametrize("wrap", [prepared, autocast, aligned])
@pytest.mark.parametrize("fast", [False, True])
def test_wrappers_around_a_method_are_left_behind(wrap: Any, fast: bool) -> None:
    plain = Fast(fast=fast)
    model = wrap(copy.deepcopy(plain))
    twin = copied(model)
    assert vars(twin).keys() == vars(plain).keys()
    x = torch.randn(3, 6)
    with torch.no_grad():
        assert torch.equal(twin(x), plain(x))
    assert prepared(twin)(x).dtype == torch.float32, "it can be prepared again"


def test_a_method_that_was_replaced_comes_along_and_a_file_without_it_is_refused(tmp_path: Path) -> None:
    def doubling(model: Any) -> Any:
        before = model.forward
        model.forward = lambda x: 2 * before(x)
        return model

    class Two(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 12), nn.Linear(12, 3))

    model, example = doubling(Two()), (torch.randn(2, 4),)
    plan = settled_plan(model, example)
    small = compact(model, plan)
    assert small[0].out_features < 12  # type: ignore[index]
    save(small, tmp_path / "small", plan)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "small", model=lambda: doubling(Two()))(*example), small(*example))
    with pytest.raises(ArtifactError, match="forward was set on the saved model itself and is not in its class"):
        load(tmp_path / "small", model=Two)
