"""The jobs of a recipe from Python: each writes the folder that its command writes, and returns its result.

A recipe is a file, the name of a packaged one, or `JobSettings`. Overrides are values by key, as `KEY=VALUE` on the
command line: `{"prune.budget.macs": 0.4, "finetune.epochs": 2}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from prunekit.errors import UsageError
from prunekit.jobs.calibrate import CalibrationResult
from prunekit.jobs.calibrate import calibrate as run_calibration
from prunekit.jobs.finetune import finetune as run_finetuning
from prunekit.jobs.finetune import prune_job
from prunekit.jobs.profile import ProfileRun, profile_job
from prunekit.jobs.run.job_inputs import RECIPE_ONLY, Own
from prunekit.jobs.run.results import RunResult
from prunekit.jobs.run.run_folder import Log
from prunekit.jobs.sensitivity import SensitivityRun, analyze
from prunekit.jobs.stages.training_stage import OnEpoch
from prunekit.measure.effort import Effort
from prunekit.recipe.loading import load, own_overrides, with_overrides
from prunekit.recipe.overrides import Overrides, as_texts
from prunekit.settings.job import JobSettings
from prunekit.utils.files import StrPath
from prunekit.utils.progress import reporting, stage

Recipe = StrPath | JobSettings


def job_of(
    recipe: Recipe, overrides: Overrides = (), own: Own = RECIPE_ONLY, *, allow_code: bool = False
) -> JobSettings:
    """Return the settings of a recipe with overrides applied, checked as a whole.

    Args:
        recipe: a file, the name of a recipe that comes with the package, or settings.
        overrides: values by key.
        own: the user's own code, which replaces that of the recipe.
        allow_code: whether code that the recipe's file names may run; what overrides and settings name always may.

    Raises:
        UsageError: the recipe is none of these.
        RecipeError: there is no such recipe, or it has problems, all of which are in the message.

    Example:
        >>> from prunekit.recipe_jobs import job_of
        >>> job_of("resnet34", {"prune.budget.macs": 0.3}).prune.budget.macs
        0.3
    """
    if not isinstance(recipe, (str, PathLike, JobSettings)):
        raise UsageError(
            "recipe: expected a file, a name such as 'resnet34', or prunekit.JobSettings, got "
            f"{type(recipe).__name__}; a model of your own is pruned by prunekit.prune(model, x, macs=0.5), "
            "or goes into a job by own=prunekit.Own(model='file.py:factory')"
        )
    given = own_overrides(model=own.model, data=own.data)
    changes = [*as_texts(overrides), *given]
    if isinstance(recipe, JobSettings):
        return with_overrides(recipe, changes) if changes else recipe
    return load(recipe, changes, allow_code=allow_code)


def finetune(
    recipe: Recipe,
    overrides: Overrides = (),
    *,
    own: Own = RECIPE_ONLY,
    allow_code: bool = False,
    on_epoch: OnEpoch | None = None,
    resume: StrPath | None = None,
    log: Log = stage,
    progress: bool | None = None,
) -> RunResult:
    """Run the whole job of a recipe, as `prunekit finetune` does.

    The dense model is trained or loaded, calibrated, pruned, fine-tuned, made compact, verified and measured, and a
    report is written.

    Args:
        recipe: a file, the name of a recipe that comes with the package, or settings.
        overrides: values by key, such as `{"prune.budget.macs": 0.4}`.
        own: the user's own model, data and optimizer, `file.py:factory` each, in the place of the recipe's.
        allow_code: whether code that the recipe's file names, such as a criterion `mine.py:score`, may run.
        on_epoch: called with a dictionary after each epoch that is trained: `run` (`baseline`, `pruned`, `control`...),
            `epoch`, `epochs` (of how many), `lr`, `train_loss`, `validation_loss`, the scores (`validation_top1`), as
            `history.csv` has them. An exception that it raises ends the run, marks its folder as interrupted, and is
            raised here, which is how a sweep ends a trial.
        resume: folder of a run of this job to continue, or `auto` for the newest that has not finished, if any.
        log: gets a line for each stage; by default the logger `prunekit` gets it.
        progress: whether to show bars on stderr; None: on a terminal and in a notebook.

    Returns:
        The run: `folder`, `metrics`, `history`, `plan`, and `model()` and `dense()`, which load its models.

    Raises:
        UsageError: recipe, data, model or budget do not fit; nothing was written.
        ResumeError: the run to resume is of another recipe, plan or version, still runs, or has finished.
        RunError: the run failed; its folder says so.

    Example:
        >>> import prunekit as pk
        >>> model = {"model": {"name": "resnet8", "zoo": "cifar"}, "data.image_size": 8, "data.batch": 128}
        >>> short = {"baseline.epochs": 3, "finetune.epochs": 1, "control": False}
        >>> timing = {"latency.batches": [1], "latency.repeats": 5, "latency.explain": False}
        >>> result = pk.finetune("resnet34", {**model, **short, **timing, "prune.budget.macs": 0.4, "threads": 1})
        >>> result  # its folder has the models and report.html
        <RunResult: runs/resnet34/...: MACs ...>
        >>> dense, kept = result.plan.totals()["MACs"]
        >>> kept < 0.4 * dense, [(row["run"], row["epoch"]) for row in result.history]
        (True, [('baseline', 1), ('baseline', 2), ('baseline', 3), ('pruned', 1)])
    """
    job = job_of(recipe, overrides, own, allow_code=allow_code)
    with reporting(progress, "finetune"):
        return run_finetuning(job, log=log, progress=progress, own=own, resume=resume, on_epoch=on_epoch)


def prune(
    recipe: Recipe,
    overrides: Overrides = (),
    *,
    own: Own = RECIPE_ONLY,
    allow_code: bool = False,
    on_epoch: OnEpoch | None = None,
    resume: StrPath | None = None,
    log: Log = stage,
    progress: bool | None = None,
) -> RunResult:
    """Run the job of a recipe without fine-tuning, as `prunekit prune` does; see `prunekit.prune` for a model at hand.

    Arguments are as for `finetune`.

    Raises:
        UsageError: recipe, data, model or budget do not fit; nothing was written.
        RunError: the run failed; its folder says so.
    """
    job = job_of(recipe, overrides, own, allow_code=allow_code)
    with reporting(progress, "prune"):
        return prune_job(job, log=log, progress=progress, own=own, resume=resume, on_epoch=on_epoch)


def calibrate(
    recipe: Recipe,
    overrides: Overrides = (),
    *,
    own: Own = RECIPE_ONLY,
    allow_code: bool = False,
    log: Log = stage,
    progress: bool | None = None,
) -> CalibrationResult:
    """Collect activation statistics of a recipe's dense model, as `prunekit calibrate` does.

    For a model at hand see `prunekit.calibrate`.

    Arguments are as for `finetune`.

    Raises:
        UsageError: recipe, data or model do not fit.
        NonFiniteError: an activation is NaN or Inf; names the layer.
    """
    job = job_of(recipe, overrides, own, allow_code=allow_code)
    with reporting(progress, "calibrate"):
        return run_calibration(job, log=log, progress=progress, own=own)


def sensitivity(
    recipe: Recipe,
    overrides: Overrides = (),
    *,
    measured: bool = False,
    groups: Sequence[str] = (),
    own: Own = RECIPE_ONLY,
    allow_code: bool = False,
    log: Log = stage,
    progress: bool | None = None,
) -> SensitivityRun:
    """Measure what a recipe's dense model loses by each number of kept channels, as `prunekit sensitivity` does.

    For a model at hand see `prunekit.sensitivity`.

    `measured` says whether to measure too, by masking, which is exact and slower; `groups` are globs over names of
    channel groups, none for all. Other arguments are as for `finetune`.

    Raises:
        UsageError: recipe, data, model or globs do not fit; nothing was written.
        RunError: the run failed; its folder says so.
    """
    job = job_of(recipe, overrides, own, allow_code=allow_code)
    with reporting(progress, "sensitivity"):
        return analyze(job, measured=measured, groups=groups, log=log, progress=progress, own=own)


def profile(
    recipe: Recipe,
    overrides: Overrides = (),
    *,
    networks: int = Effort.networks,
    own: Own = RECIPE_ONLY,
    allow_code: bool = False,
    log: Log = stage,
    progress: bool | None = None,
) -> ProfileRun:
    """Measure the latency of each layer of a recipe's dense model by its widths, as `prunekit profile` does.

    For a model at hand see `prunekit.profile`.

    `networks` is how many are timed, at least 10; those in the cache are not timed again. Other arguments are as for
    `finetune`.

    Raises:
        UsageError: recipe, data, model or target do not fit; nothing was written.
        RunError: the run failed; its folder says so.
    """
    job = job_of(recipe, overrides, own, allow_code=allow_code)
    with reporting(progress, "profile"):
        return profile_job(job, networks=networks, log=log, own=own)
