"""The exports of a job: its finished model in the formats that the recipe names, each checked, scored and timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from prunekit.errors import UsageError
from prunekit.formats.format import FORMATS
from prunekit.jobs.export.export_model import Exported, ExportRequest, export_target
from prunekit.jobs.run.job_inputs import Prepared
from prunekit.jobs.run.model_sources import InputModel
from prunekit.jobs.run.results import Attempts
from prunekit.jobs.run.run_folder import RunFolder

FOLDER = "exports"
NAME = "model"
"""Name of exported files, before the suffix of their format."""


def require_formats(prepared: Prepared) -> None:
    """Raise if a format of the job's exports cannot be written here, before hours of work.

    Raises:
        UsageError: a package, or a compiler, is missing.
    """
    unusable = {name: FORMATS.get(name).unusable() for name in prepared.job.export}
    problems = [f"export {name!r} {reason}" for name, reason in unusable.items() if reason]
    if problems:
        raise UsageError("; ".join(problems))


def export_models(
    prepared: Prepared,
    run: RunFolder,
    folder: str,
    model: nn.Module,
    *,
    attempt: Attempts,
    facts: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Export a job's finished model to every format of the recipe, and return a row of figures for each file.

    Args:
        prepared: the job.
        run: with the model in its folder.
        folder: of the model, in the run's.
        model: loaded from there.
        attempt: makes every export: one that fails costs a shortfall, and not the run.
        facts: figures of the run, for model cards.
    """
    splits = prepared.splits
    target = InputModel(model, prepared.job.name, splits.sample_shape, splits, inputs=prepared.example_inputs)
    rows = []
    for request in _requests(prepared, run.path):
        name = f"export to {request.to}"
        exporting = partial(export_target, target, request, folder=run.path / folder, facts=facts, log=run.log)
        found: Exported | None = attempt(name, exporting)
        if found is not None:
            rows.append(found.figures() | {"path": str(found.path.relative_to(run.path))})
    return rows


def _requests(prepared: Prepared, run: Path) -> Iterator[ExportRequest]:
    """Yield what to export."""
    job = prepared.job
    for name in job.export:
        suffix = FORMATS.get(name).suffix
        path = run / FOLDER / (f"{NAME}{suffix}" if suffix else name)
        batches = tuple(job.latency.batches)
        yield ExportRequest(name, path, force=True, timed=batches, threads=job.latency.threads[0])
