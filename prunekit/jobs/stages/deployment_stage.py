"""The stages that deliver a job's compact model: deployed in a folder, and exported to other formats, each verified."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from prunekit.backends.backend import FORMATS
from prunekit.backends.files.exported_model import ExportedModel
from prunekit.backends.standalone import DENSE
from prunekit.data.loader import batches
from prunekit.deploy.batchnorm_folding import FoldedModel, fold_batchnorm, norms_after_layers
from prunekit.deploy.deployment_transform import channels_last, channels_last_problem
from prunekit.errors import PlanError, PrunekitError, UsageError, raised_as
from prunekit.hooks.model_copy import named_tensors
from prunekit.jobs.run.command_subject import Subject
from prunekit.jobs.run.job_subject import JobSubject
from prunekit.jobs.run.run_folder import Attempts, RunFolder
from prunekit.jobs.stages.export_model import CPU, READ, Exported, ExportRequest, export_float, one_copy
from prunekit.jobs.stages.quantize_export import quantize_export
from prunekit.measure.accuracy import evaluate
from prunekit.measure.latency.timing_job import TOLERANCES
from prunekit.measure.score_drop import Drop, HeldOut, HeldOutScores
from prunekit.measure.verification import compare_outputs
from prunekit.models.interface import interface_of
from prunekit.planning.plan import Plan
from prunekit.settings.job import JobSettings
from prunekit.tasks.task import pair
from prunekit.utils.inputs import call, inputs_as_example, sample_count
from prunekit.utils.progress import Log
from prunekit.utils.tensors import FORMATS as MEMORY_FORMATS
from prunekit.utils.tensors import gather

OR_FLOAT = "set quantize to null, and {} is of models in float"
"""Advice where files in int8 cannot be judged; in braces, for what they would be."""
IMAGES = 32
"""Validation images that compact and deployed model are compared on, in float64."""
DEPLOYED = "deployed"
EXPORTS = "exports"
NAME = "model"
"""Name of exported files, before the suffix of their format."""


@dataclass(frozen=True, eq=False)
class Deployed:
    """A deployed model, and how it differs from the compact one."""

    model: nn.Module  # loaded from its folder
    folded_norms: int  # how many were folded into the layers before them
    norms_kept: dict[str, str]  # why each other norm is kept, by its path
    max_relative_difference: float  # of the outputs from the compact model's, in float64
    after_rounding: float  # the same after the folded weights are rounded to their dtype and saved
    inputs: int  # images that both were compared on
    channels_last: bool  # whether its kernels have that memory format

    def figures(self) -> dict[str, Any]:
        """Return what `metrics.json` holds of the deployment."""
        return {name: value for name, value in vars(self).items() if name != "model"}


def require_deployable(prepared: JobSubject) -> None:
    """Raise if a deployment would do nothing, before hours of work."""
    wanted, model, problems = prepared.job.deploy, prepared.model, list[str]()
    if wanted.fold_batchnorm:
        found = norms_after_layers(model, prepared.example_inputs)
        if not found.pairs:
            reasons = [f"{path}: {reason}" for path, reason in found.kept.items()][:3] or ["it has none"]
            problems.append(
                "deploy.fold_batchnorm: expected a BatchNorm that alone reads a convolution or a linear layer, and "
                f"{type(model).__name__} has none ({'; '.join(reasons)}); set it to false"
            )
    if wanted.channels_last and not any(tensor.dim() in MEMORY_FORMATS for _, tensor in named_tensors(model)):
        problems.append(
            "deploy.channels_last: expected a model with kernels of four or five axes, and "
            f"{type(model).__name__} has none; set it to false"
        )
    elif wanted.channels_last and (problem := channels_last_problem(model, prepared.example_inputs)):
        problems.append(problem)
    if problems:
        raise UsageError("; ".join(problems))


def deploy(prepared: JobSubject, run: RunFolder, dense: nn.Module, plan: Plan) -> Deployed | None:
    """Transform the compact model of a run into the folder `deployed`; None if the job deploys nothing."""
    wanted = prepared.job.deploy
    if not wanted.wanted:
        return None
    compact = prepared.load_model(run.path / "model", dense)
    folded, model, example = _transformed(prepared, compact)
    prepared.save_model(model, run.path / DEPLOYED, plan)
    again = prepared.load_model(run.path / DEPLOYED, dense)
    compare_outputs(model, again, example)
    found = Deployed(
        again,
        folded_norms=len(folded.norms),
        norms_kept=folded.kept,
        max_relative_difference=folded.max_relative_difference,
        after_rounding=compare_outputs(compact, again, example, tolerance=TOLERANCES["float32"]),
        inputs=sample_count(example),
        channels_last=wanted.channels_last,
    )
    run.log(
        f"deploy: {found.folded_norms} norms folded{', channels last' if found.channels_last else ''}; "
        f"compact == deployed to {found.max_relative_difference:.1e} on {found.inputs} {prepared.splits.task.samples} "
        f"(float64), {found.after_rounding:.1e} with weights rounded to their own dtype"
    )
    return found


def _transformed(prepared: JobSubject, compact: nn.Module) -> tuple[FoldedModel, nn.Module, tuple[Any, ...]]:
    """Return a compact model with norms folded, a copy as it is deployed, and the validation samples of the checks."""
    wanted, validation = prepared.job.deploy, prepared.splits.validation
    held_out, _ = next(iter(batches(validation, min(IMAGES, len(validation)), shuffle_seed=None)))
    example = inputs_as_example(compact, held_out)
    folded = fold_batchnorm(compact, example) if wanted.fold_batchnorm else FoldedModel(compact, {}, {}, 0.0)
    return folded, channels_last(folded.model, example) if wanted.channels_last else folded.model, example


def require_formats(prepared: JobSubject) -> None:
    """Raise if a format of the job's exports cannot be written or judged here, before hours of work."""
    unusable = {name: FORMATS.get(name).unusable() for name in prepared.job.export}
    problems = [f"export {name!r} {reason}" for name, reason in unusable.items() if reason]
    if prepared.job.quantize is not None:
        quantizing = [kind for name in prepared.job.export if (kind := FORMATS.get(name)).quantizer]
        problems += [reason for kind in quantizing if (reason := kind.unquantizable())]
    if problems:
        raise UsageError("; ".join(problems))
    if prepared.job.prune.budget.max_drop is not None:
        require_int8_scores(prepared, "max_drop")


