"""Quantized exports: an int8 file beside the one in float, scored, and timed against it and the dense model."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from prunekit.backends.backend import FORMATS, FileBackend
from prunekit.backends.files.export_source import ExportSource, Run
from prunekit.backends.files.exported_model import ExportedModel
from prunekit.data.loader import batches
from prunekit.errors import PrunekitError, UsageError
from prunekit.hooks.wrappers import unwrapped
from prunekit.jobs.run.command_subject import Subject
from prunekit.jobs.run.dense_model import load_dense
from prunekit.jobs.stages import export_model as exports
from prunekit.jobs.stages.export_model import Exported, ExportRequest
from prunekit.measure.accuracy import evaluate
from prunekit.models.interface import ModelInterface
from prunekit.settings.deployment import QuantizeSettings
from prunekit.utils.files import folder_beside
from prunekit.utils.inputs import call, inputs_as_example, is_batched
from prunekit.utils.progress import Log
from prunekit.utils.tensors import gather


def require_quantizable(request: ExportRequest) -> None:
    """Raise if a request asks for int8 in a format that has none, or that needs a package for it."""
    if request.quantize is not None and (problem := FORMATS.get(request.to).unquantizable()):
        raise UsageError(problem)


def export_target(
    target: Subject,
    request: ExportRequest,
    *,
    folder: Path | None = None,
    facts: Mapping[str, Any] | None = None,
    log: Log,
) -> Exported:
    """Export a model, and quantize the file if the request asks for it; see `export_float` and `quantize_export`."""
    if request.quantize is None:
        return exports.export_float(target, request, folder=folder, facts=facts, log=log)
    require_quantizable(request)
    require_calibration(target)
    found, dense = exports.export_float(target, request, folder=folder, facts=facts, log=log), None
    if folder is not None and request.timed:
        with suppress(PrunekitError):  # of the user's own code, or without a run around the folder
            dense = load_dense(folder)
    return replace(found, int8=quantize_export(target, found, request, dense=dense, log=log))


def require_calibration(target: Subject) -> None:
    """Raise if there is no data to take the ranges of activations from."""
    splits = target.splits
    if splits is not None and splits.train is splits.test:
        raise UsageError(
            "int8: expected training images to take the ranges of activations from, and these are test images alone, "
            "which the score is of; give --recipe, or --data file.py:factory"
        )
    if splits is not None:
        return
    samples, real = exports.real_samples(target)
    if not real or not is_batched(samples):
        raise UsageError(
            "int8: expected data to take the ranges of activations from: a model folder inside its run, --recipe or "
            "--data; in Python an example of several real samples, or recipe="
        )


def quantize_export(
    target: Subject, exported: Exported, request: ExportRequest, *, dense: nn.Module | None = None, log: Log
) -> Exported:
    """Quantize an exported file to int8, as a file beside it, whose name ends in `-int8`.

    Ranges come from training samples. The limit of `settings.max_drop` is kept on validation samples; the score that is
    reported is on the test samples, which nothing has seen before.
    """
    kind, path, settings = FORMATS.get(exported.format), exports.int8_path(exported.path), request.quantize
    assert settings is not None
    require_calibration(target)
    data = list(_calibration(target, exported.interface, settings))
    score = (
        None
        if target.splits is None or target.splits.unmeasured
        else partial(_validation_merit, kind, exported.interface, target)
    )
    count = sum(max((len(array) for array in batch.values() if array.ndim), default=1) for batch in data)
    log(f"int8: quantizing {exported.path}, calibrated on {min(settings.images, count)} samples")
    with folder_beside(path) as beside_it:
        aside = beside_it / "written"
        aside.mkdir()
        found = kind.quantize(exported.path, aside / path.name, data, settings=settings, score=score, log=log)
        if target.splits is not None and target.splits.task.main.lower_is_better:  # it was chosen by the negatives
            before, after = (None if merit is None else -merit for merit in (found.float_score, found.score))
            found = replace(found, float_score=before, score=after, lower_is_better=True)
        run = kind.open_trusted(aside / path.name, threads=request.threads)
        model = exports.one_copy(target.model)
        samples, real = exports.real_samples(target)
        module = ExportedModel(aside / path.name, kind.format, exported.interface, run)
        scores = exports.score_export(module, target, request, log)
        latency = tuple(exports.time_export(partial(call, model), run, samples, request))
        others = {"float": kind.open_trusted(exported.path, threads=request.threads)}
        if dense is not None and request.timed:
            others["dense"] = _dense_run(kind, dense, samples, exported.interface, request, beside_it)
        beside = [
            {"over": name, **exports.latency_row(batch, timed, "other")}
            for name, other in others.items()
            for batch, timed in exports.time_export(other, run, samples, request)
        ]
        bytes_written = exports.size_of(aside)
        del run, others, module
        exports.move_into_place(aside, path)
    figures = found.as_dict() | {"path": str(path), "speedup": beside}
    size, notes, interface = bytes_written, tuple(found.notes), exported.interface
    return Exported(path, kind.format, size, (), real, scores, latency, interface, notes, figures)


def _calibration(
    target: Subject, interface: ModelInterface, settings: QuantizeSettings
) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Yield training samples, or those of the example, as arrays by the names of the inputs."""
    names, fixed = [one.name for one in interface.inputs], exports.fixed_batch(interface)
    if target.splits is None:
        chosen: Iterable[Any] = exports.samples_in_batches(exports.real_samples(target)[0], fixed or exports.READ)
    else:
        train = target.splits.train
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[: settings.images]
        chosen = (
            inputs_as_example(target.model, inputs) for inputs, _ in exports.file_batches(train, interface, order)
        )
    for example in chosen:
        yield {name: tensor.numpy() for name, tensor in zip(names, gather(example), strict=True)}


def _validation_merit(kind: FileBackend, interface: ModelInterface, target: Subject, file: Path) -> float:
    """Return the main score of a file on the validation samples; its negative if less is better."""
    assert target.splits is not None
    held_out = batches(target.splits.validation, exports.READ, shuffle_seed=None)
    module = ExportedModel(file, kind.format, interface, kind.open_trusted(file))
    found = evaluate(module, held_out, target.splits.task, exports.CPU)
    score = next(iter(found.values.values()))
    return -score if found.lower_is_better else score


def _dense_run(
    kind: FileBackend,
    dense: nn.Module,
    samples: tuple[Any, ...],
    interface: ModelInterface,
    request: ExportRequest,
    folder: Path,
) -> Run:
    """Export the dense model in float, to time against, and open it."""
    example = next(exports.checked_batches(samples, request.batch))
    file = folder / "dense" / f"dense{kind.suffix}"
    file.parent.mkdir()
    kind.write(ExportSource(exports.one_copy(unwrapped(dense)), example, interface, request.options), file)
    return kind.open_trusted(file, threads=request.threads)
