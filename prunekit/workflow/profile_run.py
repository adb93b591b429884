"""A job's latency profile, in a folder of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunekit.artifacts import write_csv, write_json
from prunekit.channels import trace
from prunekit.deploy.transform import transform_of
from prunekit.measure.effort import Effort
from prunekit.measure.machine import clock_mhz, surroundings
from prunekit.measure.runtimes import inputs_like
from prunekit.progress import stage
from prunekit.report import require_report
from prunekit.settings.job import JobSettings
from prunekit.workflow.dense import prepare
from prunekit.workflow.own import RECIPE_ONLY, Own
from prunekit.workflow.profiled import Profile
from prunekit.workflow.profiling import layer_setting, profile
from prunekit.workflow.resolved import run_recipe
from prunekit.workflow.runs import Finish, Log, environment, run_folder, write_report

LAYER_COLUMNS = ("module", "dense_ms", "share", "constant_ms", "steps", "changes_at", "error")
NETWORK_COLUMNS = ("predicted_ms", "measured_ms", "macs_left", "held_out", "error")


@dataclass(frozen=True)
class ProfileRun:
    """A finished profile.

    Attributes:
        folder: `profile.json` and, layer by layer, `profile.csv`; what was predicted of every network, `networks.csv`;
            what every layer took in them, with its fit, `fits.json`; and whatever `finish` wrote.
        result: the table and what it was made from.
        metrics: what `profile.json` holds.
    """

    folder: Path
    result: Profile
    metrics: dict[str, Any]


def profile_job(
    job: JobSettings,
    *,
    networks: int = Effort.networks,
    again: bool = False,
    log: Log = stage,
    finish: Finish | None = write_report,
    own: Own = RECIPE_ONLY,
) -> ProfileRun:
    """The latency of a job's dense model layer by layer, against their widths, on the job's `prune.target`.

    Nothing is trained: latency does not depend on weights.

    Args:
        job: the settings.
        networks: to measure, at least 10.
        again: measures those of the cache anew that were timed on a machine too noisy.
        log: gets a line for each network.
        finish: called with the folder at the end, before the run counts as finished: writes the report.
        own: the user's own code, where the job's model or data is their own.

    Raises:
        UsageError: data, model or target do not fit; nothing was written.
        RunError: the run failed; its folder says so.
    """
    require_report()
    layer_setting(job.prune.target)  # a runtime that is not there is refused before anything else
    text = run_recipe(job, own)
    prepared = prepare(job, own)
    chart = trace(prepared.model, prepared.example_inputs)
    example = prepared.example_inputs
    inputs_like(example)  # what cannot be timed is refused before anything is written
    transform = transform_of(prepared.model, example, job.deploy)
    with run_folder(job.output / job.name, "profile", log, text, finish) as run:
        machine = surroundings()
        result = profile(
            prepared.model,
            example,
            settings=job.prune,
            channel_map=chart,
            networks=networks,
            again=again,
            transform=transform,
            log=run.log,
            progress=False,
        )
        run.log("; ".join((f"profile: {result.accuracy}", *result.notes)))
        machine |= {"clock_mhz_after": clock_mhz()}
        metrics = {"name": job.name, **result.summary(), "machine": machine, "environment": environment()}
        write_csv(run.path / "profile.csv", metrics["layers"], LAYER_COLUMNS)
        write_csv(run.path / "networks.csv", [found.row() for found in result.predictions], NETWORK_COLUMNS)
        write_json(run.path / "fits.json", {"layers": result.fits(prepared.model)})
        write_json(run.path / "profile.json", metrics)
    return ProfileRun(run.path, result, metrics)
