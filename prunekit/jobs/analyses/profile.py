"""Latency profiles of a job's dense model, in a folder."""

from pathlib import Path

from prunekit.backends.session import inputs_like
from prunekit.channels.trace import trace
from prunekit.deploy.deployment_transform import transform_of
from prunekit.errors import UsageError
from prunekit.jobs.run.command_subject import RECIPE_ONLY, Own, Subject
from prunekit.jobs.run.job_subject import prepare
from prunekit.jobs.run.resume import run_recipe
from prunekit.jobs.run.run_folder import AnalysisRun, environment, run_folder, write_report
from prunekit.measure.latency.machine import clock_mhz, describe_machine
from prunekit.pruning.latency.device_clock import accept_times
from prunekit.pruning.latency.profiled_networks import kit, layer_setting
from prunekit.pruning.latency.profiling import Profile, profile
from prunekit.settings.deployment import DeploySettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import PruneSettings
from prunekit.utils.files import StrPath, write_csv, write_json
from prunekit.utils.progress import Log, stage

LAYER_COLUMNS = ("module", "dense_ms", "share", "constant_ms", "steps", "changes_at", "error")
NETWORK_COLUMNS = ("predicted_ms", "measured_ms", "macs_left", "held_out", "error")


def profile_job(
    job: JobSettings,
    *,
    networks: int | None = None,
    again: bool = False,
    times: StrPath | None = None,
    log: Log = stage,
    own: Own = RECIPE_ONLY,
) -> AnalysisRun[Profile]:
    """Profile a job's dense model, which need not be trained, on the job's `prune.target`.

    `times` is the `times.json` of a kit, which another machine measured.
    """
    device = job.prune.target.device
    if times is not None:
        if not job.prune.target.elsewhere:
            raise UsageError(f"prune.target.device: expected the machine that measured {times}, got {device!r}")
        log(f"profile: {times} is of the kit {accept_times(times, device)}")
    layer_setting(job.prune.target)  # raises if the runtime is missing
    text = run_recipe(job, own)
    prepared = prepare(job, own)
    example = prepared.example_inputs
    chart = trace(prepared.model, example)
    inputs_like(example)  # raises if the model cannot be timed
    transform = transform_of(prepared.model, example, job.deploy)
    with run_folder(job.output / job.name, "profile", log, text, write_report) as run:
        machine = describe_machine()
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
        machine = {} if job.prune.target.elsewhere else machine | {"clock_mhz_after": clock_mhz()}
        metrics = {"name": job.name, **result.summary(), "machine": machine, "environment": environment()}
        write_csv(run.path / "profile.csv", metrics["layers"], LAYER_COLUMNS)
        write_csv(run.path / "networks.csv", [found.row() for found in result.predictions], NETWORK_COLUMNS)
        write_json(run.path / "fits.json", {"layers": result.fits(prepared.model)})
        write_json(run.path / "profile.json", metrics)
    return AnalysisRun(run.path, result, metrics)


def kit_of(
    subject: Subject, settings: PruneSettings, deploy: DeploySettings, output: Path, networks: int | None, log: Log
) -> Path:
    """Write the kit for a profile of a model on the other machine that the target of the settings names."""
    layer_setting(settings.target)  # raises if the runtime is missing
    example = subject.example_inputs
    return kit(
        subject.model,
        example,
        output=output,
        target=settings.target,
        settings=settings,
        networks=networks,
        transform=transform_of(subject.model, example, deploy),
        log=log,
    )
