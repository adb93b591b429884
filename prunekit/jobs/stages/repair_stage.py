"""The repair stage: a job's masked model, repaired as the job says, or with new BatchNorm statistics."""

from collections import Counter
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from prunekit.compaction.compact_model import compact
from prunekit.data.loader import batches
from prunekit.distributed.process_group import is_main, main_has, main_process_only
from prunekit.distributed.shared_work import sharing_work
from prunekit.errors import PlanError
from prunekit.hooks.model_copy import copied
from prunekit.jobs.run.job_subject import JobSubject, share_model
from prunekit.jobs.run.resume import cache_repair, cached_repair
from prunekit.jobs.run.run_folder import RunFolder
from prunekit.jobs.stages.deployment_stage import Int8Copies, int8_format
from prunekit.masks.masked_model import masked
from prunekit.measure.score_drop import HeldOut, HeldOutScores
from prunekit.measure.verification import verify
from prunekit.planning.plan import Plan, load_plan
from prunekit.pruning.pattern_zeros import zeros_by_size, zeros_from_samples
from prunekit.pruning.plan_search import CriterionInputs, Planned, PlanSearch
from prunekit.pruning.schedule_planner import share_plan
from prunekit.pruning.score_budget import ScoreSearch
from prunekit.repair.batchnorm_statistics import recalibrate_batchnorm
from prunekit.repair.repair_model import repair
from prunekit.repair.repair_report import LayerRepair, RepairReport, reasons_of
from prunekit.settings.calibration import RepairSettings
from prunekit.settings.weight_pattern import PatternSettings
from prunekit.tasks.task import pair
from prunekit.utils.files import write_csv
from prunekit.utils.inputs import sample_count
from prunekit.utils.progress import Log

COLUMNS = tuple(LayerRepair.__dataclass_fields__)


def repair_masked(
    prepared: JobSubject, dense: nn.Module, plan: Plan, run: RunFolder, *, training: bool
) -> tuple[nn.Module, RepairReport | None, Plan]:
    """Return the masked model on the CPU, the report of its repair, and the plan, with masks of the job's pattern.

    Processes share a repair, which is made once in a run; masks of weights, and statistics of BatchNorm, are the main
    one's work, and the others get them. There is no report if nothing was fitted.
    """
    folder, pattern, settings = run.resume / "pattern", prepared.job.prune.pattern, prepared.job.repair
    kept = main_process_only(cached_repair)(run, dense)
    begun, masks = main_has(kept), plan if pattern is None else None
    if not begun and pattern is None and settings is not None:
        model, report = _repaired(prepared, dense, plan, run, settings)
    elif not is_main():
        model, report = copied(dense), None
    elif kept is not None:
        (model, report), masks = kept, masks or load_plan(folder)
    elif pattern is None:
        model, report = _masked(prepared, dense, plan, training), None
    else:
        model, report, masks = _with_zeros(prepared, dense, plan, run, pattern, training)
        masks.save(folder)
    if is_main() and not begun:
        cache_repair(run, model, report)
    share_model(model, "the masked model")
    return model, report, plan if pattern is None else share_plan(masks)


def _repaired(
    prepared: JobSubject, dense: nn.Module, plan: Plan, run: RunFolder, settings: RepairSettings
) -> tuple[nn.Module, RepairReport]:
    images = prepared.calibration_images()
    run.log(
        f"repair: {settings.fit}{', sequential' if settings.sequential else ''}, "
        f"{sample_count(images)} training {prepared.splits.task.samples}"
    )
    with sharing_work():
        model, report = repair(dense.to(prepared.device), plan, images, settings, log=run.log, progress=False)
    dense.cpu()
    _write_report(run, report)
    return model.cpu(), report


