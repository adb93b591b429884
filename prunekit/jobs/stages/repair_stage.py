"""The repair stage: a job's masked model, repaired as the job says, or with new BatchNorm statistics."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from torch import nn

from prunekit.channels.cut.model_copy import copied
from prunekit.jobs.calibrate import calibration_batches, calibration_images
from prunekit.jobs.run.agreement import main_process_only, share_model
from prunekit.jobs.run.job_inputs import Prepared
from prunekit.jobs.run.run_folder import RunFolder
from prunekit.jobs.run.stage_cache import cache_repair, cached_repair
from prunekit.masks.masked_model import masked
from prunekit.planning.plan import Plan
from prunekit.repair.repair_model import repair
from prunekit.repair.repair_report import LayerRepair, RepairReport, reasons_of
from prunekit.training.batchnorm_statistics import recalibrate_batchnorm
from prunekit.utils.files import write_csv
from prunekit.utils.inputs import sample_count

COLUMNS = tuple(LayerRepair.__dataclass_fields__)


def repair_model(
    prepared: Prepared, dense: nn.Module, plan: Plan, run: RunFolder, *, training: bool
) -> tuple[nn.Module, RepairReport | None]:
    """Return the masked model on the CPU, and the report of its repair, None if the job asks for none.

    The main process repairs once in a run, and shares the weights. Without repair, BatchNorm statistics are collected
    again if training follows, which would change them anyway.

    Raises:
        DataError: fewer than 8 calibration images.
        NonFiniteError: a layer computes NaN or Inf; names the layer.
    """
    model, report = _repaired_once(prepared, dense, plan, run, training) or (copied(dense), None)
    share_model(model, "the masked model")
    return model, report


@main_process_only
def _repaired_once(
    prepared: Prepared, dense: nn.Module, plan: Plan, run: RunFolder, training: bool
) -> tuple[nn.Module, RepairReport | None]:
    """Return the repaired model of the run that is resumed, or repair it now."""
    kept = cached_repair(run, dense)
    if kept is None:
        kept = _repaired(prepared, dense, plan, run, training)
        cache_repair(run, *kept)
    return kept


def _repaired(
    prepared: Prepared, dense: nn.Module, plan: Plan, run: RunFolder, training: bool
) -> tuple[nn.Module, RepairReport | None]:
    settings = prepared.job.repair
    if settings is None:
        model = copied(dense, prepared.device)
        with masked(model, plan, restore=False):
            if training:
                recalibrate_batchnorm(model, calibration_batches(prepared), device=prepared.device, progress=False)
        return model.cpu(), None
    images = calibration_images(prepared)
    run.log(
        f"repair: {settings.fit}{', sequential' if settings.sequential else ''}, "
        f"{sample_count(images)} training {prepared.splits.task.samples}"
    )
    model, report = repair(dense.to(prepared.device), plan, images, settings, log=run.log, progress=False)
    dense.cpu()
    write_csv(run.path / "repair.csv", [asdict(layer) for layer in report.layers], COLUMNS)
    for line in _lines(report):
        run.log(f"repair: {line}")
    return model.cpu(), report


def _lines(report: RepairReport) -> list[str]:
    change = f"output error on held-out images {report.before:.4g} -> {report.after:.4g} of its variance"
    lines = [change, *(note.removeprefix("repair: ") for note in report.notes)]
    applied = Counter(layer.applied for layer in report.layers if layer.applied)
    left = [layer for layer in report.layers if not layer.applied]
    done = ", ".join(f"{count} by {how}" for how, count in applied.items()) or "none"
    lines.append(f"layers refitted: {done}; left as they were: {len(left)}")
    return lines + reasons_of(report.layers)


def repair_summary(report: RepairReport | None) -> dict[str, Any] | None:
    """Return what `metrics.json` holds of a repair, whose layers are in `repair.csv`."""
    if report is None:
        return None
    return {
        "before": report.before,
        "after": report.after,
        "kept": report.kept,
        "layers": len(report.layers),
        "refitted": sum(bool(layer.applied) for layer in report.layers),
        "memory": {**asdict(report.memory), "bytes": report.memory.bytes},
    }
