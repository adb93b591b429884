"""Interruptions at random moments: process and model are afterwards as they were."""

from __future__ import annotations

import copy
import dis
import gc
import logging
import random
import signal
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch
from efforts import LITTLE
from torch import Tensor, nn

import prunekit as pk
from prunekit.channels.trial import comparison
from prunekit.measure.measurement_effort import effort_of
from prunekit.modes import public_call
from prunekit.utils import context, progress

LOOKED_AT = ("/prunekit/", "contextlib.py", "/torch/autograd/", "/torch/utils/", "/torch/overrides.py", "/torch/amp/")
"""Files at whose lines the interruptions come: ours, and those that set modes for us."""


@cache
def is_looked_at(filename: str) -> bool:
    return any(part in filename for part in LOOKED_AT)


@cache
def _ends_of_handlers(code: CodeType) -> frozenset[int]:
    """Return where Python leaves `except`: no signal comes there, and an error would leave the handled one for good."""
    return frozenset(one.offset for one in dis.get_instructions(code) if one.opname == "POP_EXCEPT")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (x + self.second(self.norm(self.first(x)).relu())).relu()
        return y


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Conv2d(3, 8, 3), _Block(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.block(self.stem(x)).mean((2, 3)))
        return y


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layer = nn.Linear(6, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(self.stem(x)).mean(1))
        return y


