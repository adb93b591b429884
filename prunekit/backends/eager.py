"""PyTorch's own runtimes: eager, `torch.compile` with fixed shapes, and CUDA graphs of the eager kernels.

On the CPU, weights are moved in memory while they are timed: where they lie is random, and may change a time by more
than the effect that is measured. A process lays a model out once, and all that it measures is of that layout, however
narrow the interval is (Mytkowicz et al., "Producing wrong data without doing anything obviously wrong!", 2009). If the
weights are moved every other round, a process measures many layouts (Curtsinger and Berger, "Stabilizer", 2013). How
much faster mobilenet_v2 at a quarter of its width is in eager came out 2.6 % apart between twelve processes with a
layout each, 12 % between eight in another hour, and 1.0 % between ten that moved it (standard deviations; AMD EPYC, one
thread, batch 1, 224 px).
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from prunekit.backends.backend import register_runtime
from prunekit.backends.session import (
    LayerClock,
    OperatorTimer,
    Sample,
    Session,
    Setting,
    Source,
    in_dtype,
    measure_floor,
)
from prunekit.hooks.model_copy import copied
from prunekit.utils.context import set_mode
from prunekit.utils.inputs import call
from prunekit.utils.tensors import gather, lies_channels_last, map_tensors

MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def layout_of(module: nn.Module, asked: str) -> str:
    """Return the memory format that a module is run in: channels last if its weights are, else what was asked for."""
    return "channels_last" if lies_channels_last(module) else asked


def placed(source: Source, sample: Sample, setting: Setting) -> tuple[nn.Module, Sample]:
    """Return a copy of the module in eval mode and the sample, in the device, dtype and format of a setting."""
    assert source.module is not None
    form = MEMORY_FORMATS[layout_of(source.module, setting.memory_format)]
    device, dtype = torch.device(setting.device), setting.torch_dtype
    module = set_mode(copied(source.module, device, dtype).to(memory_format=form), False)
    # channels-last is a layout of images: other inputs stay as they are, like the parameters of other layers
    return module, map_tensors(
        in_dtype(sample, dtype),
        lambda one: one.to(device, memory_format=form if one.dim() == 4 else torch.preserve_format),
    )


def on_cpu(setting: Setting) -> bool:
    """Return whether a setting is on the CPU, where weights are moved in memory while they are timed."""
    return setting.device == "cpu"


@register_runtime(
    "eager",
    about="the PyTorch module as it is",
    devices=("cpu", "cuda", "mps"),
    times_layers=True,
    moves_weights=on_cpu,
)
def eager(source: Source, sample: Sample, setting: Setting) -> Session:
    """Call the module."""
    module, inputs = placed(source, sample, setting)
    mover = WeightMover(module) if on_cpu(setting) else None
    return Session(lambda: call(module, inputs), layers=lambda: _layer_clock(module, inputs), move=mover)


def _layer_clock(module: nn.Module, inputs: Sample) -> LayerClock:
    device = gather(inputs)[0].device
    timer = OperatorTimer(module, inputs, device, measure_floor(device).clock_ms)

    def passes(count: int) -> list[Mapping[str | None, float]]:
        found: list[dict[str | None, float]] = [defaultdict(float) for _ in timer.passes[-count:]]
        for by_module, times in zip(found, timer.passes[-count:], strict=True):
            for (path, _), ms in times.items():
                by_module[path] += ms
        return [*found]

    return LayerClock(timer, passes)


MOST_MODELS = 64
"""Models of one class that are compiled in one process."""


@register_runtime(
    "compile",
    about="torch.compile with its defaults and fixed shapes",
    devices=("cpu", "cuda"),
    measures_memory=False,
    moves_weights=on_cpu,
    forget=torch.compiler.reset,
)
def compiled(source: Source, sample: Sample, setting: Setting) -> Session:
    """Compile the module, as part of starting the session."""
    module, inputs = placed(source, sample, setting)
    compiled = torch.compile(module, dynamic=False)
    # Each model is a recompilation of the same code, and past a limit torch goes back to eager without an error.
    with torch._dynamo.config.patch(recompile_limit=MOST_MODELS, fail_on_recompile_limit_hit=True):
        call(compiled, inputs)
    return Session(lambda: call(compiled, inputs), move=WeightMover(module) if on_cpu(setting) else None)


CAPTURE_RUNS = 3
"""Forwards on a side stream before a graph is captured, as torch's notes on CUDA graphs ask for."""


# Activations are in the graph's pool since its capture: a replay allocates nothing that could be counted.
@register_runtime(
    "cudagraphs",
    about="the eager kernels of one forward, captured as a CUDA graph and replayed",
    devices=("cuda",),
    measures_memory=False,
)
def cuda_graphs(source: Source, sample: Sample, setting: Setting) -> Session:
    """Capture one forward and replay it."""
    module, inputs = placed(source, sample, setting)
    device = gather(inputs)[0].device
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(CAPTURE_RUNS):
            call(module, inputs)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call(module, inputs)
    return Session(graph.replay, lambda _: output)


MOST_BYTES = 2**21
"""Largest gap before a model's tensors. There are none between them, as in a model that was just built: small tensors
would need more pages."""


class WeightMover:
    """Moves a module's parameters and buffers to other addresses in memory when it is called; nothing else changes.

    The gap before them stays allocated until the next call, so that they are moved elsewhere again.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.random, self.gap = module, random.Random(), torch.empty(0)

    def __call__(self) -> None:
        """Move them, behind a gap of random size."""
        self.gap = torch.empty(self.random.randrange(MOST_BYTES), dtype=torch.uint8)
        tensors = list(_movable(self.module))
        with torch.no_grad():
            elsewhere = [_copy(tensor) for tensor in tensors]  # all before any is free: none takes the place of another
        for tensor, data in zip(tensors, elsewhere, strict=True):
            tensor.data = data


def _copy(tensor: Tensor) -> Tensor:
    with torch.inference_mode(tensor.is_inference()):
        return tensor.data.clone()


@contextmanager
def weight_movers(*modules: nn.Module) -> Iterator[list[WeightMover]]:
    """Yield the movers of a user's modules, and put the tensors back afterwards, as other code may share them."""
    before = {tensor: tensor.data for module in modules for tensor in _movable(module)}
    try:
        yield [WeightMover(module) for module in modules]
    finally:
        for tensor, data in before.items():
            tensor.data = data


def _movable(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors on the CPU that share their memory with no other and have no gaps, which copies would lose."""
    for tensor in (*module.parameters(), *module.buffers()):
        plain = tensor.layout == torch.strided and type(tensor.data) is Tensor and tensor.device.type == "cpu"
        if plain and torch.ops.aten.is_non_overlapping_and_dense(tensor):
            yield tensor
