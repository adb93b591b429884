"""Public calls under a caller's modes: they compute what they compute without them, or refuse by name."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import prunekit as pk
from prunekit.modes.public_call import callers_defaults, usual_modes

SAMPLES = torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(0))
EXAMPLE = SAMPLES[:1]
LABELS = torch.arange(32) % 4
BATCHES = [(SAMPLES[:16], LABELS[:16]), (SAMPLES[16:], LABELS[16:])]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.second(self.norm(self.first(x)).relu()).relu().mean((2, 3)))
        return y


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "float64": lambda: _default_dtype(torch.float64),
    "bfloat16": lambda: _default_dtype(torch.bfloat16),
    "set_default_device": lambda: _default_device("meta"),
    "torch.device": lambda: torch.device("meta"),
}


def _net() -> _Net:
    torch.manual_seed(0)
    return _Net().eval()


def _masked(model: nn.Module, _: Path) -> Any:
    with pk.masked(model, pk.plan(model, EXAMPLE, macs=0.5)):
        return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def _pruner(model: nn.Module, _: Path) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pk.Pruner(model, optimizer, EXAMPLE, macs=0.5, schedule="oneshot") as pruner:
        pruner.step()
        return pruner.finish()[0]


def _loaded(model: nn.Module, folder: Path) -> Any:
    folder = folder / str(len([*folder.iterdir()]))
    return pk.load(pk.save(pk.prune(model, EXAMPLE, macs=0.5), folder), model=_Net)


def _gradients(model: nn.Module, _: Path) -> Any:
    gradients = pk.collect_gradients(model, BATCHES, nn.functional.cross_entropy)
    return pk.prune(model, EXAMPLE, macs=0.5, criterion="taylor", gradients=gradients).model


def _recalibrated(model: nn.Module, _: Path) -> Any:
    pk.recalibrate_batchnorm(model, BATCHES)
    return model


def _verified(model: nn.Module, _: Path) -> Any:
    plan = pk.plan(model, EXAMPLE, macs=0.5)
    return str(pk.verify(model, pk.compact(model, plan), plan, SAMPLES))


CALLS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "prune": lambda model, _: pk.prune(model, EXAMPLE, macs=0.5).model,
    "calibrated": lambda model, _: pk.prune(model, calibration=SAMPLES, macs=0.5).model,
    "collected": lambda model, _: pk.prune(model, calibration=pk.collect(model, SAMPLES), macs=0.5).model,
    "zeros": lambda model, _: pk.prune(model, calibration=SAMPLES, sparsity=0.5).model,
    "gradients": _gradients,
    "plan": lambda model, _: pk.plan(model, EXAMPLE, macs=0.5).keep.tolist(),
    "verify": _verified,
    "masked": _masked,
    "pruner": _pruner,
    "load": _loaded,
    "fold": lambda model, _: pk.fold_batchnorm(model, EXAMPLE).model,
    "recalibrate": _recalibrated,
    "thresholds": lambda model, _: dict(pk.calibrate_thresholds(model, BATCHES, ["first"], target=0.5)),
}
"""Calls with a model and a folder, each with what it returns or changes."""


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_calls_compute_under_modes_what_they_compute_without(call: str, tmp_path: Path) -> None:
    expected = CALLS[call](_net(), tmp_path)
    for name, mode in MODES.items():
        model = _net()
        with mode():
            found = CALLS[call](model, tmp_path)
        if not isinstance(expected, nn.Module):
            assert found == expected, name
            continue
        wanted = expected.state_dict()
        for key, tensor in found.state_dict().items():
            assert (tensor.dtype, tensor.device) == (wanted[key].dtype, wanted[key].device), (name, key)
            assert torch.equal(tensor, wanted[key]), (name, key)
            assert not tensor.is_inference(), (name, key)


def test_results_from_inference_mode_can_be_trained() -> None:
    """Also where the example and the samples were made there."""
    model = _net()
    with torch.inference_mode():
        samples = torch.randn(16, 3, 8, 8)
        small = pk.prune(model, calibration=samples, macs=0.5).model
    small(SAMPLES).sum().backward()
    assert all(one.grad is not None for one in small.parameters())


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("prune", lambda model: pk.prune(model, EXAMPLE, macs=0.5)),
        ("plan", lambda model: pk.plan(model, EXAMPLE, macs=0.5)),
        ("collect", lambda model: pk.collect(model, SAMPLES)),
        ("collect_gradients", lambda model: pk.collect_gradients(model, BATCHES, nn.functional.cross_entropy)),
        ("recalibrate_batchnorm", lambda model: pk.recalibrate_batchnorm(model, BATCHES)),
        ("Pruner", lambda model: pk.Pruner(model, torch.optim.SGD(model.parameters()), EXAMPLE, macs=0.5, steps=2)),
    ],
)
def test_a_model_from_inference_mode_is_refused_by_name(name: str, call: Callable[[nn.Module], object]) -> None:
    with torch.inference_mode():
        model = _Net()
    before = [one.requires_grad for one in model.parameters()]
    with pytest.raises(pk.PrunekitError, match=rf"first\.weight was made in torch\.inference_mode.* {name} .*deepcopy"):
        call(model)
    assert [one.requires_grad for one in model.parameters()] == before
    call(copy.deepcopy(model))  # as the message says


def test_fake_tensors_and_transforms_are_refused_by_name() -> None:
    model = _net()
    with (
        FakeTensorMode(),
        pytest.raises(pk.PrunekitError, match="prune: expected to be called outside of FakeTensorMode"),
    ):
        pk.prune(model, EXAMPLE, macs=0.5)
    with pytest.raises(pk.PrunekitError, match="trace: expected to be called outside of a transform"):
        torch.vmap(lambda x: pk.trace(model, x) and x)(SAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_forward_makes_its_tensors_in_the_dtype_that_its_caller_set(dtype: torch.dtype) -> None:
    """A model of that dtype would not run with tensors in float32; one in float32 not with others."""

    class Own(_Net):
        def forward(self, x: Tensor) -> Tensor:
            size = x.shape[-1]
            return super().forward(x @ torch.eye(size, dtype=torch.get_default_dtype() if size else x.dtype))

    with _default_dtype(dtype):
        torch.manual_seed(0)
        model = Own().eval()
        result = pk.prune(model, calibration=SAMPLES.to(dtype), macs=0.5)
        assert result.model(SAMPLES.to(dtype)).dtype == dtype
    single = Own().eval()
    expected = pk.prune(single, calibration=SAMPLES, macs=0.5)
    with _default_dtype(dtype):
        found = pk.prune(single, calibration=SAMPLES, macs=0.5)
    for one, other in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_callers_defaults_are_those_that_a_model_has_tensors_of() -> None:
    double = nn.Linear(2, 2).double()
    with _default_dtype(torch.float64), torch.device("meta"), usual_modes():
        assert (torch.get_default_dtype(), torch.empty(1).device.type) == (torch.float32, "cpu")
        with callers_defaults(double):
            assert (torch.get_default_dtype(), torch.empty(1).device.type) == (torch.float64, "cpu")
        with callers_defaults(nn.Linear(2, 2, device="meta")):
            assert (torch.get_default_dtype(), torch.empty(1).device.type) == (torch.float32, "meta")
        assert torch.get_default_dtype() == torch.float32
    with callers_defaults(double):
        assert torch.get_default_dtype() == torch.float32


REGISTERS_OR_OWNS_HOOKS = {
    "clamp_activation_grad", "clamp_weight_grad", "masked", "register_budget",
    "register_criterion", "register_rule", "register_runtime", "register_section", "register_task", "sharing_work",
}  # fmt: skip
"""Public functions that compute nothing when they are called; what they return runs in the caller's code."""


def test_every_public_function_is_a_public_call() -> None:
    functions = {name: getattr(pk, name) for name in pk.__all__ if inspect.isfunction(getattr(pk, name))}  # type: ignore[attr-defined]
    plain = {name for name, function in functions.items() if "public_call" not in _decorators(function)}
    assert plain == REGISTERS_OR_OWNS_HOOKS


def _decorators(function: Any) -> set[str]:
    plain = inspect.unwrap(function)
    tree = ast.parse(Path(inspect.getfile(plain)).read_text(encoding="utf-8"))
    return {
        ast.unparse(one)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == plain.__name__
        for one in node.decorator_list
    }


def test_modes_of_the_caller_are_on_again() -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), torch.device("meta"), _default_dtype(torch.float64):
        pk.trace(_net_on_cpu(), torch.randn(1, 3, 8, 8, device="cpu", dtype=torch.float64))
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
        assert torch.empty(1).is_meta
        assert torch.get_default_dtype() == torch.float64


def _net_on_cpu() -> _Net:
    with torch.device("cpu"):
        return _Net().eval()
