"""PyTorch's own runtimes: eager, `torch.compile` with fixed shapes, and CUDA graphs of the eager kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import nn

from prunekit.hooks.model_copy import copied
from prunekit.measure.latency.memory_layout import WeightMover
from prunekit.measure.runtimes.runtime import register_runtime
from prunekit.measure.runtimes.session import LayerClock, Sample, Session, Setting, Source, in_dtype
from prunekit.utils.context import set_mode
from prunekit.utils.inputs import call
from prunekit.utils.tensors import gather, lies_channels_last, map_tensors

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def layout_of(module: nn.Module, asked: str) -> str:
    """Return the memory format that a module is run in: that of the setting, unless its weights are channels last."""
    return "channels_last" if lies_channels_last(module) else asked


def placed(source: Source, sample: Sample, setting: Setting) -> tuple[nn.Module, Sample]:
    """Return a copy of the module in eval mode and the sample, in the device, dtype and format of a setting."""
    assert source.module is not None
    form = FORMATS[layout_of(source.module, setting.memory_format)]
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


def weight_mover(module: nn.Module, setting: Setting) -> WeightMover | None:
    """Return the mover of a module's weights; None on devices other than the CPU."""
    return WeightMover(module) if on_cpu(setting) else None


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
    mover = weight_mover(module, setting)
    return Session(lambda: call(module, inputs), layers=lambda: _layer_clock(module, inputs), move=mover)


def _layer_clock(module: nn.Module, inputs: Sample) -> LayerClock:
    from prunekit.measure.causes.operator_times import (  # which other measurements do not need
        OperatorTimer,
        measure_floor,
    )

    device = gather(inputs)[0].device
    timer = OperatorTimer(module, inputs, device, measure_floor(device).clock_ms)

    def passes(count: int) -> list[dict[str | None, float]]:
        return [_by_module(times) for times in timer.passes[-count:]]

    return LayerClock(timer, passes)


def _by_module(times: Mapping[tuple[str, str], float]) -> dict[str | None, float]:
    found: dict[str | None, float] = defaultdict(float)
    for (path, _), ms in times.items():
        found[path] += ms
    return dict(found)


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
    return Session(lambda: call(compiled, inputs), move=weight_mover(module, setting))


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
