"""The exports of a job: its finished model in the formats that the recipe names, each checked, scored and timed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from prunekit.backends.backend import FORMATS
from prunekit.backends.standalone import DENSE
from prunekit.errors import UsageError
from prunekit.jobs.export.export_model import Exported, ExportRequest, export_float
from prunekit.jobs.export.quantize_export import quantize_export
from prunekit.jobs.run.job_inputs import Prepared
from prunekit.jobs.run.model_sources import InputModel
from prunekit.jobs.run.results import Attempts
from prunekit.jobs.run.run_folder import RunFolder
from prunekit.settings.deployment import QuantizeSettings

FOLDER = "exports"
NAME = "model"
"""Name of exported files, before the suffix of their format."""


def require_formats(prepared: Prepared) -> None:
    """Raise if a format of the job's exports cannot be written here, before hours of work."""
    unusable = {name: FORMATS.get(name).unusable() for name in prepared.job.export}
    problems = [f"export {name!r} {reason}" for name, reason in unusable.items() if reason]
    if prepared.job.quantize is not None:
        quantizing = [kind for name in prepared.job.export if (kind := FORMATS.get(name)).quantizer]
        problems += [reason for kind in quantizing if (reason := kind.unquantizable())]
    if problems:
        raise UsageError("; ".join(problems))


def export_models(
    prepared: Prepared,
    run: RunFolder,
    folder: str,
    model: nn.Module,
    *,
    attempt: Attempts,
    dense: nn.Module,
) -> list[dict[str, Any]]:
    """Export a job's finished model to every format of the recipe, and return a row of figures for each file."""
    splits = prepared.splits
    target = InputModel(model, prepared.job.name, splits.sample_shape, splits, inputs=prepared.example_inputs)
    rows, facts = [], {DENSE: dense}
    for request in _requests(prepared, run.path):
        exporting = partial(export_float, target, request, folder=run.path / folder, facts=facts, log=run.log)
        found: Exported | None = attempt(f"export to {request.to}", exporting)
        if found is None:
            continue
        files: list[Exported | None] = [found]
        if request.quantize is not None:
            quantizing = partial(quantize_export, target, found, request, dense=dense, log=run.log)
            files.append(attempt(f"int8 of the export to {request.to}", quantizing))
        rows += [file.figures() | {"path": str(file.path.relative_to(run.path))} for file in files if file is not None]
    return rows


def _requests(prepared: Prepared, run: Path) -> Iterator[ExportRequest]:
    """Yield what to export."""
    job = prepared.job
    for name in job.export:
        suffix = FORMATS.get(name).suffix
        path = run / FOLDER / (f"{NAME}{suffix}" if suffix else name)
        timed, threads = tuple(job.latency.batches), job.latency.threads[0]
        wanted = QuantizeSettings() if job.quantize == "int8" else job.quantize
        quantize = wanted if isinstance(wanted, QuantizeSettings) and FORMATS.get(name).quantizer else None
        yield ExportRequest(name, path, force=True, timed=timed, threads=threads, quantize=quantize)
