"""Runtimes of torch itself: eager, `torch.compile`, and CUDA graphs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import nn

from prunekit.channels.copying import copied
from prunekit.context import set_mode
from prunekit.layout import lies_channels_last
from prunekit.measure.placing import Placement
from prunekit.measure.runtimes.setting import LayerClock, Runtime, Sample, Session, Setting, Source, in_dtype

CAPTURE_RUNS = 3
"""Forwards on a side stream before a graph is captured, as torch's notes on CUDA graphs ask for."""
MOST_MODELS = 64
"""Of one class that are compiled beside each other."""
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def eager() -> Runtime:
    """The module as it is; its layers by their ATen operators."""

    def start(source: Source, sample: Sample, setting: Setting) -> Session:
        module, placed = _placed(source, sample, setting)
        return Session(lambda: module(*placed), layers=lambda: _layers(module, placed), move=_move(module, setting))

    return Runtime(start, "module", ("cpu", "cuda", "mps"), times_layers=True, moves_weights=_on_cpu)


def _on_cpu(setting: Setting) -> bool:
    return setting.device == "cpu"


def _move(module: nn.Module, setting: Setting) -> Placement | None:
    return Placement(module) if _on_cpu(setting) else None


def _layers(module: nn.Module, placed: Sample) -> LayerClock:
    from prunekit.measure.operators import OperatorTimer, floor  # which other measurements start without

    device = placed[0].device
    timer = OperatorTimer(module, placed, device, floor(device).clock_ms)

    def passes(count: int) -> list[dict[str | None, float]]:
        return [_by_module(times) for times in timer.passes[-count:]]

    return LayerClock(timer, passes)


def _by_module(times: Mapping[tuple[str, str], float]) -> dict[str | None, float]:
    found: dict[str | None, float] = defaultdict(float)
    for (path, _), ms in times.items():
        found[path] += ms
    return dict(found)


def compiled() -> Runtime:
    """`torch.compile` with its defaults and fixed shapes; compiling is part of starting the session."""

    def start(source: Source, sample: Sample, setting: Setting) -> Session:
        module, placed = _placed(source, sample, setting)
        compiled = torch.compile(module, dynamic=False)
        # Each model is a recompilation of the same code, and past a limit torch goes back to eager without an error.
        with torch._dynamo.config.patch(recompile_limit=MOST_MODELS, fail_on_recompile_limit_hit=True):
            compiled(*placed)
        return Session(lambda: compiled(*placed), move=_move(module, setting))

    forget, devices = torch.compiler.reset, ("cpu", "cuda")
    return Runtime(start, "module", devices, measures_memory=False, moves_weights=_on_cpu, forget=forget)


def cuda_graphs() -> Runtime:
    """The eager kernels of one forward, captured as a CUDA graph and replayed."""

    def start(source: Source, sample: Sample, setting: Setting) -> Session:
        module, placed = _placed(source, sample, setting)
        side = torch.cuda.Stream(placed[0].device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(placed[0].device))
        with torch.cuda.stream(side):
            for _ in range(CAPTURE_RUNS):
                module(*placed)
        torch.cuda.current_stream(placed[0].device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = module(*placed)
        return Session(graph.replay, lambda _: output)

    # Activations lie in the graph's pool from when it is captured: a replay allocates nothing that could be counted.
    return Runtime(start, "module", ("cuda",), measures_memory=False)


def layout_of(module: nn.Module, asked: str) -> str:
    """The memory format that a module is run in: what is asked for, but a model with channels last stays so."""
    return "channels_last" if lies_channels_last(module) else asked


def _placed(source: Source, sample: Sample, setting: Setting) -> tuple[nn.Module, Sample]:
    assert source.module is not None
    form = FORMATS[layout_of(source.module, setting.memory_format)]
    device, dtype = torch.device(setting.device), setting.torch_dtype
    module = set_mode(copied(source.module, device, dtype).to(memory_format=form), False)
    # channels-last is a layout of images: other inputs stay as they are, as the parameters of other layers do
    return module, tuple(
        one.to(device, memory_format=form if one.dim() == 4 else torch.preserve_format)
        for one in in_dtype(sample, dtype)
    )
