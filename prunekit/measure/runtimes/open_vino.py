"""OpenVINO on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from prunekit.errors import RunError
from prunekit.measure.runtimes.setting import Runtime, Session, Setting, Source

HINTS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
CAPABILITIES = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}


def open_vino() -> Runtime:
    """OpenVINO's CPU plug-in tuned for latency, on the exported file; `dtype` is the precision of its kernels."""
    return Runtime(_start, "onnx", ("cpu",), ("onnx", "onnxscript", "openvino"), "openvino", _refuse)


def _refuse(setting: Setting) -> str:
    import openvino

    if setting.memory_format != "contiguous":
        return "it chooses layouts itself"
    able = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return "" if CAPABILITIES[setting.dtype] in able else f"it has no {setting.dtype} kernels for this CPU"


def _start(source: Source, sample: Tensor, setting: Setting) -> Session:
    import openvino

    core, hint = openvino.Core(), HINTS[setting.dtype]
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": setting.threads,
        "INFERENCE_PRECISION_HINT": hint,
    }
    compiled = core.compile_model(core.read_model(source.files[setting.batch]), "CPU", options)
    used = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    if used != hint:  # it takes another where it has no kernels, without a word
        raise RunError(f"openvino: asked for {hint}, and its kernels compute in {used}")
    request, array = compiled.create_infer_request(), sample.numpy()
    return Session(
        lambda: request.infer([array], share_inputs=True, share_outputs=True),
        lambda found: [torch.from_numpy(found[output].copy()) for output in compiled.outputs],
    )
