"""The jobs of a recipe from Python: each writes the folder that its command writes, and returns its result.

A recipe is a file, the name of a packaged one, or `JobSettings`. Overrides are values by key, as `KEY=VALUE` on the
command line: `{"prune.budget.macs": 0.4, "finetune.epochs": 2}`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from prunekit.backends.backend import FORMATS
from prunekit.backends.files.export_source import ExportOptions
from prunekit.compaction.model_folder import ModelWithPlan, save
from prunekit.errors import UsageError
from prunekit.hooks.wrappers import unwrapped
from prunekit.jobs.analyses.profile import profile_job
from prunekit.jobs.analyses.sensitivity import Sensitivity, analyze
from prunekit.jobs.finetune import RunResult, prune_job
from prunekit.jobs.finetune import finetune as run_finetuning
from prunekit.jobs.run.command_subject import RECIPE_ONLY, Own, Subject
from prunekit.jobs.run.run_folder import AnalysisRun
from prunekit.jobs.run.subject_sources import folder_model
from prunekit.jobs.stages.calibration_stage import CalibrationResult
from prunekit.jobs.stages.calibration_stage import calibrate as run_calibration
from prunekit.jobs.stages.export_model import Exported, ExportRequest, require_exportable
from prunekit.jobs.stages.quantize_export import export_target
from prunekit.jobs.stages.training_stage import OnEpoch
from prunekit.jobs.sweep import sweep as run_sweep
from prunekit.measure.measurement_effort import Effort
from prunekit.models.interface import attached
from prunekit.modes.public_call import public_call
from prunekit.pruning.latency.profiling import Profile
from prunekit.recipe.loading import Overrides, as_texts, combinations, own_overrides, with_overrides
from prunekit.recipe.loading import load as load_recipe
from prunekit.settings.deployment import QuantizeSettings
from prunekit.settings.job import JobSettings
from prunekit.utils.files import StrPath
from prunekit.utils.inputs import as_example
from prunekit.utils.progress import Log, reporting, stage

Recipe = StrPath | JobSettings


def job_of(
    recipe: Recipe, overrides: Overrides = (), own: Own = RECIPE_ONLY, *, allow_code: bool = False
) -> JobSettings:
    """Return the settings of a recipe with overrides applied, checked as a whole.

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
    return load_recipe(recipe, changes, allow_code=allow_code)


@public_call
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


@public_call
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
    """
    job = job_of(recipe, overrides, own, allow_code=allow_code)
    with reporting(progress, "prune"):
        return prune_job(job, log=log, progress=progress, own=own, resume=resume, on_epoch=on_epoch)


@public_call
def sweep(
    recipe: Recipe,
    grid: Mapping[str, Sequence[Any]],
    overrides: Overrides = (),
    *,
    own: Own = RECIPE_ONLY,
    allow_code: bool = False,
    **options: Any,
) -> AnalysisRun[list[dict[str, Any]]]:
    """Run a recipe at every combination of settings, and compare the runs, as `prunekit sweep` does.

    Args:
        grid: values by key, such as `{"prune.budget.macs": [0.5, 0.3], "prune.criterion": ["l1", "elimination"]}`.
        options: `training` (whether trials are fine-tuned), and `engine`, `at_once`, `memory`, `retries`, `resume`,
            `log`, which are those of the command.
        recipe, overrides, own, allow_code: as for `finetune`.

    Returns:
        A row for each trial as `result`; `metrics["missing"]` names those without a run.
    """
    job = job_of(recipe, overrides, own, allow_code=allow_code)
    return run_sweep(job, grid, combinations(job, grid), own=own, **options)


@public_call
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
    """
    job = job_of(recipe, overrides, own, allow_code=allow_code)
    with reporting(progress, "calibrate"):
        return run_calibration(job, log=log, progress=progress, own=own)


@public_call
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
) -> AnalysisRun[Sensitivity]:
    """Measure what a recipe's dense model loses by each number of kept channels, as `prunekit sensitivity` does.

    For a model at hand see `prunekit.sensitivity`.

    `measured` says whether to measure too, by masking, which is exact and slower; `groups` are globs over names of
    channel groups, none for all. Other arguments are as for `finetune`.
    """
    job = job_of(recipe, overrides, own, allow_code=allow_code)
    with reporting(progress, "sensitivity"):
        return analyze(job, measured=measured, groups=groups, log=log, progress=progress, own=own)


