"""The stages that deliver a job's compact model: deployed in a folder, and exported to other formats, each verified."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from prunekit.backends.backend import FORMATS
from prunekit.backends.standalone import DENSE
from prunekit.data.loader import batches
from prunekit.deploy.batchnorm_folding import FoldedModel, fold_batchnorm, norms_after_layers
from prunekit.deploy.deployment_transform import channels_last, channels_last_problem
from prunekit.errors import UsageError
from prunekit.hooks.model_copy import named_tensors
from prunekit.jobs.run.command_subject import Subject
from prunekit.jobs.run.job_subject import JobSubject
from prunekit.jobs.run.run_folder import Attempts, RunFolder
from prunekit.jobs.stages.export_model import Exported, ExportRequest, export_float
from prunekit.jobs.stages.quantize_export import quantize_export
from prunekit.measure.latency.timing_job import TOLERANCES
from prunekit.measure.verification import compare_outputs
from prunekit.planning.plan import Plan
from prunekit.settings.deployment import QuantizeSettings
from prunekit.utils.inputs import inputs_as_example, sample_count
from prunekit.utils.tensors import FORMATS as MEMORY_FORMATS

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
    validation = prepared.splits.validation
    held_out, _ = next(iter(batches(validation, min(IMAGES, len(validation)), shuffle_seed=None)))
    example = inputs_as_example(compact, held_out)
    folded = fold_batchnorm(compact, example) if wanted.fold_batchnorm else FoldedModel(compact, {}, {}, 0.0)
    model = channels_last(folded.model, example) if wanted.channels_last else folded.model
    prepared.save_model(model, run.path / DEPLOYED, plan)
    again = prepared.load_model(run.path / DEPLOYED, dense)
    compare_outputs(model, again, example)
    found = Deployed(
        again,
        folded_norms=len(folded.norms),
        norms_kept=folded.kept,
        max_relative_difference=folded.max_relative_difference,
        after_rounding=compare_outputs(compact, again, example, tolerance=TOLERANCES["float32"]),
        inputs=sample_count(held_out),
        channels_last=wanted.channels_last,
    )
    run.log(
        f"deploy: {found.folded_norms} norms folded{', channels last' if found.channels_last else ''}; "
        f"compact == deployed to {found.max_relative_difference:.1e} on {found.inputs} {prepared.splits.task.samples} "
        f"(float64), {found.after_rounding:.1e} with weights rounded to their own dtype"
    )
    return found


def require_formats(prepared: JobSubject) -> None:
    """Raise if a format of the job's exports cannot be written here, before hours of work."""
    unusable = {name: FORMATS.get(name).unusable() for name in prepared.job.export}
    problems = [f"export {name!r} {reason}" for name, reason in unusable.items() if reason]
    if prepared.job.quantize is not None:
        quantizing = [kind for name in prepared.job.export if (kind := FORMATS.get(name)).quantizer]
        problems += [reason for kind in quantizing if (reason := kind.unquantizable())]
    if problems:
        raise UsageError("; ".join(problems))


def export_models(
    prepared: JobSubject, run: RunFolder, folder: str, model: nn.Module, *, attempt: Attempts, dense: nn.Module
) -> list[dict[str, Any]]:
    """Export a job's finished model to every format of the recipe, and return a row of figures for each file."""
    job, splits = prepared.job, prepared.splits
    target = Subject(model, job.name, splits.sample_shape, splits, inputs=prepared.example_inputs)
    rows, facts, timed = [], {DENSE: dense}, tuple(job.latency.batches)
    wanted = QuantizeSettings() if job.quantize == "int8" else job.quantize
    for name in job.export:
        kind = FORMATS.get(name)
        path = run.path / EXPORTS / (f"{NAME}{kind.suffix}" if kind.suffix else name)
        quantize = wanted if isinstance(wanted, QuantizeSettings) and kind.quantizer else None
        threads = job.latency.threads[0]
        request = ExportRequest(name, path, force=True, timed=timed, threads=threads, quantize=quantize)
        exporting = partial(export_float, target, request, folder=run.path / folder, facts=facts, log=run.log)
        found: Exported | None = attempt(f"export to {name}", exporting)
        if found is None:
            continue
        files: list[Exported | None] = [found]
        if quantize is not None:
            quantizing = partial(quantize_export, target, found, request, dense=dense, log=run.log)
            files.append(attempt(f"int8 of the export to {name}", quantizing))
        rows += [file.figures() | {"path": str(file.path.relative_to(run.path))} for file in files if file is not None]
    return rows