def within_max_drop(
    prepared: JobSubject, search: PlanSearch, inputs: CriterionInputs, limit: float, log: Log, *, training: bool
) -> Planned:
    """Return the plan of the narrowest model, repaired as the job says, that `max_drop` allows on validation samples.

    Where the job exports in int8, its file is judged. Before any fine-tuning, which never delivers less than what it
    began with, by the score in float.
    """
    splits, dense, form = prepared.splits, search.model, int8_format(prepared.job)
    log(f"max_drop: judged on {len(splits.validation)} validation {splits.task.samples}, before any fine-tuning")
    made, models = PrunedCopies(prepared, dense, training=training), held_out(prepared, dense)
    score, unpruned = models.score, ""
    if form is not None:
        files = Int8Copies(prepared, models, form, log)
        drop, problem = files.drop(dense)
        score, unpruned = files.score, f"without pruning: {drop or problem}"
        log(f"max_drop: judged as files of {form} in int8; {unpruned}")

    def make(planned: Planned) -> tuple[None, HeldOutScores]:
        return None, score(made.of(planned.plan))

    try:
        return ScoreSearch(search, inputs, models, limit, make, log).run()[0]
    except PlanError as error:
        raise PlanError("; ".join(filter(None, (str(error), unpruned)))) from error


def held_out(prepared: JobSubject, dense: nn.Module) -> HeldOut:
    """Return what models of a job are judged by: its validation samples, and its task's main score."""
    splits = prepared.splits
    data = prepared.job.data
    samples = batches(splits.validation, data.batch, shuffle_seed=None, workers=data.reading)
    return HeldOut(dense, samples, replace(splits.task, unpack=pair), prepared.device)


class PrunedCopies:
    """Compact models of a job by several plans, repaired as the job says, from the same images."""

    def __init__(self, prepared: JobSubject, dense: nn.Module, *, training: bool) -> None:
        self._prepared, self._dense, self._training = prepared, dense, training
        self._images: Any = None if prepared.job.repair is None else prepared.calibration_images()

    def of(self, plan: Plan) -> nn.Module:
        """Return the compact model by a plan, on the CPU; masked and compact are proven equal."""
        prepared, settings = self._prepared, self._prepared.job.repair
        if settings is None:
            model = _masked(prepared, self._dense, plan, self._training)
        else:
            moved = self._dense.to(prepared.device)
            model = repair(moved, plan, self._images, settings, log=lambda line: None, progress=False)[0].cpu()
            self._dense.cpu()
        small = compact(model, plan)
        verify(model, small, plan, [prepared.example_inputs], strict=True)
        return small


def _masked(prepared: JobSubject, dense: nn.Module, plan: Plan, training: bool) -> nn.Module:
    """Return a masked copy on the CPU, with BatchNorm statistics collected again if training follows."""
    model = copied(dense, prepared.device)
    with masked(model, plan, restore=False):
        if training:
            recalibrate_batchnorm(model, prepared.calibration_batches(), device=prepared.device, progress=False)
    return model.cpu()


def _with_zeros(
    prepared: JobSubject, dense: nn.Module, plan: Plan, run: RunFolder, pattern: PatternSettings, training: bool
) -> tuple[nn.Module, RepairReport | None, Plan]:
    """Return the masked model with zeros among single weights, the report of the fit, and the plan with their masks."""
    repairing = prepared.job.repair
    if pattern.method == "magnitude" and repairing is None:
        made, layers = zeros_by_size(dense, plan, prepared.example_inputs, pattern)
        for line in layers.notes():
            run.log(line)
        return _masked(prepared, dense, made, training), None, made
    images = prepared.calibration_images()
    how = "" if repairing is None else ", kept weights fitted to the dense model"
    run.log(
        f"pattern: {pattern.in_words} by {pattern.method} from {sample_count(images)} training "
        f"{prepared.splits.task.samples}{how}"
    )
    found = zeros_from_samples(copied(dense, prepared.device), plan, images, pattern, repairing, log=run.log)
    _write_report(run, found.report)
    return found.model.cpu(), found.report, found.plan


@main_process_only
def _write_report(run: RunFolder, report: RepairReport) -> None:
    """Write a report's layers as a table, and log it."""
    write_csv(run.path / "repair.csv", [asdict(layer) for layer in report.layers], COLUMNS)
    change = f"output error on held-out images {report.before:.4g} -> {report.after:.4g} of its variance"
    lines = [change, *(note.removeprefix("repair: ") for note in report.notes)]
    applied = Counter(layer.applied for layer in report.layers if layer.applied)
    left = [layer for layer in report.layers if not layer.applied]
    done = ", ".join(f"{count} by {how}" for how, count in applied.items()) or "none"
    lines.append(f"layers refitted: {done}; left as they were: {len(left)}")
    for line in (*lines, *reasons_of(report.layers)):
        run.log(f"repair: {line}")


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
