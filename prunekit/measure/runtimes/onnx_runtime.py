"""ONNX Runtime on the CPU."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunekit.formats.files.node_modules import NodeModules
from prunekit.measure.runtimes.runtime import RUNTIMES, register_runtime
from prunekit.measure.runtimes.session import INT8, LayerClock, Sample, Session, Setting, Source
from prunekit.utils.tensors import gather

KERNEL, FORWARD = "_kernel_time", "model_run"
"""The profiler's names for the time of a node, and for that of the whole pass, which it writes last."""
ROUNDING_US = 0.5
"""Mean of the fractions of microseconds that the profiler cuts off."""


def _refuse(setting: Setting) -> str:
    if setting.dtype not in ("float32", INT8):
        return f"its CPU kernels compute in float32 and int8, and {setting.dtype} models run on casts"
    return "" if setting.memory_format == "contiguous" else "it chooses layouts itself"


@register_runtime(
    "onnxruntime",
    about="ONNX Runtime's CPU provider, on the exported file",
    carrier="onnx",
    devices=("cpu",),
    packages=("onnx", "onnxscript", "onnxruntime"),
    install="pip install 'prunekit[export]'",
    refuse=_refuse,
    times_layers=True,
    quantizer="onnxruntime",
)
def onnx_runtime(source: Source, sample: Sample, setting: Setting) -> Session:
    """Open a session that has one pool of `threads` threads."""
    import onnxruntime

    file = source.files[RUNTIMES.get("onnxruntime").file_key(setting)]
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(one.numpy()) for one in gather(sample)]
    run = _run_of(open_session(file, setting.threads), values)
    return Session(
        run, lambda found: [_tensor(value) for value in found], lambda: _layer_clock(file, values, setting.threads)
    )


def _run_of(session: Any, values: Sequence[Any]) -> Callable[[], Any]:
    names = [output.name for output in session.get_outputs()]
    feed = {entry.name: value for entry, value in zip(session.get_inputs(), values, strict=True)}
    return lambda: session.run_with_ort_values(names, feed)


def _layer_clock(file: Path, values: Sequence[Any], threads: int) -> LayerClock:
    """Return the profiler of ONNX Runtime, in a session of its own; it writes a file next to the model's."""
    session, modules = open_session(file, threads, profile=file.with_suffix(".profile")), NodeModules(file)

    def passes(count: int) -> list[dict[str | None, float]]:
        written = Path(session.end_profiling())
        events = json.loads(written.read_text(encoding="utf-8"))
        written.unlink()
        return times_by_module(events, modules)[-count:]

    return LayerClock(_run_of(session, values), passes)


def times_by_module(events: Sequence[Mapping[str, Any]], modules: NodeModules) -> list[dict[str | None, float]]:
    """Return the milliseconds of each forward by module, from the profiler's events."""
    found: list[dict[str | None, float]] = []
    times: dict[str | None, float] = defaultdict(float)
    for event in events:
        if event["name"].endswith(KERNEL):
            kind = event["args"]["op_name"].removeprefix("Fused").removeprefix("QLinear")
            path = modules.of(event["name"].removesuffix(KERNEL), convolution=kind == "Conv")
            times[path] += (event["dur"] + ROUNDING_US) / 1000
        elif event["name"] == FORWARD:
            found.append(dict(times))
            times.clear()
    return found


def open_session(file: Path, threads: int, profile: Path | None = None) -> Any:
    """Return a session on the CPU with this many threads; its profiler is on if `profile` names its file's prefix."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    # Models take turns in one process: threads of one must not spin while another is timed.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _tensor(value: Any) -> Tensor:
    return torch.from_numpy(value.numpy().copy())
