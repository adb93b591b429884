"""The repair stage: a job's masked model, repaired as the job says, or with new BatchNorm statistics."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from torch import nn

from prunekit.distributed.process_group import main_process_only
from prunekit.hooks.model_copy import copied
from prunekit.jobs.run.job_subject import JobSubject, share_model
from prunekit.jobs.run.resume import cache_repair, cached_repair
from prunekit.jobs.run.run_folder import RunFolder
from prunekit.masks.masked_model import masked
from prunekit.planning.plan import Plan, load_plan
from prunekit.pruning.pattern_zeros import with_best_order, zeros_by_size, zeros_from_samples
from prunekit.pruning.schedule_planner import share_plan
from prunekit.repair.batchnorm_statistics import recalibrate_batchnorm
from prunekit.repair.repair_model import repair
from prunekit.repair.repair_report import LayerRepair, RepairReport, reasons_of
from prunekit.utils.files import write_csv
from prunekit.utils.inputs import sample_count

COLUMNS = tuple(LayerRepair.__dataclass_fields__)


def repair_model(
    prepared: JobSubject, dense: nn.Module, plan: Plan, run: RunFolder, *, training: bool
) -> tuple[nn.Module, RepairReport | None]:
    """Return the masked model on the CPU, and the report of its repair, None if the job asks for none.

    The main process repairs once in a run, and shares the weights. Without repair, BatchNorm statistics are collected
    again if training follows, which would change them anyway.
    """
    model, report = _repaired_once(prepared, dense, plan, run, training) or (copied(dense), None)
    share_model(model, "the masked model")
    return model, report


@main_process_only
def _repaired_once(
    prepared: JobSubject, dense: nn.Module, plan: Plan, run: RunFolder, training: bool
) -> tuple[nn.Module, RepairReport | None]:
    """Return the repaired model of the run that is resumed, or repair it now."""
    kept = cached_repair(run, dense)
    if kept is None:
        kept = _repaired(prepared, dense, plan, run, training)
        cache_repair(run, *kept)
    return kept


def _repaired(
    prepared: JobSubject, dense: nn.Module, plan: Plan, run: RunFolder, training: bool
) -> tuple[nn.Module, RepairReport | None]:
    settings = prepared.job.repair
    if settings is None:
        return _masked(prepared, dense, plan, training), None
    images = prepared.calibration_images()
    run.log(
        f"repair: {settings.fit}{', sequential' if settings.sequential else ''}, "
        f"{sample_count(images)} training {prepared.splits.task.samples}"
    )
    model, report = repair(dense.to(prepared.device), plan, images, settings, log=run.log, progress=False)
    dense.cpu()
    _write_report(run, report)
    return model.cpu(), report


def _masked(prepared: JobSubject, dense: nn.Module, plan: Plan, training: bool) -> nn.Module:
    """Return a masked copy on the CPU, with BatchNorm statistics collected again if training follows."""
    model = copied(dense, prepared.device)
    with masked(model, plan, restore=False):
        if training:
            recalibrate_batchnorm(model, prepared.calibration_batches(), device=prepared.device, progress=False)
    return model.cpu()


def zero_weights(
    prepared: JobSubject, dense: nn.Module, plan: Plan, run: RunFolder, *, training: bool
) -> tuple[nn.Module, RepairReport | None, Plan]:
    """Return the masked model with zeros among single weights, the report of its fit, and the plan with their masks.

    The main process chooses them once in a run, and shares weights and masks. Kept weights are fitted to the dense
    model if the job has a `repair`.
    """
    model, report, made = _zeros_once(prepared, dense, plan, run, training) or (copied(dense), None, None)
    share_model(model, "the masked model")
    return model, report, share_plan(made)


@main_process_only
def _zeros_once(
    prepared: JobSubject, dense: nn.Module, plan: Plan, run: RunFolder, training: bool
) -> tuple[nn.Module, RepairReport | None, Plan]:
    kept, folder = cached_repair(run, dense), run.resume / "pattern"
    if kept is not None:
        return (*kept, load_plan(folder))
    model, report, made = _with_zeros(prepared, dense, plan, run, training)
    made.save(folder)
    cache_repair(run, model, report)
    return model, report, made


def _with_zeros(
    prepared: JobSubject, dense: nn.Module, plan: Plan, run: RunFolder, training: bool
) -> tuple[nn.Module, RepairReport | None, Plan]:
    pattern, repairing = prepared.job.prune.pattern, prepared.job.repair
    assert pattern is not None
    ordered, order = with_best_order(dense, plan, prepared.example_inputs, pattern)
    if order:
        run.log(order)
    if pattern.method == "magnitude" and repairing is None:
        made, layers = zeros_by_size(ordered, plan, prepared.example_inputs, pattern)
        for line in layers.notes():
            run.log(line)
        return _masked(prepared, ordered, made, training), None, made
    images = prepared.calibration_images()
    how = "" if repairing is None else ", kept weights fitted to the dense model"
    run.log(
        f"pattern: {pattern.in_words} by {pattern.method} from {sample_count(images)} training "
        f"{prepared.splits.task.samples}{how}"
    )
    model = copied(ordered, prepared.device)
    found = zeros_from_samples(model, plan, images, pattern, repairing, log=run.log)
    _write_report(run, found.report)
    return found.model.cpu(), found.report, found.plan


def _write_report(run: RunFolder, report: RepairReport) -> None:
    """Write a report's layers as a table, and log it."""
    write_csv(run.path / "repair.csv", [asdict(layer) for layer in report.layers], COLUMNS)
    for line in _lines(report):
        run.log(f"repair: {line}")


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
