"""ONNX Runtime on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunekit.measure.runtimes.setting import Runtime, Session, Setting, Source


def onnx_runtime() -> Runtime:
    """ONNX Runtime's CPU provider, on the exported file; one session has one pool of `threads` threads."""
    return Runtime(_start, "onnx", ("cpu",), ("onnx", "onnxscript", "onnxruntime"), "export", _refuse)


def _refuse(setting: Setting) -> str:
    if setting.dtype != "float32":
        return f"its CPU kernels compute in float32, and {setting.dtype} models run on casts"
    return "" if setting.memory_format == "contiguous" else "it chooses layouts itself"


def _start(source: Source, sample: Tensor, setting: Setting) -> Session:
    import onnxruntime

    session = open_session(source.files[setting.batch], setting.threads)
    names = [output.name for output in session.get_outputs()]
    feed = {session.get_inputs()[0].name: onnxruntime.OrtValue.ortvalue_from_numpy(sample.numpy())}
    return Session(lambda: session.run_with_ort_values(names, feed), lambda found: [_tensor(value) for value in found])


def open_session(file: Path, threads: int) -> Any:
    """A session on the CPU with this many threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # Models take turns in one process: the threads of one must not spin while another is timed.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _tensor(value: Any) -> Tensor:
    return torch.from_numpy(value.numpy().copy())