def process_state() -> dict[str, Any]:
    """Return what a caller can see of the process's modes."""
    kernels = ("flash", "mem_efficient", "math", "cudnn")
    return {
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "deterministic": torch.get_deterministic_debug_mode(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "nesting": (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
        "threads": torch.get_num_threads(),
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "attention": [getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")() for kernel in kernels],
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "mkldnn": torch.backends.mkldnn.enabled,
        "collector": gc.isenabled(),
        "warnings": ([*warnings.filters], warnings.showwarning),
        "logging": [logging.root.manager.disable, *(logging.getLogger(name).level for name in ("", "prunekit"))],
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "python": random.getstate(),
        "numpy": [str(part) for part in np.random.get_state()],
        "torch": torch.get_rng_state().tolist(),
        "stance": sys.modules["torch._dynamo.eval_frame"]._stance if "torch._dynamo" in sys.modules else None,
        "progress": progress._RUNNING.get(),
        "inside": public_call._INSIDE.get(),
    }


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return classes, attributes, hooks, flags and values of a model."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[path] = (
            type(module),
            {
                name: {key: id(item) for key, item in value.items()} if isinstance(value, dict) else value
                for name, value in vars(module).items()
            },
        )
    for name, one in model.named_parameters():
        hooks = len(one._backward_hooks or ()), len(one._post_accumulate_grad_hooks or ())
        found[f"{name}: tensor"] = one.requires_grad, one.grad is None, hooks
    return found | {f"{name}: values": tensor.tolist() for name, tensor in model.state_dict().items()}


class _Interruption:
    """An interruption at one of the lines, or function starts, that run; counted from 1."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.count, self.place = at, 0, ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call" and not is_looked_at(frame.f_code.co_filename):
            return None
        if event in ("call", "line") and frame.f_lasti not in _ends_of_handlers(frame.f_code):
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt
        return self

    def run(self, call: Callable[[], object]) -> None:
        """Run a call, up to the interruption."""
        before = sys.gettrace()
        try:
            sys.settrace(self)
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)


def changes(call: Callable[[], object], models: list[nn.Module], points: int, seed: int) -> list[str]:
    """Return what was left changed by interruptions of a call at so many random points, with their places."""
    call()  # what is made once, on first use, is no change
    whole = _Interruption()
    whole.run(call)
    draw, found = random.Random(seed), []
    for _ in range(points):
        interruption = _Interruption(draw.randint(1, whole.count))
        before = process_state(), [model_state(model) for model in models]
        interruption.run(call)
        after = process_state(), [model_state(model) for model in models]
        parts = [name for name in before[0] if before[0][name] != after[0][name]]
        for one, other in zip(before[1], after[1], strict=True):
            parts += [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]
        if parts:
            found.append(f"{interruption.place}: {', '.join(parts)}")
            break  # what is changed now would be found again
    return found


class _InExits(_Interruption):
    """An interruption at one of the lines of `__exit__` of some contexts."""

    def __init__(self, leaves: Callable[[Any], bool], at: int = 0) -> None:
        super().__init__(at)
        self.leaves = leaves

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call" and not is_looked_at(frame.f_code.co_filename):
            return None
        left = frame.f_code.co_name == "__exit__" and self.leaves(frame.f_locals.get("self"))
        return super().__call__(frame, event, _) if left else self


class _InOwnFrames(_Interruption):
    """An interruption at one of the lines around a public call, not of the call itself."""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        own = frame.f_code.co_filename.endswith("public_call.py") and frame.f_code.co_name in ("call", "own_part")
        if own or (event == "call" and not is_looked_at(frame.f_code.co_filename)):
            return super().__call__(frame, event, _)
        return self


def test_the_next_call_knows_that_an_interrupted_one_is_over() -> None:
    """Else it would take itself for a part of that one, and undo nothing when it is interrupted."""
    model, samples = _model(_Convolutions)
    (whole := _InOwnFrames()).run(lambda: pk.trace(model, samples[:1]))
    assert whole.count
    for at in range(1, whole.count + 1):
        before, interruption = process_state(), _InOwnFrames(at)
        interruption.run(lambda: pk.trace(model, samples[:1]))
        assert process_state() == before, interruption.place


def _puts_mode_back(context: Any) -> bool:
    return "_pop_mode" in getattr(getattr(context, "gen", None), "__name__", "")


def test_an_interruption_in_the_place_of_which_another_error_came_leaves_no_mode() -> None:
    """Where a mode is off the stack, its own exit fails, and copying reports that as its error."""
    model, samples = _model(_Convolutions)
    plan = pk.plan(model, samples[:1], channels=0.5)
    model.memory = model.stem.weight * 2  # type: ignore[assignment]  # with a history
    (whole := _InExits(_puts_mode_back)).run(lambda: pk.compact(model, plan))
    assert whole.count
    for at in range(1, whole.count + 1):
        before, interruption = process_state(), _InExits(_puts_mode_back, at)
        interruption.run(lambda: pk.compact(model, plan))
        assert interruption.place.endswith("__exit__")
        assert process_state() == before, at


def test_no_mode_is_kept_by_the_error_of_an_interruption() -> None:
    """Torch's guard of a mode sets what was on before it when it is freed, in the middle of what runs then."""
    model, samples = _model(_Convolutions)
    (whole := _InExits(_sets_inference)).run(lambda: pk.trace(model, samples[:1]))
    assert whole.count
    for at in range(1, whole.count + 1):
        interruption, kept = _InExits(_sets_inference, at), []

        def interrupted() -> None:
            try:
                pk.trace(model, samples[:1])
            except KeyboardInterrupt as error:
                kept.append(error)  # noqa: B023

        interruption.run(interrupted)
        assert len(kept) == 1
        with torch.inference_mode():
            kept.clear()
            gc.collect()
            assert torch.is_inference_mode_enabled(), at


def _sets_inference(context: Any) -> bool:
    return isinstance(context, torch.inference_mode)


def _model(kind: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    """Return a model with training flags and gradients of its own, and samples."""
    torch.manual_seed(0)
    model = kind().train()
    model.get_submodule("stem").eval()
    next(iter(model.parameters())).requires_grad_(False)
    return model, torch.randn(16, 3, 8, 8) if kind is _Convolutions else torch.randn(16, 5, 6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in the end of a generator
@pytest.mark.parametrize("kind", [_Convolutions, _Attention])
@pytest.mark.parametrize(
    ("name", "points"), [("prune", 20), ("calibrated", 10), ("verify", 25), ("masked", 25), ("bench", 20)]
)
def test_an_interruption_leaves_everything_as_it_was(kind: type[nn.Module], name: str, points: int) -> None:
    """With both models, 200 points in total; calls of `finetune` are below."""
    model, samples = _model(kind)
    plan = pk.plan(model, samples[:1], channels=0.5)
    small = pk.compact(model, plan).eval()

    def masked() -> None:
        with pk.masked(model, plan):
            small(samples)

    def bench() -> None:
        with effort_of(LITTLE):
            pk.bench({"dense": model, "small": small}, samples[:1], repeats=5)

    calls: dict[str, Callable[[], object]] = {
        "prune": lambda: pk.prune(model, samples[:1], macs=0.6),
        "calibrated": lambda: pk.prune(model, calibration=samples, macs=0.6),
        "verify": lambda: pk.verify(model, small, plan, samples),
        "masked": masked,
        "bench": bench,
    }
    assert changes(calls[name], [model, small], points, seed=len(name)) == []


JOB = {
    "model": {"name": "resnet8", "zoo": "cifar"}, "data.image_size": 8, "data.batch": 256, "baseline.epochs": 1,
    "finetune.epochs": 1, "control": False, "latency.batches": [1], "latency.repeats": 5, "latency.explain": False,
    "prune.budget.macs": 0.5, "threads": 1,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_job_leaves_the_process_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRUNEKIT_CACHE", str(tmp_path / "cache"))
    seen = _Interruption()

    def job() -> None:
        with effort_of(LITTLE):
            pk.finetune("resnet34", JOB | {"output": str(tmp_path)})

    seen.run(job)
    draw = random.Random(1)
    for _ in range(4):
        before, interruption = process_state(), _Interruption(draw.randint(1, seen.count))
        interruption.run(job)
        after = process_state()
        assert [name for name in before if before[name] != after[name]] == [], interruption.place


def test_gradients_stay_on_where_a_forward_pass_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the setting of a mode and the `with` statement that undoes it nothing may run."""

    def interrupted(model: nn.Module) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "same_draws", interrupted)
    model, samples = _model(_Convolutions)
    with pytest.raises(KeyboardInterrupt):
        pk.prune(model, samples[:1], macs=0.5)
    assert torch.is_grad_enabled()


def test_contexts_that_an_interruption_kept_open_are_closed_first() -> None:
    """As where it comes after a generator has yielded, and before `with` knows of it."""
    threads = torch.get_num_threads()

    class Module(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with context.threads(threads + 1):
                left = context.threads(threads + 2)
                left.__enter__()
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        pk.trace(Module(4, 4), torch.randn(1, 4))
    assert torch.get_num_threads() == threads
    del caught
    gc.collect()
    assert torch.get_num_threads() == threads


def test_inference_modes_that_stay_open_are_closed_in_any_order() -> None:
    """One restores what was on when it began, which the one around it has restored already."""

    class Module(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                left = torch.inference_mode()
                left.__enter__()
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        pk.trace(Module(4, 4), torch.randn(1, 4))
    assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == (False, True)
    del caught
    gc.collect()
    assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == (False, True)


def test_an_interruption_stays_one() -> None:
    """Also where putting something back fails after it."""

    class Module(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt as error:
                raise RuntimeError("trying to pop from empty mode stack") from error

    with pytest.raises(KeyboardInterrupt):
        pk.trace(Module(4, 4), torch.randn(1, 4))
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:  # one of before is none of the call's
        with pytest.raises(pk.PrunekitError):
            pk.trace(nn.Linear(4, 4), "no example")


def test_a_call_that_fails_leaves_the_model_as_it_was() -> None:
    """Hooks, flags, attributes and gradients that the model's own code changes until it fails, too."""

    class Module(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = x
            self[0].weight.requires_grad_(False)
            self[0].register_forward_hook(lambda *_: None)
            self.eval()
            raise ValueError("no such size")

    model = Module(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).train()
    before = copy.copy(model_state(model))
    with pytest.raises(pk.PrunekitError, match="no such size"):
        pk.calibrate(model, [torch.randn(2, 4)])
    assert model_state(model) == before
