"""A job's sensitivity analysis, in a folder of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from prunekit.artifacts import write_csv, write_json
from prunekit.channels import trace
from prunekit.context import threads
from prunekit.data import Batches, batches, describe_corrupt
from prunekit.errors import UsageError
from prunekit.progress import stage, wanted
from prunekit.report import require_report
from prunekit.settings.job import JobSettings
from prunekit.tasks import IMAGE_CLASSIFICATION
from prunekit.workflow.calibrate import calibration_images
from prunekit.workflow.dense import prepare, train_baseline
from prunekit.workflow.own import RECIPE_ONLY, Own
from prunekit.workflow.prepared import Prepared
from prunekit.workflow.resolved import run_recipe
from prunekit.workflow.runs import Finish, Log, environment, run_folder, write_report
from prunekit.workflow.sensitivity import Sensitivity, analyze_sensitivity, chosen_groups
from prunekit.workflow.tables import CURVE_COLUMNS


@dataclass(frozen=True, eq=False)
class SensitivityRun:
    """A finished analysis.

    Attributes:
        folder: `sensitivity.csv`, `sensitivity.json` and whatever `finish` wrote.
        result: the curves.
        metrics: what `sensitivity.json` holds.
    """

    folder: Path
    result: Sensitivity
    metrics: dict[str, Any]


def analyze(
    job: JobSettings,
    *,
    measured: bool = False,
    groups: Sequence[str] = (),
    log: Log = stage,
    progress: bool | None = None,
    finish: Finish | None = write_report,
    own: Own = RECIPE_ONLY,
) -> SensitivityRun:
    """The sensitivity of a job's dense model, training that first where it has no weights; see `sensitivity`.

    Args:
        job: the settings.
        measured: whether to measure too, on as many images of the validation split as the job calibrates on.
        groups: globs over names of channel groups; none: all.
        log: gets a line for each stage.
        progress: whether to show bars on stderr; None: on a terminal and in a notebook.
        finish: called with the folder at the end, before the run counts as finished: writes the report.
        own: the user's own code, where the job's model or data is their own.

    Raises:
        UsageError: data, model or globs do not fit; nothing was written.
        RunError: the run failed; its folder says so.
    """
    require_report()
    text, shown = run_recipe(job, own), wanted(progress)
    prepared = prepare(job, own)
    task = prepared.splits.task
    if task is not IMAGE_CLASSIFICATION:
        raise UsageError(f"sensitivity: expected classifiers of images, got the task {task.name!r}; leave this out")
    chosen_groups(trace(prepared.model, prepared.example_inputs), groups)
    images, labeled = calibration_images(prepared), _validation(prepared) if measured else None
    with run_folder(job.output / job.name, "sensitivity", log, text, finish) as run, threads(job.threads):
        model = train_baseline(prepared, log=run.log, progress=shown).model.to(prepared.device)
        start = time.perf_counter()
        result = analyze_sensitivity(model, images, labeled, groups, log=run.log, progress=shown)
        metrics = _metrics(job.name, len(images), result, labeled) | {"seconds": time.perf_counter() - start}
        write_csv(run.path / "sensitivity.csv", result.points(), CURVE_COLUMNS)
        write_json(run.path / "sensitivity.json", metrics)
        if prepared.splits.corrupt:
            run.log(f"data: {describe_corrupt(prepared.splits.corrupt)}")
    return SensitivityRun(run.path, result, metrics)


def _validation(prepared: Prepared) -> Batches:
    """Batches over a fixed random choice of validation images, never of test images."""
    job, total = prepared.job, len(prepared.splits.validation)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(job.seed))
    chosen = order[: job.calibration.images].sort().values
    data = prepared.splits.validation
    return batches(data, job.data.batch, shuffle_seed=None, workers=job.data.reading, indices=chosen)


def _metrics(name: str, images: int, result: Sensitivity, labeled: Batches | None) -> dict[str, Any]:
    """Everything that `sensitivity.json` holds."""
    points = next(iter(result.measured.values()), ())
    return {
        "name": name,
        "macs": result.channel_map.macs(),
        "images": images,
        "measured_images": None if labeled is None else labeled.images,
        "dense": {"loss": points[0].loss, "top1": points[0].top1} if points else None,
        "agreement": result.agreement,
        "groups": result.rows(),
        "fast": {
            name: {"errors": [curve.share_at(kept) for kept in range(curve.labels.size, 0, -1)]}
            for name, curve in result.curves.items()
        },
        "measured": {name: [asdict(point) for point in found] for name, found in result.measured.items()},
        "environment": environment(),
    }
