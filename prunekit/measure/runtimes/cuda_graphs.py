"""The eager kernels of one forward, captured as a CUDA graph and replayed."""

from __future__ import annotations

import torch

from prunekit.inputs import call
from prunekit.measure.runtimes.registry import register_runtime
from prunekit.measure.runtimes.setting import Sample, Session, Setting, Source
from prunekit.measure.runtimes.torch_modules import placed
from prunekit.nested import gather

CAPTURE_RUNS = 3
"""Forwards on a side stream before a graph is captured, as torch's notes on CUDA graphs ask for."""


# Activations lie in the graph's pool from when it is captured: a replay allocates nothing that could be counted.
@register_runtime(
    "cudagraphs",
    about="the eager kernels of one forward, captured as a CUDA graph and replayed",
    devices=("cuda",),
    measures_memory=False,
)
def cuda_graphs(source: Source, sample: Sample, setting: Setting) -> Session:
    """Captures one forward and replays it."""
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
