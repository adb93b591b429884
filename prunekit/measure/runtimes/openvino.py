"""OpenVINO on the CPU."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prunekit.errors import RunError
from prunekit.formats.files.node_modules import NodeModules
from prunekit.formats.openvino import openvino_core, sparse_options
from prunekit.measure.latency.timing import Times
from prunekit.measure.runtimes.runtime import RUNTIMES, register_runtime
from prunekit.measure.runtimes.session import INT8, LayerClock, Sample, Session, Setting, Source
from prunekit.utils.tensors import gather

HINTS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", INT8: "f32"}
"""Precisions of the kernels; in a quantized file, of those that the file does not have in int8."""
CAPABILITIES = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16", INT8: "INT8"}

ROUNDING_US = 0.5
"""Mean of the fractions of microseconds that the counters cut off."""


def _refuse(setting: Setting) -> str:
    if setting.memory_format != "contiguous":
        return "it chooses layouts itself"
    able = openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return "" if CAPABILITIES[setting.dtype] in able else f"it has no {setting.dtype} kernels for this CPU"


@register_runtime(
    "openvino",
    about="OpenVINO's CPU plug-in tuned for latency, on the exported file",
    carrier="onnx",
    devices=("cpu",),
    packages=("onnx", "onnxscript", "openvino"),
    install="pip install 'prunekit[openvino]'",
    refuse=_refuse,
    times_layers=True,
    quantizer="nncf",
)
def open_vino(source: Source, sample: Sample, setting: Setting) -> Session:
    """Compile the file; the setting's dtype is the precision of the kernels."""
    key = (setting.batch, "float32") if setting.dtype != INT8 else RUNTIMES.get("openvino").file_key(setting)
    file, arrays = source.files[key], [one.numpy() for one in gather(sample)]
    exported = source.files[setting.batch, "float32"]
    compiled = compiled_file(file, setting)
    request = compiled.create_infer_request()
    return Session(
        lambda: request.infer(arrays, share_inputs=True, share_outputs=True),
        lambda found: [torch.from_numpy(found[output].copy()) for output in compiled.outputs],
        lambda: _LayerCounters(compiled_file(file, setting, PERF_COUNT=True), NodeModules(exported), arrays).clock(),
    )


def compiled_file(file: Path, setting: Setting, **others: Any) -> Any:
    """Return a file, ONNX or OpenVINO's own, compiled for a setting, whose dtype is the precision of the kernels.

    Raises:
        RunError: its kernels compute in another precision.
    """
    core, hint = openvino_core(), HINTS[setting.dtype]
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": setting.threads,
        "INFERENCE_PRECISION_HINT": hint,
    }
    compiled = core.compile_model(core.read_model(file), "CPU", options | sparse_options() | others)
    used = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    if used != hint:  # without kernels for the hint, it silently takes another
        raise RunError(f"openvino: asked for {hint}, and its kernels compute in {used}")
    return compiled


class _LayerCounters:
    """The counters of OpenVINO's operators: means over all forwards so far, in whole microseconds."""

    def __init__(self, compiled: Any, modules: NodeModules, arrays: list[Any]) -> None:
        self.request, self.arrays = compiled.create_infer_request(), arrays
        self.module_of = _modules_of(compiled.get_runtime_model(), modules)
        self.means_us: list[list[float]] = []

    def clock(self) -> LayerClock:
        return LayerClock(self.run, self.passes)

    def run(self) -> None:
        self.request.infer(self.arrays, share_inputs=True, share_outputs=True)
        self.means_us.append([node.real_time.total_seconds() * 1e6 for node in self.request.profiling_info])

    def passes(self, count: int) -> list[dict[str | None, float]]:
        last_us = undisturbed_means(np.array(self.means_us), count)
        times: dict[str | None, float] = defaultdict(float)
        for node, us in zip(self.request.profiling_info, last_us, strict=True):
            if node.status == node.Status.EXECUTED:
                times[self.module_of.get(node.node_name)] += float(us) / 1000
        return [dict(times)]


def undisturbed_means(means: Times, count: int) -> Times:
    """Return the time of each operator, from running means that are cut off to whole numbers.

    The time of one forward is the difference of two sums, and as coarse as the number of forwards before; the mean
    over several is finer. Forwards that another process disturbed are left out.

    Args:
        means: (forwards, operators), each over all forwards so far.
    """
    total = len(means)
    sums = np.vstack([np.zeros_like(means[:1]), (means + ROUNDING_US) * np.arange(1, total + 1)[:, None]])
    each = np.diff(sums, axis=0)[-count:]
    kept = each <= 2 * np.median(each, axis=0) + 4 * total
    found: Times = np.maximum(0.0, np.mean(each, axis=0, where=kept))
    return found


def _modules_of(executed: Any, modules: NodeModules) -> dict[str, str]:
    """Return the module of every operator that OpenVINO executes: that of the first node that it was made of."""
    found: dict[str, str] = {}
    for node in executed.get_ordered_ops():
        info = node.get_rt_info()
        names = info["originalLayersNames"].astype(str).split(",") if "originalLayersNames" in info else []
        known = [path for path in map(modules.of, filter(None, names)) if path is not None]
        found |= {node.get_friendly_name(): known[0]} if known else {}
    return found
