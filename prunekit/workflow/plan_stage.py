"""The stages of a job from its dense model to its plan: calibration, scores, budgets, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from prunekit.calibration import ChannelStats
from prunekit.channels import ChannelMap
from prunekit.distributed.exchange import from_main
from prunekit.distributed.group import is_main
from prunekit.planning import PruneSettings
from prunekit.workflow import results
from prunekit.workflow.calibrate import calibrate_model, job_patches, loss_gradients
from prunekit.workflow.delivered import Frozen
from prunekit.workflow.delivering import freeze
from prunekit.workflow.evidence import needs_activations
from prunekit.workflow.goal import LatencyGoal
from prunekit.workflow.kept import keep_plan, kept_plan
from prunekit.workflow.planned import Planned
from prunekit.workflow.prepared import Prepared
from prunekit.workflow.pruning import plan_curves, plan_model
from prunekit.workflow.runs import RunFolder
from prunekit.workflow.tables import CURVE_COLUMNS, coupling_rows, curve_rows, lock_rows, score_rows, write_csv


def find_plan(
    prepared: Prepared,
    dense: nn.Module,
    chart: ChannelMap,
    run: RunFolder,
    goal: LatencyGoal | None,
    *,
    training: bool,
    stage: Callable[[str], AbstractContextManager[Any]],
) -> tuple[Planned, Frozen | None] | None:
    """A plan within the job's budgets, on the dense model's weights; written into the run's folder, or read there.

    Of several processes all collect statistics, and the main one makes the plan.

    Args:
        dense: with its weights.
        chart: its channel map.
        goal: where a budget is one of time.
        training: whether fine-tuning follows, and statistics are kept for it.
        stage: times what runs in it, under a name.

    Returns:
        The plan, and how it was found where a budget is one of time; in the main process alone.
    """
    kept = kept_plan(run, dense, goal) if is_main() else None
    if from_main(lambda: kept is not None):
        return kept
    job, log = prepared.job, run.log
    with stage("calibrate"):
        stats: ChannelStats | None = None
        if training or needs_activations(job.prune.criterion):
            stats = calibrate_model(prepared, dense, log=log).stats
        gradients = loss_gradients(prepared, dense, log=log)
        if not is_main():
            return None
        if stats is not None:
            stats.save(run.path / "statistics")
        patches = job_patches(prepared, dense, chart, log=log)
    with stage("plan"):
        plan = partial(
            plan_model,
            dense,
            prepared.example_inputs,
            stats=stats,
            gradients=gradients,
            patches=patches,
            seed=job.seed,
        )
        planned, frozen = _within_budgets(prepared, dense, chart, plan, goal, run)
        _keep(planned, run)
        if patches is not None:
            curves = plan_curves(planned, patches)
            write_csv(run.path / "sensitivity.csv", curve_rows(planned.plan.channel_map, curves), CURVE_COLUMNS)
        keep_plan(run, planned, frozen)
    return planned, frozen


def _within_budgets(
    prepared: Prepared,
    dense: nn.Module,
    chart: ChannelMap,
    plan: Callable[..., Planned],
    goal: LatencyGoal | None,
    run: RunFolder,
) -> tuple[Planned, Frozen | None]:
    if goal is None:
        return plan(prepared.job.prune, channel_map=chart), None
    table = goal.table

    def planner(aimed: PruneSettings, channel_map: ChannelMap) -> Planned:
        return plan(aimed, channel_map=channel_map, latency=table)

    frozen = freeze(replace(goal, model=dense), planner, log=run.log)
    return frozen.planned, frozen


def write_plan(planned: Planned, run: RunFolder) -> None:
    """Writes a plan into the run's folder, with its scores, locks and groups."""
    planned.plan.save(run.path)
    write_csv(run.path / "scores.csv", score_rows(planned.plan, planned.scores), results.SCORE_COLUMNS)
    write_csv(run.path / "locks.csv", lock_rows(planned.plan), results.LOCK_COLUMNS)
    write_csv(run.path / "coupling.csv", coupling_rows(planned.plan), results.COUPLING_COLUMNS)


def _keep(planned: Planned, run: RunFolder) -> None:
    write_plan(planned, run)
    chart = planned.plan.channel_map
    left = chart.macs(planned.plan.keep) / chart.macs()
    run.log(
        f"plan: {left:.1%} of the MACs left, {planned.plan.removed} of {chart.n_labels - 1} channels removed; "
        f"masked == compact in the trial to {planned.max_relative_difference:.1e}"
    )
    for text in planned.locked_by_trial:
        run.log(f"plan: locked after the trial: {text}")
    for text in planned.unseen:
        run.log(f"plan: {text}")
