"""Calibration of a job: statistics of its dense model, cached by content, or of a model in training."""

from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path

import torch
from torch import nn

from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.criteria.criterion import CRITERIA
from prunekit.criteria.elimination import eliminations
from prunekit.data.datasets import describe_corrupt
from prunekit.data.loader import Batches
from prunekit.distributed.process_group import gather_on_main, is_main, main_has, main_process_only, rank, size
from prunekit.distributed.shared_work import sharing_work
from prunekit.errors import ArtifactError
from prunekit.jobs.run.baseline_cache import train_baseline
from prunekit.jobs.run.command_subject import RECIPE_ONLY, Own
from prunekit.jobs.run.job_subject import JobSubject, prepare
from prunekit.jobs.run.run_folder import digest, weights_digest
from prunekit.pruning.plan_search import CriterionInputs
from prunekit.pruning.sample_statistics import needs_activations, patch_statistics, share_check
from prunekit.pruning.schedule_planner import StepInputs, StepStatistics
from prunekit.settings.job import JobSettings
from prunekit.statistics.channel_stats import ChannelStats
from prunekit.statistics.channel_stats_collector import StatsCollector
from prunekit.statistics.gram_matrices import PatchStats, shortfalls
from prunekit.statistics.observers import watch
from prunekit.statistics.taylor_terms import TaylorTerms, collect_gradients
from prunekit.tasks.task import pair
from prunekit.training.parallel import share_buffers, share_corrupt
from prunekit.utils.context import seeded, threads
from prunekit.utils.inputs import sample_count
from prunekit.utils.progress import Log, StageCounter, stage, wanted


@dataclass(frozen=True, eq=False)
class CalibrationResult:
    """Channel statistics and their files."""

    stats: ChannelStats  # of every leaf module's inputs and outputs; empty outside the main process
    path: Path  # the safetensors file
    csv: Path  # the same as a table
    reused: bool  # whether they came from an earlier run


def calibrate(
    job: JobSettings, *, log: Log = stage, progress: bool | None = None, own: Own = RECIPE_ONLY
) -> CalibrationResult:
    """Collect the activation statistics of a job's dense model, which is trained first if it has no weights."""
    prepared = prepare(job, own)
    counter = StageCounter(("dense model", "calibrate"), log)
    counter.begin("dense model")
    baseline = train_baseline(prepared, log=log, progress=wanted(progress))
    counter.begin("calibrate")
    result = calibrate_model(prepared, baseline.model, log=log)
    if prepared.splits.corrupt:
        log(f"data: {describe_corrupt(prepared.splits.corrupt)}")
    return result


def calibrate_model(prepared: JobSubject, model: nn.Module, *, log: Log) -> CalibrationResult:
    """Return the statistics of a model on the job's calibration images, from an earlier run or collected now."""
    job = prepared.job
    facts = {
        "model": digest(prepared.structure),
        "weights": weights_digest(model),
        "data": prepared.splits.fingerprint,
        "calibration": digest([asdict(job.calibration), job.data.batch, job.seed, prepared.device.type]),
    }
    path = job.output / job.name / "calibration" / f"{digest(facts)}.safetensors"
    cached = _cached(path, facts, log)
    if main_has(cached):
        return CalibrationResult(cached or ChannelStats({}), path, path.with_suffix(".csv"), reused=True)
    stats = _collected(prepared, model, log)
    if is_main():
        stats.require_finite()
        stats = replace(stats, provenance={**stats.provenance, **facts})
        stats.save(path)
    return CalibrationResult(stats, path, path.with_suffix(".csv"), reused=False)


@main_process_only
def _cached(path: Path, facts: dict[str, str], log: Log) -> ChannelStats | None:
    """Return the statistics of an earlier run with the same facts; None if there are none."""
    if path.is_file():
        try:
            stats = ChannelStats.load(path)
            if facts.items() <= stats.provenance.items():
                log(f"calibration: reused {path} (same model, weights, data and settings)")
                return stats
        except ArtifactError as error:
            log(f"calibration: {error}; collecting again")
    return None


def _collected(prepared: JobSubject, model: nn.Module, log: Log) -> ChannelStats:
    """Collect statistics; processes share the batches, and the main one merges the results."""
    job = prepared.job
    images = prepared.calibration_batches()
    log(f"calibration: {images.images} training {prepared.splits.task.samples}")
    with threads(job.threads):
        found = merged_statistics(model.to(prepared.device), images, prepared.device)
    model.cpu()
    return found