def int8_format(job: JobSettings) -> str | None:
    """Return the format whose int8 files a job's models are judged as: its first that has any; None without int8."""
    able = (name for name in job.export if FORMATS.get(name).quantizer)
    return None if job.quantized is None else next(able, None)


def require_int8_scores(prepared: JobSubject, judge: str) -> None:
    """Raise if a job's models are judged as int8 files, and these cannot be made here or the task not score them."""
    if (name := int8_format(prepared.job)) is None:
        return
    model, splits = one_copy(prepared.model), prepared.splits
    if problem := FORMATS.get(name).unquantizable():
        raise UsageError(f"{problem}; or {OR_FLOAT.format(judge)}")
    inputs, targets = next(iter(batches(splits.validation, READ, shuffle_seed=None)))
    example = inputs_as_example(model, inputs)
    because, advice = f"quantize: with it {judge} judges files in int8", f"; {OR_FLOAT.format(judge)}"
    unscored = f"task {splits.task.name!r} cannot score the outputs of one of {type(prepared.model).__name__}"
    with raised_as(UsageError, f"{because}, and {unscored}: ", advice):
        # a module in place of the file, which returns what the file will
        interface = interface_of(model, example)
        file = ExportedModel(Path(NAME), name, interface, lambda given: gather(call(model, given)))
        evaluate(file, [(inputs, targets)], replace(splits.task, unpack=pair), CPU)
    exporting = _exporting_aside(prepared, model, name)
    with exporting as (target, request), raised_as(UsageError, f"{because}: ", advice):
        export_float(target, request, log=lambda line: None)