@public_call
def profile(
    recipe: Recipe,
    overrides: Overrides = (),
    *,
    networks: int = Effort.networks,
    own: Own = RECIPE_ONLY,
    allow_code: bool = False,
    log: Log = stage,
    progress: bool | None = None,
) -> AnalysisRun[Profile]:
    """Measure the latency of each layer of a recipe's dense model by its widths, as `prunekit profile` does.

    For a model at hand see `prunekit.profile`.

    `networks` is how many are timed, at least 10; those in the cache are not timed again. Other arguments are as for
    `finetune`.
    """
    job = job_of(recipe, overrides, own, allow_code=allow_code)
    with reporting(progress, "profile"):
        return profile_job(job, networks=networks, log=log, own=own)


@public_call
@reporting(None, "export")
def export(
    model: nn.Module | ModelWithPlan | StrPath,
    example: Any = None,
    *,
    to: str = "onnx",
    path: StrPath | None = None,
    dense: nn.Module | Callable[[], nn.Module] | None = None,
    recipe: Recipe | None = None,
    own: Own = RECIPE_ONLY,
    dynamic: str | Sequence[str] = (),
    batch: int | None = None,
    opset: int | None = None,
    half: bool = False,
    quantize: QuantizeSettings | None = None,
    force: bool = False,
    timed: Sequence[int] = (1, 16),
    threads: int = 1,
    log: Log = stage,
) -> Exported:
    """Write a model in the format of another runtime, and check, score and time the file before it gets its name.

    Args:
        model: any model, dense or compact; the result of `prunekit.prune`; or a model folder.
        example: what the model is called with: a tensor, a tuple of positional arguments or a mapping of arguments by
            name, samples on the first axis. The file is checked on it; give at least two real samples. None: for a
            folder, test samples of its run or of `recipe`, else random ones in its shapes.
        to: a format, as `prunekit list formats` shows them.
        path: of the file or folder; None: in the working directory, named after the folder, or `model`.
        dense: of a model that is not from a known zoo: the dense model, or a function that builds it; needed for its
            folder, and of use to `standalone`.
        recipe: whose test samples the file is checked and scored on; None: that of the run around a folder.
        own: the user's own data of the recipe.
        dynamic: axes of any size besides the batch: `image` (height and width), `sequence` (length of token ids), or
            `INPUT:AXIS`.
        batch: the only batch size, for models that cannot have any.
        opset: version of ONNX's operators; None: the one that prunekit is tested with.
        half: whether weights are stored in float16, where the format can.
        quantize: whether, and how, the file is quantized to int8.
        force: whether a file or folder that exists is replaced.
        timed: batch sizes at which the file is timed beside eager; empty: none.
        threads: of the CPU, when it is timed.
        log: gets a line for each step.

    Returns:
        The path, and what was found: differences from eager at two batch sizes, scores of the file itself, times.

    Raises:
        UsageError: a format, path, axis or package is missing or wrong; nothing was written.
        ModelError: the model does not run on the example.
        RunError: the format cannot hold the model, or its file computes something else; nothing was written.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> result = pk.prune(model, torch.randn(8, 4), macs=0.5)
        >>> found = pk.export(result, torch.randn(8, 4), to="pt2", path="small.pt2", log=lambda line: None)
        >>> found
        <Exported: small.pt2 (pt2, ... differs from eager by ...>
        >>> [parity.batch for parity in found.parities]
        [2, 5]
    """
    axes, place = (dynamic,) if isinstance(dynamic, str) else tuple(dynamic), None if path is None else Path(path)
    options = ExportOptions(opset, half)
    request = ExportRequest(to, place, options, axes, batch, force, tuple(timed), threads, quantize)
    facts = {} if dense is None else {"dense": dense}
    if isinstance(model, (str, PathLike)):
        folder = Path(model)
        require_exportable(request, str(folder))
        target = folder_model(folder, dense)
        beside = folder.resolve().parent / "recipe.yaml"
        settings = recipe if recipe is not None else beside if beside.is_file() and example is None else None
        if example is not None:
            target = replace(target, inputs=as_example(target.model, example))
        if settings is not None:
            job = job_of(settings, (), own)
            target = target.with_data(job.known_data, own, "check the export on", job.task)
        return export_target(target, request, folder=folder, facts=facts, log=log)
    if example is None:
        raise UsageError("example: expected what the model is called with, at least two samples, got none")
    module = unwrapped(model if isinstance(model, nn.Module) else model.model)
    target = Subject(module, "", (), inputs=as_example(module, example), interface=attached(module))
    if recipe is not None:
        job = job_of(recipe, (), own)
        target = target.with_data(job.known_data, own, "check the export on", job.task)
    with TemporaryDirectory(prefix="prunekit-") as scratch:
        needed = FORMATS.get(to).reads_folder and not isinstance(model, nn.Module)
        saved = save(model, Path(scratch, "model")) if needed else None
        return export_target(target, request, folder=saved, facts=facts, log=log)
