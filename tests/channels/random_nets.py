"""Random small nets from a grammar of steps: each takes earlier results and adds one more."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hand_norms import GlobalResponse, StandardisedConv
from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d

Run = Callable[[Any, list[Tensor]], Tensor]
Step = tuple[
    Run, int
]  # what it computes from a net (the one that runs: nets are copied) and the results so far; its channels
SIZE = 5
WIDEST = 20

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    F.relu, F.silu, torch.sigmoid, F.hardswish, torch.tanh, F.leaky_relu, F.gelu, lambda x: F.elu(x) + 1,
    lambda x: x.clamp(min=0), lambda x: x**2, lambda x: x.abs().sqrt(), lambda x: 1 - x, lambda x: x.clone().relu_(),
    lambda x: torch.where(x > 0, x, 0.1 * x), lambda x: x.masked_fill(x < 0, 1.0), lambda x: (x > 0).to(x.dtype) * x,
)  # fmt: skip


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def biased_tanh(x: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(x + bias)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # deprecated, and still in many models
    scripted_swish, scripted_bias = torch.jit.script(swish), torch.jit.script(biased_tanh)


class StepModule(nn.Module):
    """One step as a module of its own."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def forward(self, net: Any, results: list[Tensor]) -> Tensor:
        return self.run(net, results)