@contextmanager
def _exporting_aside(prepared: JobSubject, model: nn.Module, name: str) -> Iterator[tuple[Subject, ExportRequest]]:
    """Yield what `_exporting` returns, for a file that is neither timed, nor scored on test samples, nor kept."""
    with TemporaryDirectory(prefix="prunekit-int8-", ignore_cleanup_errors=True) as folder:
        target, request = _exporting(prepared, model, name, Path(folder))
        yield target, replace(request, timed=(), scored=False)


class Int8Copies:
    """Files in int8, exported of candidate models as the job exports its final one, and scored on held-out samples.

    Layers return to float as there: all validation samples choose them, by `quantize.max_drop`, also the half that
    confirms a search. What is lost is from the dense model in float.
    """

    def __init__(self, prepared: JobSubject, held_out: HeldOut, name: str, log: Log) -> None:
        self._prepared, self._held_out, self._format, self._log = prepared, held_out, name, log

    def score(self, model: nn.Module) -> HeldOutScores:
        """Return the scores of a compact model's file; raise a `PlanError` if none can be made, or within the limit."""
        shipped = _transformed(self._prepared, model)[1]
        with _exporting_aside(self._prepared, shipped, self._format) as (target, request):
            self._log(f"int8: the file of {self._format} is made, and scored on the held-out samples")
            try:
                found = export_float(target, request, log=lambda line: None)
                file = quantize_export(target, found, request, log=lambda line: None)
            except PrunekitError as error:
                raise PlanError(str(error)) from error
            run = FORMATS.get(self._format).open_trusted(file.path)
            scores = self._held_out.score(ExportedModel(file.path, file.format, file.interface, run))
            return replace(scores, dtype="int8")

    def drop(self, model: nn.Module) -> tuple[Drop | None, str]:
        """Return what a compact model's file loses to the dense model in float; None, and why, if there is none."""
        try:
            return self._held_out.drop(self.score(model)), ""
        except PlanError as error:
            return None, str(error)


def _exporting(prepared: JobSubject, model: nn.Module, name: str, folder: Path) -> tuple[Subject, ExportRequest]:
    """Return what a job exports to a format, and how, as a file or folder in a folder."""
    job, splits, kind = prepared.job, prepared.splits, FORMATS.get(name)
    path = folder / (f"{NAME}{kind.suffix}" if kind.suffix else name)
    quantize, timed = job.quantized if kind.quantizer else None, tuple(job.latency.batches)
    target = Subject(model, job.name, splits.sample_shape, splits, inputs=prepared.example_inputs)
    return target, ExportRequest(name, path, force=True, timed=timed, threads=job.latency.threads[0], quantize=quantize)


def export_models(
    prepared: JobSubject, run: RunFolder, folder: str, model: nn.Module, *, attempt: Attempts, dense: nn.Module
) -> list[dict[str, Any]]:
    """Export a job's finished model to every format of the recipe, and return a row of figures for each file."""
    rows, facts = [], {DENSE: dense}
    for name in prepared.job.export:
        target, request = _exporting(prepared, model, name, run.path / EXPORTS)
        exporting = partial(export_float, target, request, folder=run.path / folder, facts=facts, log=run.log)
        found: Exported | None = attempt(f"export to {name}", exporting)
        if found is None:
            continue
        files: list[Exported | None] = [found]
        if request.quantize is not None:
            quantizing = partial(quantize_export, target, found, request, dense=dense, log=run.log)
            files.append(attempt(f"int8 of the export to {name}", quantizing))
        rows += [file.figures() | {"path": str(file.path.relative_to(run.path))} for file in files if file is not None]
    return rows
