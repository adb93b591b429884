"""A forward pass that stops anywhere and goes on from there computes what one in a single run does, bit for bit."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from equivalence import randomized
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from prunekit.repair.held_out_images import batches_of
from prunekit.repair.layer_samples import LayerPass, LayerSample, SampleGatherer, SampleRequest
from prunekit.statistics.layer_graph import find_layers
from prunekit.statistics.linear_layers import FunctionCall
from prunekit.statistics.resumable_forward import DivergedError, ResumableRun
from prunekit.utils.tensors import gather


class Stream(nn.Module):
    """A residual stream with in-place operations, and features collected in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.bns = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for conv, bn in zip(self.convs, self.bns, strict=True):
            out = bn(conv(x))
            out += x
            x = F.relu(out, inplace=True)
            features.append(x)
        return self.last(torch.cat(features, 1)).mean((2, 3))  # type: ignore[no-any-return]


class Views(nn.Module):
    """Writes through views, also into its input; properties that are tensors; loops over a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        half = x[..., :3]
        turned = x.mT
        half += self.one(x)[..., :3]
        x[..., 3:] = self.two(x)[..., 3:]
        parts = [row * 2 for row in turned]
        return torch.stack(parts) + self.one(x).mT  # type: ignore[no-any-return]


class Branches(nn.Module):
    """Python that looks at values, sizes and layout; several results at once; state in the module."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(6, 6), nn.Linear(6, 12), nn.LayerNorm(6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.one(x))
        if x.sum().item() > 0 or len(x) > 100 or not x.is_contiguous():
            x = self.one(x)
        gate, value = self.two(x).chunk(2, -1)
        self.seen = gate
        value, _ = self.lstm(value)
        best = value.max(-1)
        return {"out": self.norm(value) * self.seen.sigmoid() + best.values[..., None]}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x) + y  # type: ignore[no-any-return]


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TorchScript is deprecated, and used

    @torch.jit.script
    def scripted(x: Tensor, y: Tensor) -> Tensor:
        """Reads both, and writes to what it made."""
        made = torch.tanh(x) + y
        made.mul_(2.0)
        return made * y

    @torch.jit.script
    def scripted_write(x: Tensor, y: Tensor) -> Tensor:
        """Writes to what it is given, through a view."""
        x.view(-1).add_(y.reshape(-1))
        return x

    traced = torch.jit.trace(lambda x, y: x.sigmoid() - y, (torch.ones(1, 2, 3), torch.ones(1, 2, 3)))


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        ctx.mark_dirty(x)
        return x.add_(y.exp())


@torch.library.custom_op("prunekit_tests::hidden", mutates_args=())
def hidden(x: Tensor, y: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * y.numpy())


def numpy_shared(x: Tensor, y: Tensor) -> Tensor:
    """Writes to a tensor from outside, before and after torch reads it."""
    array = x.numpy()
    array += y.numpy()
    made = x.exp()
    array[...] = np.tanh(array)
    return made * x