class RandomNet(nn.Module):
    """Runs a program; every module it needs is made when the program is read."""

    def __init__(self, program: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        self.widths = [3]
        self.steps = nn.ModuleList()
        for name, first, second in program:
            run, width = STEPS[name](self, first, second)
            self.steps.append(StepModule(run))
            self.widths.append(width)
        last = self.widths[-3:]
        self.head, self.flat = nn.Linear(sum(last), 4), nn.Linear(last[-1] * SIZE * SIZE, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        results = [x]
        for step in self.steps:
            results.append(step(self, results))
        pooled = torch.cat([F.adaptive_avg_pool2d(result, 1).flatten(1) for result in results[-3:]], 1)
        return self.head(pooled), self.flat(results[-1].flatten(1))

    def own(self, module: nn.Module) -> int:
        self.parts.append(module)
        return len(self.parts) - 1

    def pick(self, number: int) -> int:
        """One of the latest four results, so that programs grow deep."""
        return len(self.widths) - 1 - number % min(4, len(self.widths))


STEPS: dict[str, Callable[[RandomNet, int, int], Step]] = {}


def step(function: Callable[[RandomNet, int, int], Step]) -> Callable[[RandomNet, int, int], Step]:
    STEPS[function.__name__] = function
    return function


def on(at: int, function: Callable[[Tensor], Tensor]) -> Run:
    return lambda net, results: function(results[at])


def through(at: int, part: int) -> Run:
    return lambda net, results: net.parts[part](results[at])


@step
def conv(net: RandomNet, first: int, second: int) -> Step:
    at, width, kernel = net.pick(first), 4 + 2 * (second % 3), 1 + 2 * (second % 2)
    return through(
        at, net.own(nn.Conv2d(net.widths[at], width, kernel, padding=kernel // 2, bias=second % 4 > 0))
    ), width


@step
def grouped(net: RandomNet, first: int, second: int) -> Step:
    at = net.pick(first)
    inputs = net.widths[at]
    groups = [g for g in (2, 3, 4, inputs) if inputs % g == 0][second % 2 - 1]
    width = groups * (1 + second % 3)
    if second % 2:
        return through(at, net.own(nn.Conv2d(inputs, width, 3, padding=1, groups=groups))), width
    return through(at, net.own(nn.ConvTranspose2d(inputs, width, 3, padding=1, groups=groups))), width


@step
def transposed(net: RandomNet, first: int, second: int) -> Step:
    at, width = net.pick(first), 4 + second % 4
    return through(at, net.own(nn.ConvTranspose2d(net.widths[at], width, 3, padding=1))), width


@step
def norm(net: RandomNet, first: int, second: int) -> Step:
    at = net.pick(first)
    width = net.widths[at]
    modules = (nn.BatchNorm2d(width), nn.BatchNorm2d(width, affine=False), nn.PReLU(width), nn.Dropout(0.3))
    return through(at, net.own(modules[second % 4])), width


@step
def norm_over_channels(net: RandomNet, first: int, second: int) -> Step:
    at = net.pick(first)
    width = net.widths[at]
    groups = [g for g in (1, 2, 3, width) if width % g == 0][second // 5 % 3 - 1]
    modules = (nn.GroupNorm(groups, width), nn.GroupNorm(groups, width, affine=False), LayerNorm2d(width),
               GlobalResponse(width), StandardisedConv(width, width, 3, padding=1))  # fmt: skip
    return through(at, net.own(modules[second % 5])), width


@step
def activation(net: RandomNet, first: int, second: int) -> Step:
    at = net.pick(first)
    return on(at, ACTIVATIONS[second % len(ACTIVATIONS)]), net.widths[at]


@step
def residual(net: RandomNet, first: int, second: int) -> Step:
    a, b = net.pick(first), net.pick(second)
    project = net.own(nn.Conv2d(net.widths[b], net.widths[a], 1))

    def run(net: Any, results: list[Tensor]) -> Tensor:
        out = net.parts[project](results[b])
        if second % 2:
            out += results[a]
            return out
        return results[a] - out

    return run, net.widths[a]


@step
def gate(net: RandomNet, first: int, second: int) -> Step:
    a, b = net.pick(first), net.pick(second)
    if net.widths[a] == net.widths[b]:
        return (lambda net, results: results[a] * results[b].sigmoid()), net.widths[a]
    squeeze = net.own(nn.Conv2d(net.widths[b], net.widths[a], 1))

    def run(net: Any, results: list[Tensor]) -> Tensor:
        return results[a] * net.parts[squeeze](F.adaptive_avg_pool2d(results[b], 1)).sigmoid()

    return run, net.widths[a]


@step
def cat(net: RandomNet, first: int, second: int) -> Step:
    a, b = net.pick(first), net.pick(second)
    width = net.widths[a] + net.widths[b]
    if width > WIDEST:
        return conv(net, first, second)
    return (lambda net, results: torch.cat([results[a], results[b]], 1)), width


@step
def halves(net: RandomNet, first: int, second: int) -> Step:
    at = net.pick(first)
    if net.widths[at] % 2:
        return activation(net, first, second)

    def run(x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        return (F.glu(x, 1), a * b.tanh(), torch.cat([b, a.relu()], 1))[second % 3]

    return on(at, run), net.widths[at] // (1 if second % 3 == 2 else 2)


@step
def shuffle(net: RandomNet, first: int, second: int) -> Step:
    at = net.pick(first)
    if net.widths[at] % 2 or net.widths[at] == 2:  # of two, none can go: the trial's business
        return activation(net, first, second)

    def run(x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)

    return on(at, run), net.widths[at]


@step
def spatial(net: RandomNet, first: int, second: int) -> Step:
    at = net.pick(first)
    functions: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: F.avg_pool2d(x, 3, 1, 1),
        lambda x: F.max_pool2d(x, 3, 1, 1),
        lambda x: F.pad(x, (1, 0, 0, 1), value=0.5)[:, :, 1:, :-1],
        lambda x: F.interpolate(x, scale_factor=2)[:, :, ::2, ::2],
        lambda x: x - 0.5 * x.mean((2, 3), keepdim=True),
        lambda x: x.flip(1, 2),
        lambda x: x.flatten(2).softmax(-1).view_as(x),
    )
    return on(at, functions[second % 7]), net.widths[at]


@step
def scale(net: RandomNet, first: int, second: int) -> Step:
    at = net.pick(first)
    name = f"scale{len(net.widths)}"
    net.register_parameter(name, nn.Parameter(torch.ones(net.widths[at], 1, 1)))
    if second % 2:
        return (lambda net, results: results[at] * getattr(net, name)), net.widths[at]
    return (lambda net, results: results[at] + getattr(net, name)), net.widths[at]


@step
def tokens(net: RandomNet, first: int, second: int) -> Step:
    at, width = net.pick(first), 4 + second % 5
    linear = net.own(nn.Linear(net.widths[at], width))

    def run(net: Any, results: list[Tensor]) -> Tensor:
        return net.parts[linear](results[at].flatten(2).mT).mT.unflatten(2, (SIZE, SIZE))

    return run, width


@step
def twice(net: RandomNet, first: int, second: int) -> Step:
    at = net.pick(first)
    layer = net.own(nn.Conv2d(net.widths[at], net.widths[at], 1))
    return (lambda net, results: net.parts[layer](net.parts[layer](results[at]).relu())), net.widths[at]


@step
def mixed(net: RandomNet, first: int, second: int) -> Step:
    """What may not be pruned: statistics over the channels."""
    at = net.pick(first)
    functions: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: x.softmax(1),
        lambda x: x - 0.5 * x.mean(1, keepdim=True),
        lambda x: x * x.sigmoid().sum(1, keepdim=True),
        lambda x: x + x.sum(1, keepdim=True),
        lambda x: x[:, torch.arange(x.shape[1] - 1, -1, -1)],
    )
    return on(at, functions[second % 5]), net.widths[at]


@step
def scripted(net: RandomNet, first: int, second: int) -> Step:
    """A function that torch runs by itself, with a parameter or without."""
    at = net.pick(first)
    if second % 2:
        return on(at, scripted_swish), net.widths[at]
    name = f"bias{len(net.widths)}"
    net.register_parameter(name, nn.Parameter(torch.ones(net.widths[at], 1, 1)))
    return (lambda net, results: scripted_bias(results[at], getattr(net, name))), net.widths[at]


@step
def spectrum(net: RandomNet, first: int, second: int) -> Step:
    """A filter in the frequencies of a map: a complex parameter for each channel."""
    at = net.pick(first)
    name = f"filter{len(net.widths)}"
    real, imaginary = torch.ones(net.widths[at], 1, 1), torch.full((net.widths[at], 1, 1), 0.5)
    net.register_parameter(name, nn.Parameter(torch.complex(real, imaginary)))
    return (lambda net, results: filtered(results[at], getattr(net, name))), net.widths[at]


def filtered(x: Tensor, weight: Tensor) -> Tensor:
    return torch.fft.ifft2(torch.fft.fft2(x) * weight).real


@step
def narrower(net: RandomNet, first: int, second: int) -> Step:
    """A part that names a precision of its own."""
    at, dtype = net.pick(first), (torch.float16, torch.bfloat16)[second % 2]
    return on(at, lambda x: x.to(dtype).relu().to(x.dtype)), net.widths[at]


@step
def chance(net: RandomNet, first: int, second: int) -> Step:
    """Random numbers of Python's and of NumPy's, while the net is trained."""
    at = net.pick(first)

    def run(net: Any, results: list[Tensor]) -> Tensor:
        x = results[at]
        if not net.training:
            return x
        drawn = [random.random() for _ in x] if second % 2 else np.random.rand(len(x)).tolist()
        return x * torch.tensor(drawn, dtype=x.dtype)[:, None, None, None]

    return run, net.widths[at]


@step
def one_by_one(net: RandomNet, first: int, second: int) -> Step:
    """Images go through a layer or a function one by one: as many calls as images."""
    at, width = net.pick(first), 4 + second % 3
    part = net.own(nn.Conv2d(net.widths[at], width, 1))

    def run(net: Any, results: list[Tensor]) -> Tensor:
        if second % 2:
            return torch.cat([net.parts[part](image[None]) for image in results[at]])
        return net.parts[part](torch.stack([image / (1 + image.abs().amax()) for image in results[at]]))

    return run, width


@step
def shared(net: RandomNet, first: int, second: int) -> Step:
    """One layer on maps of two sizes, as the heads of detectors are."""
    at, width = net.pick(first), 4 + second % 3
    part = net.own(nn.Conv2d(net.widths[at], width, 3, padding=1))

    def run(net: Any, results: list[Tensor]) -> Tensor:
        large, small = net.parts[part](results[at]), net.parts[part](F.avg_pool2d(results[at], 2))
        return large + F.adaptive_avg_pool2d(small.relu(), 1)

    return run, width


@step
def token(net: RandomNet, first: int, second: int) -> Step:
    """A view of a parameter goes through a layer, as class tokens and latents do."""
    at = net.pick(first)
    name, width = f"token{len(net.widths)}", 4 + second % 3
    part = net.own(nn.Conv2d(width, net.widths[at], 1))
    net.register_parameter(name, nn.Parameter(torch.ones(1, width, 1, 1)))

    def run(net: Any, results: list[Tensor]) -> Tensor:
        x = results[at]
        return x + net.parts[part](getattr(net, name).expand(len(x), -1, -1, -1))

    return run, net.widths[at]
