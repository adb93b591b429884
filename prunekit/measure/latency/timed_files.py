"""Files that are timed: models written for a runtime, in float and in int8, and files that were exported before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from prunekit.backends.backend import FORMATS, RUNTIMES, Backend, FileBackend
from prunekit.backends.files.exported_model import ExportedModel
from prunekit.backends.session import INT8, FileKey, Inputs, Sample, Session, Setting, Source, in_dtype
from prunekit.errors import RunError, UsageError
from prunekit.hooks.model_copy import copied
from prunekit.utils.tensors import gather

DEFAULT = "eager"
"""The runtime of modules: asked for it, a file runs in its own."""


def file_source(backend: Backend, model: nn.Module, inputs: Inputs, keys: Iterable[FileKey], folder: Path) -> Source:
    """Write a model for each batch and dtype in the format that a runtime takes, to a folder made if need be.

    Quantized files are calibrated on the sample that they are timed on: times do not depend on the ranges.
    """
    folder.mkdir(exist_ok=True)
    wanted, carrier = set(keys), FORMATS.get(backend.carrier)
    quantized = {key for key in wanted if key[1].startswith(INT8)}
    exported = (wanted - quantized) | {(batch, "float32") for batch, _ in quantized}
    with torch.inference_mode(False), torch.no_grad():  # export traces, which needs version counters
        files = {key: _file(carrier, model, inputs, *key, folder) for key in sorted(exported)}
    for batch, dtype in sorted(quantized):
        float_file = files[batch, "float32"]
        files[batch, dtype] = _quantized(backend, carrier, float_file, dtype, inputs.sample(batch), folder)
    return Source(files=files)


def _file(carrier: FileBackend, model: nn.Module, inputs: Inputs, batch: int, dtype: str, folder: Path) -> Path:
    sample, path = inputs.sample(batch), folder / f"{batch}-{dtype}{carrier.suffix}"
    if path.exists():  # it is the same model's
        return path
    if dtype == "float32":
        return carrier.write_fixed(model, sample, path)
    kind: torch.dtype = getattr(torch, dtype)
    return carrier.write_fixed(copied(model, dtype=kind), in_dtype(sample, kind), path)


def _quantized(backend: Backend, carrier: FileBackend, file: Path, dtype: str, sample: Sample, folder: Path) -> Path:
    """Quantize a file, in a folder of its own."""
    place = folder / f"{file.stem} {dtype}"
    place.mkdir()
    names = [spec.name for spec in carrier.interface(file).inputs]
    batch = dict(zip(names, [one.numpy() for one in gather(sample)], strict=True))
    quantizer = _quantizing(backend).quantizer_of(file, place, [batch], 1, only_timed=True)
    if not quantizer.layers:
        raise RunError("int8: expected layers that can be quantized, such as convolutions, and there are none")
    return quantizer.quantize(quantizer.ways[0], frozenset(quantizer.layers))


def _quantizing(backend: Backend) -> FileBackend:
    """Return the backend itself if it quantizes, or, for a function, the one whose package it names."""
    if isinstance(backend, FileBackend):
        return backend
    named = [name for name, facts in FORMATS.facts().items() if facts.get("quantizer") == backend.quantizer]
    if not named:
        raise RunError(f"int8: expected a backend with the quantizer {backend.quantizer!r}, and none is registered")
    return FORMATS.get(named[0])


def backend_of(model: ExportedModel, asked: str) -> Backend:
    """Return what a file is timed in: the runtime that is asked for, or its own."""
    return FORMATS.get(model.form) if asked == DEFAULT else RUNTIMES.get(asked)


def runtime_of(model: ExportedModel, asked: str) -> str:
    """Return the name that a file's times have."""
    return backend_of(model, asked).name if asked == DEFAULT else asked


def require_timable(name: str, model: ExportedModel, settings: Sequence[Setting]) -> None:
    """Raise if a file cannot be timed in all settings."""
    able = [
        runtime
        for runtime, facts in RUNTIMES.facts().items()
        if model.form in (facts.get("format"), *facts.get("reads", ()))
    ]
    for setting in settings:
        if setting.runtime not in (DEFAULT, *able):
            others = f", or {' or '.join(able)}" if able else ""
            raise UsageError(
                f"{name}: runtime {setting.runtime!r} does not take a file of {model.form}: leave out --runtime, which "
                f"times it in its own{others}; or give the model folder that it was exported from"
            )
        backend = backend_of(model, setting.runtime)
        if missing := backend.missing():
            raise UsageError(f"{name}: runtime {backend.name!r} {missing}")
        said = f"{setting.dtype} on {setting.device}, {setting.memory_format}"
        if refused := _refusal(backend, setting):
            raise UsageError(f"{name}: cannot be timed in {said}: {refused}")
        if model.fixed_batch not in (None, setting.batch):
            raise UsageError(
                f"{name}: expected batches of {model.fixed_batch}, which the file fixes, got {setting.batch}: give "
                f"--batch {model.fixed_batch}, or export it with a batch of any size"
            )


def _refusal(backend: Backend, setting: Setting) -> str:
    """Return why a file cannot be timed in a setting; empty if it can."""
    if setting.device != "cpu":
        return "exported files are timed on the CPU: --device cpu"
    if setting.dtype != "float32" and not backend.chooses_dtype:
        return "it computes in the dtype that it was exported in: leave out --dtype, or export it in another"
    if setting.memory_format != "contiguous":
        return "its memory format was fixed by the export: leave out --memory-format"
    return backend.refuse(setting)


def exported_source(model: ExportedModel) -> Source:
    """Return a file as a source, which opens it in its own runtime or in the one of the setting."""
    return Source(open=partial(open_file, model.path, FORMATS.get(model.form), allow_code=model.allow_code))


def open_file(path: Path, own: FileBackend, sample: Sample, setting: Setting, *, allow_code: bool = False) -> Session:
    """Return a session of a file in the runtime that is asked for, or in its own."""
    backend = own if setting.runtime == DEFAULT else RUNTIMES.get(setting.runtime)
    assert isinstance(backend, FileBackend)
    return backend.file_session(path, own.interface(path), sample, setting, trusted=allow_code)  # checks other files