def by_address(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.contiguous(), y.contiguous()
    values = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
    for i, value in enumerate(y.flatten().tolist()):
        values[i] += value
    return x


def extension(x: Tensor, y: Tensor) -> Tensor:
    """Writes to a tensor as an extension in C++ does: without any operator."""
    x = x * y
    with torch._C.DisableTorchFunction():
        address = x.data_ptr()
    first = ctypes.c_float.from_address(address)
    first.value = first.value * 2 + 1
    return x


def below_functions(x: Tensor, y: Tensor) -> Tensor:
    """Calls that pass torch's functions by, between two writes that don't."""
    x.add_(1)
    with torch._C.DisableTorchFunction():
        found = x * y
        seen = found.view(-1)
    x.mul_(3)
    seen.sub_(1)  # of what isn't seen
    return found + x


def by_inference(x: Tensor, y: Tensor) -> Tensor:
    with torch.inference_mode():
        made = x * y
        made += 1
    return made.clone()


def with_gradients(x: Tensor, y: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((x.tanh() * y).sum(), x)
    return gradient


Mix = Callable[[Tensor, Tensor], Tensor]
MIXES: dict[str, Mix] = {
    "scripted": scripted,
    "scripted write": scripted_write,
    "traced": traced,
    "autograd function": lambda x, y: Sum.apply(x, y),  # type: ignore[no-untyped-call]
    "custom operator": hidden,  # type: ignore[dict-item]
    "by its name": torch.ops.prunekit_tests.hidden,
    "compiled": torch.compile(lambda x, y: x.exp() * y, backend="eager", fullgraph=True),
    "checkpoint": lambda x, y: checkpoint(scripted, x, y, use_reentrant=False),
    "vmap": lambda x, y: torch.vmap(lambda a, b: a.softmax(-1) @ b.mT)(x, y)[..., :1] * x,
    "func.grad": lambda x, y: torch.func.grad(lambda a: (a.tanh() * y).sum())(x),
    "cond": lambda x, y: torch.cond(x.sum() > y.sum() + 1e9, lambda a: a + 1, lambda a: a * y, (x,)),
    "shared with NumPy": numpy_shared,
    "list": lambda x, y: torch.tensor(x.tolist()) * y,
    "dlpack": lambda x, y: torch.from_dlpack(x).mul_(2) + x * y,  # type: ignore[attr-defined]
    "storage": lambda x, y: torch.empty(0).set_(x.untyped_storage()).view(x.shape).mul_(2) + x * y,  # type: ignore[arg-type]
    "address": by_address,
    "extension": extension,
    "data": lambda x, y: x.data.mul_(2) + x * y,
    "below torch's functions": below_functions,
    "inference mode": by_inference,
    "gradients": with_gradients,
}


FOLLOWED = {
    "traced",
    "cond",
    "autograd function",
    "by its name",
    "custom operator",
    "compiled",
    "list",
    "data",
    "inference mode",
}


class Mixed(nn.Module):
    """Three layers, and between them what isn't one of torch's functions; and a buffer that passes write to."""

    memory: Tensor

    def __init__(self, mix: Mix, buffer: bool = False) -> None:
        super().__init__()
        self.mix, self.buffer = mix, buffer
        self.one, self.two, self.three = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("memory", torch.zeros(4, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        y = self.two(x).relu()
        if self.buffer:
            self.memory[: len(x)] = x.exp()
            y = y + self.memory[: len(x)]
        z = self.mix(x + y, y)
        x = self.three(z)
        return self.two(self.mix(x + z, y) + x)  # type: ignore[no-any-return]


def remembered(x: Tensor, y: Tensor) -> Tensor:
    return x * y


class Noted(ResumableRun):
    """Copies the results of all calls that are really made."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.results: dict[int, list[Tensor]] = {}

    def after(self, call: FunctionCall, result: Any) -> None:
        tensors = gather(result)
        if not any(getattr(tensor, "_prunekit_place", (0, 0, None))[2] for tensor in tensors):
            self.results[call.number] = [tensor.detach().clone() for tensor in tensors]


TEXT, IMAGE = torch.randn(3, 6, 6), torch.randn(3, 4, 5, 5)
CASES: dict[str, tuple[type[nn.Module], tuple[Tensor, ...], tuple[str, ...]]] = {
    "stream": (Stream, (IMAGE,), ()),
    "views": (Views, (TEXT,), ()),
    "branches": (Branches, (TEXT,), ()),
    "norms": (Branches, (TEXT,), ("norm",)),
    "attention": (Attention, (TEXT, TEXT), ("layer.norm1", "layer.norm2")),
}


@pytest.mark.parametrize("case", CASES)
def test_going_on_from_any_call_gives_the_same(case: str) -> None:
    build, inputs, norms = CASES[case]
    torch.manual_seed(0)
    model, before = build().eval(), [tensor.clone() for tensor in inputs]
    run = Noted(model, norms)
    run.learn(inputs)
    run.results.clear()
    run.run(inputs, None, 0, 0)
    plain, run.results = run.results, {}
    assert len(plain) >= 8
    for number in plain:
        kept = run.run(inputs, None, number, number)
        for _ in range(2):  # what was kept is as it was after the first time
            run.results.clear()
            assert run.run(inputs, kept, 0, 0) is kept
            assert set(range(number, 1 + max(plain))) <= set(run.results)
            for later in range(number, 1 + max(plain)):
                for got, want in zip(run.results[later], plain[later], strict=True):
                    assert torch.equal(got, want), (number, later)
    assert all(torch.equal(tensor, other) for tensor, other in zip(inputs, before, strict=True))


@pytest.mark.parametrize("mix", [*MIXES, "buffer"])
def test_what_is_not_seen_counts_as_read(mix: str) -> None:
    """From every call, with other batches in between; what can't be followed is run again from the start."""
    torch.manual_seed(0)
    model = Mixed(MIXES.get(mix, remembered), buffer=mix == "buffer").eval()
    batches = torch.randn(2, 4, 2, 3)
    run = Noted(model)
    run.learn((batches[0, :2],))
    plain = []
    for batch in batches:
        run.results.clear()
        run.run((batch,), None, 0, 0)
        plain.append(dict(run.results))
    with torch.no_grad():
        for batch, results in zip(batches, plain, strict=True):
            assert torch.equal(results[max(results)][0], model(batch.clone()))
    cuts = set()
    for number in plain[0]:
        kept = [run.run((batch,), None, number, number) for batch in batches]
        cuts |= {number} - {0 if each is not None else number for each in kept}
        for _ in range(2):
            for batch, each, want in zip(batches, kept, plain, strict=True):
                run.results.clear()
                run.run((batch,), each, 0, 0)
                for later in range(number, 1 + max(want)):
                    assert all(map(torch.equal, run.results[later], want[later])), (number, later)
    assert {1, 2, 3} <= cuts  # before any of it
    assert (max(plain[0]) in cuts) == (mix in FOLLOWED)


def test_what_reads_a_blank_makes_the_pass_start_anew() -> None:
    """Also where the model catches what it raises, or it is read as no operator does."""

    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
            self.peek = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            y = self.layers[1](x)
            if self.peek:
                try:
                    with torch._C.DisableTorchFunction():
                        x = x + 1
                except Exception:
                    x = torch.zeros(4, 3)
            return self.layers[2](y)  # type: ignore[no-any-return]

    model, x = Catching().eval(), torch.randn(4, 3)
    run = ResumableRun(model)
    run.learn((x[:2],))
    kept = run.run((x,), None, 3, 3)
    assert kept is not None
    run.run((x,), kept, 0, 0)
    model.peek = True
    with pytest.raises(DivergedError):
        run.run((x,), kept, 0, 0)


def test_only_what_later_calls_read_is_kept() -> None:
    model = nn.Sequential(nn.Linear(6, 100), nn.ReLU(), nn.Linear(100, 4)).eval()
    x = torch.randn(8, 6)
    run = ResumableRun(model)
    run.learn((x[:2],))
    assert run.lifetimes.held_bytes() == {1: 24.0, 2: 400.0, 3: 400.0}
    assert run.lifetimes.peak_bytes() == 800.0
    kept = run.run((x,), None, 3, 3)
    assert kept is not None
    assert [tensor.shape for tensor in kept.tensors.values()] == [(8, 100)]


def test_a_pass_that_takes_another_path_says_so() -> None:
    passes: list[int] = []  # not of the model: what a pass leaves in it is taken out

    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            passes.append(1)
            x = self.linear(x)
            return self.linear(x.relu() if len(passes) < 3 else x.sigmoid())  # type: ignore[no-any-return]

    model, x = Fickle().eval(), torch.randn(4, 6)
    run = ResumableRun(model)
    run.learn((x[:2],))
    kept = run.run((x,), None, 3, 3)
    with pytest.raises(DivergedError):
        run.run((x,), kept, 0, 0)


def gathered(model: nn.Module, x: Tensor, size: int, cuts: bool) -> list[LayerSample]:
    """Samples of all layers at all rows, in passes that begin at each layer or always at the start."""
    run = LayerPass(model)
    batches, fitted = batches_of((x,), 0.25, size)
    layers = sorted(find_layers(model, x[:2]), key=lambda layer: layer.ready)
    firsts = [min(layer.call for layer in layers[i:]) for i in range(len(layers))]
    gatherer = SampleGatherer(run, batches, fitted, lambda *_: firsts if cuts else [0] * len(layers))
    found = []
    for i, layer in enumerate(layers):
        channels = torch.arange(next(m for n, m in model.named_parameters() if n == layer.weight).shape[1])
        request = SampleRequest(layer, 10**6, channels, centers=True, outputs=True)
        (sample,) = gatherer.take([request], min(i + 1, len(layers) - 1), ahead=True)
        assert sample is not None
        found.append(sample)
    return found


def test_samples_are_the_same_however_the_passes_are_cut() -> None:
    torch.manual_seed(0)
    model, x = randomized(Stream()).eval(), torch.randn(16, 4, 5, 5)
    want = gathered(model, x, 16, cuts=False)
    assert [sample.fitted for sample in want] == [12 * 25] * 4
    assert [sample.others is not None for sample in want] == [False, True, True, False]  # the input itself is no result
    for size, cuts in ((16, True), (5, False), (5, True)):
        for one, other in zip(gathered(model, x, size, cuts), want, strict=True):
            assert one.fitted == other.fitted
            for name in ("inputs", "outputs", "others", "centers"):
                got, expected = getattr(one, name), getattr(other, name)
                assert (got is None) == (expected is None)
                if got is not None:
                    torch.testing.assert_close(got, expected)
