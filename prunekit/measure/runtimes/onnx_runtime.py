"""ONNX Runtime on the CPU."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunekit.measure.runtimes.places import Places
from prunekit.measure.runtimes.registry import register_runtime
from prunekit.measure.runtimes.setting import LayerClock, Sample, Session, Setting, Source
from prunekit.nested import gather

KERNEL, FORWARD = "_kernel_time", "model_run"
"""How the profiler names the time of a node, and that of all of them, which it writes after them."""
CUT_OFF_US = 0.5
"""The profiler cuts off fractions of microseconds."""


def _refuse(setting: Setting) -> str:
    if setting.dtype != "float32":
        return f"its CPU kernels compute in float32, and {setting.dtype} models run on casts"
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
)
def onnx_runtime(source: Source, sample: Sample, setting: Setting) -> Session:
    """Opens a session that has one pool of `threads` threads."""
    import onnxruntime

    file = source.files[setting.batch, "float32"]
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(one.numpy()) for one in gather(sample)]
    run = _run_of(open_session(file, setting.threads), values)
    return Session(
        run, lambda found: [_tensor(value) for value in found], lambda: _layers(file, values, setting.threads)
    )


def _run_of(session: Any, values: Sequence[Any]) -> Callable[[], Any]:
    names = [output.name for output in session.get_outputs()]
    feed = {entry.name: value for entry, value in zip(session.get_inputs(), values, strict=True)}
    return lambda: session.run_with_ort_values(names, feed)


def _layers(file: Path, values: Sequence[Any], threads: int) -> LayerClock:
    """The profiler of ONNX Runtime, in a session of its own; it writes a file beside the model's."""
    session, places = open_session(file, threads, profile=file.with_suffix(".profile")), Places(file)

    def passes(count: int) -> list[dict[str | None, float]]:
        written = Path(session.end_profiling())
        events = json.loads(written.read_text(encoding="utf-8"))
        written.unlink()
        return by_module(events, places)[-count:]

    return LayerClock(_run_of(session, values), passes)


def by_module(events: Sequence[Mapping[str, Any]], places: Places) -> list[dict[str | None, float]]:
    """The milliseconds of each forward by module, from what the profiler wrote, in its order."""
    found: list[dict[str | None, float]] = []
    times: dict[str | None, float] = defaultdict(float)
    for event in events:
        if event["name"].endswith(KERNEL):
            kind = event["args"]["op_name"].removeprefix("Fused")
            place = places.of(event["name"].removesuffix(KERNEL), convolution=kind == "Conv")
            times[place] += (event["dur"] + CUT_OFF_US) / 1000
        elif event["name"] == FORWARD:
            found.append(dict(times))
            times.clear()
    return found


def open_session(file: Path, threads: int, profile: Path | None = None) -> Any:
    """A session on the CPU with this many threads; with its profiler on where it is told how its file's name begins."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    # Models take turns in one process: the threads of one must not spin while another is timed.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _tensor(value: Any) -> Tensor:
    return torch.from_numpy(value.numpy().copy())
