"""Exported files as what is timed: each in the runtime of its format, or in another one that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from prunekit.errors import UsageError
from prunekit.formats.exported_model import ExportedModel
from prunekit.formats.format import FORMATS
from prunekit.formats.program import fed
from prunekit.measure.runtimes.runtime import RUNTIMES
from prunekit.measure.runtimes.session import Sample, Session, Setting, Source

OWN = {"onnx": "onnxruntime", "openvino": "openvino"}
"""Runtimes that files of a format are timed in where none is asked for; those of other formats run by themselves."""
READ_BY = {"onnx": ("onnxruntime", "openvino"), "openvino": ("openvino",)}
"""Runtimes that take files of a format."""
DEFAULT = "eager"
"""The runtime of modules: asked for it, a file runs in its own."""


def runtime_of(model: ExportedModel, asked: str) -> str:
    """Return the name that a file's times have: of the runtime that is asked for, or of the file's own."""
    return OWN.get(model.form, model.form) if asked == DEFAULT else asked


def require_timable(name: str, model: ExportedModel, settings: Sequence[Setting]) -> None:
    """Raise if a file cannot be timed in all settings."""
    able = READ_BY.get(model.form, ())
    for setting in settings:
        if setting.runtime != DEFAULT and setting.runtime not in able:
            others = f", or {' or '.join(able)}" if able else ""
            raise UsageError(
                f"{name}: runtime {setting.runtime!r} does not take a file of {model.form}: leave out --runtime, which "
                f"times it in its own{others}; or give the model folder that it was exported from"
            )
        own = runtime_of(model, setting.runtime)
        said = f"{setting.dtype} on {setting.device}, {setting.memory_format}"
        runtime = RUNTIMES.get(own) if own in RUNTIMES.names else None
        if runtime is not None and (missing := runtime.missing()):
            raise UsageError(f"{name}: runtime {own!r} {missing}")
        refused = "" if setting.device == "cpu" else "exported files are timed on the CPU: --device cpu"
        if not refused and setting.dtype != "float32" and own != "openvino":
            refused = "it computes in the dtype that it was exported in: leave out --dtype, or export it in another"
        if not refused and setting.memory_format != "contiguous":
            refused = "its memory format was fixed by the export: leave out --memory-format"
        if not refused and runtime is not None:
            refused = runtime.refuse(_in(setting, own))
        if refused:
            raise UsageError(f"{name}: cannot be timed in {said}: {refused}")
        if model.fixed_batch not in (None, setting.batch):
            raise UsageError(
                f"{name}: expected batches of {model.fixed_batch}, which the file fixes, got {setting.batch}: give "
                f"--batch {model.fixed_batch}, or export it with a batch of any size"
            )


def exported_source(model: ExportedModel) -> Source:
    """Return a file as a source, which opens it in its own runtime."""
    return Source(open=partial(open_file, str(model.path), model.form, allow_code=model.allow_code))


def open_file(path: str, form: str, sample: Sample, setting: Setting, *, allow_code: bool = False) -> Session:
    """Return a session of a file in the runtime that is asked for, or in its own."""
    exported = FORMATS.get(form)
    own = OWN.get(form, form) if setting.runtime == DEFAULT else setting.runtime
    if own == "onnxruntime":
        return _in_onnx_runtime(Path(path), exported.interface(Path(path)), sample, setting)
    if own == "openvino":
        return _in_openvino(Path(path), exported.interface(Path(path)), sample, _in(setting, own))
    run = (exported.open_trusted if allow_code else exported.open)(Path(path), threads=setting.threads)
    return Session(lambda: run(sample))


def _in(setting: Setting, runtime: str) -> Setting:
    from dataclasses import replace

    return replace(setting, runtime=runtime)


def _in_onnx_runtime(path: Path, interface: Any, sample: Sample, setting: Setting) -> Session:
    import onnxruntime

    from prunekit.measure.runtimes.onnx_runtime import open_session

    session = open_session(path, setting.threads)
    tensors, taken = fed(sample, interface), {entry.name for entry in session.get_inputs()}
    feed = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(tensor.contiguous().numpy())
        for name, tensor in tensors.items()
        if name in taken
    }
    names = [spec.name for spec in interface.outputs]
    return Session(
        lambda: session.run_with_ort_values(names, feed),
        lambda found: [torch.from_numpy(value.numpy().copy()) for value in found],
    )


def _in_openvino(path: Path, interface: Any, sample: Sample, setting: Setting) -> Session:
    from prunekit.measure.runtimes.openvino import compiled_file

    compiled = compiled_file(path, setting)
    tensors = fed(sample, interface)
    feed = {
        name: tensor.contiguous().numpy()
        for name, tensor in tensors.items()
        if any(name in port.get_names() for port in compiled.inputs)
    }
    request = compiled.create_infer_request()
    return Session(
        lambda: request.infer(feed, share_inputs=True, share_outputs=True),
        lambda found: [torch.from_numpy(found[spec.name].copy()) for spec in interface.outputs],
    )