def merged_statistics(model: nn.Module, images: Batches, device: torch.device) -> ChannelStats:
    """Return what all processes collect, each from its share of the batches, merged; empty outside the main one."""
    collector, mine = StatsCollector(model), images.dealt(rank(), size())
    collector.dealt(rank(), size())
    if len(mine):
        watch(model, mine, collector, device=device)
    seen = collector.stats() if len(mine) else None
    share_corrupt(images)
    parts = (part for part in gather_on_main(seen) if part is not None)
    return reduce(ChannelStats.merge, parts) if is_main() else ChannelStats({})


def loss_gradients(prepared: JobSubject, model: nn.Module, *, log: Log) -> TaylorTerms | None:
    """Return Taylor terms of the task's loss on the calibration samples; None if the criterion needs none.

    Processes share the batches, and the main one gets the terms.
    """
    needs = CRITERIA.get(prepared.job.prune.criterion).needs
    if "gradients" not in needs:
        return None
    images = prepared.calibration_batches()
    log(f"calibration: gradients of the loss on {images.images} training {prepared.splits.task.samples}")
    with threads(prepared.job.threads):
        found = merged_gradients(prepared, model.to(prepared.device), images)
    model.cpu()
    return found


def merged_gradients(prepared: JobSubject, model: nn.Module, images: Batches) -> TaylorTerms | None:
    """Return the Taylor terms of all batches, which processes share; None outside the main one."""
    second = "curvature" in CRITERIA.get(prepared.job.prune.criterion).needs
    share, mine = (rank(), size()), images.dealt(rank(), size())
    seen = None
    if len(mine):
        seen = collect_gradients(
            model,
            mine,
            task=replace(prepared.splits.task, unpack=pair),  # batches are unpacked already
            device=prepared.device,
            second_order=second,
            seed=prepared.job.seed,
            dealt=share,
            progress=False,
        )
    share_corrupt(images)
    parts = [part for part in gather_on_main(seen) if part is not None]
    return reduce(TaylorTerms.merge, parts) if parts else None


def job_patches(prepared: JobSubject, model: nn.Module, chart: ChannelMap, *, log: Log) -> PatchStats | None:
    """Return patch statistics of the calibration images, with the orders of removal of several processes.

    They share the images and the orders, and the main one gets the result. None if the criterion needs none.
    """
    job = prepared.job
    if "patches" not in CRITERIA.get(job.prune.criterion).needs:
        return None
    images = prepared.calibration_images()
    with threads(job.threads), sharing_work():
        found = patch_statistics(
            model.to(prepared.device),
            images,
            chart,
            job.repair,
            job.prune.ignore,
            log=lambda line: log(
                f"calibration: {line}; on {sample_count(images)} training {prepared.splits.task.samples}"
            ),
            held_out=job.prune.errors_compete,
        )
        if size() > 1 and not job.prune.channels_stay:  # else where the plan is made
            eliminations(model, chart, found)
    model.cpu()
    if not is_main():  # which plans alone
        return None
    for problem in shortfalls(found):
        log(f"calibration: {problem}")
    return found


def criterion_inputs(
    prepared: JobSubject, model: nn.Module, chart: ChannelMap, *, with_stats: bool = False, log: Log
) -> CriterionInputs:
    """Return what the job's criterion reads, collected on the calibration samples; the main process gets all of it."""
    job, stats = prepared.job, None
    if with_stats or needs_activations(job.prune.criterion):
        stats = calibrate_model(prepared, model, log=log).stats
    gradients = loss_gradients(prepared, model, log=log)
    patches, check = job_patches(prepared, model, chart, log=log), None
    if patches is not None:
        check = share_check(model, prepared.calibration_images(), chart, patches, job.prune, job.repair)
    return CriterionInputs(stats, gradients, patches, job.seed, check)


class JobStatistics(StepStatistics):
    """The statistics of a job's calibration images, collected again at each step of the schedule; writes no file."""

    def __init__(self, prepared: JobSubject) -> None:
        self._prepared = prepared

    def collect(self, model: nn.Module) -> StepInputs:
        """Return statistics and Taylor terms of the model as it is now, if the criterion needs them.

        Processes share the batches, and the main one gets the results. The random state is restored.
        """
        job, images, stats = self._prepared.job, self._prepared.calibration_batches(), None
        share_buffers(model)  # BatchNorm statistics differ between two steps
        with seeded(job.seed):
            if needs_activations(job.prune.criterion):
                stats = merged_statistics(model, images, self._prepared.device)
                stats.require_finite()
            wanted = "gradients" in CRITERIA.get(job.prune.criterion).needs
            return stats, merged_gradients(self._prepared, model, images) if wanted else None
