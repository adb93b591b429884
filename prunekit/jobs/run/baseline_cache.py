"""The dense model of a job with its weights: as given, from the cache, or trained now and cached by content."""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from prunekit.channels.trace import trace
from prunekit.distributed.process_group import main_has, main_process_only, size
from prunekit.errors import PrunekitError
from prunekit.hooks.model_copy import named_tensors
from prunekit.jobs.run.command_subject import RECIPE_ONLY, Own, own_source
from prunekit.jobs.run.job_subject import JobSubject, prepare, share_model
from prunekit.jobs.run.run_folder import digest, weights_digest
from prunekit.measure.latency.machine import cpu_name
from prunekit.reading.text_files import as_record
from prunekit.report.headline import unbeaten
from prunekit.settings.job import JobSettings
from prunekit.settings.train import TrainSettings
from prunekit.tasks.task import described_task
from prunekit.training.callbacks.callback import Callback, ClampRow, Compilation, EpochRow, History
from prunekit.training.callbacks.selection import CallbackInputs, build_callbacks
from prunekit.training.checkpoints import Checkpoints
from prunekit.training.loop import fit
from prunekit.utils.context import threads
from prunekit.utils.files import atomic_file, keep_newest, user_cache
from prunekit.utils.progress import Log
from prunekit.utils.registry import registered_names
from prunekit.utils.state_folders import read_state, write_state
from prunekit.utils.tensors import require_same_kind
from prunekit.utils.user_code import is_reference


@dataclass(frozen=True, eq=False)
class Baseline:
    """The dense model with its weights."""

    model: nn.Module  # on the CPU
    rows: tuple[EpochRow, ...]  # epochs of its training; empty if the weights were given
    # clamps, compilation: figures of gradient clamps and of compiling, if it was trained now
    clamps: tuple[ClampRow, ...]
    reused: bool  # whether it came from the cache; then the main process alone has `rows` and `clamps`
    compilation: Compilation | None = None


def trained_subject(job: JobSettings, *, log: Log, progress: bool = False, own: Own = RECIPE_ONLY) -> JobSubject:
    """Return a job's subject whose model has its weights: as given, from the cache, or trained now."""
    prepared = prepare(job, own)
    train_baseline(prepared, log=log, progress=progress)
    return prepared


def train_baseline(
    prepared: JobSubject,
    *,
    log: Log,
    progress: bool,
    checkpoints: Checkpoints | None = None,
    watch: Sequence[Callback] = (),
    on_epoch: Callable[[EpochRow], None] | None = None,
) -> Baseline:
    """Return the dense model with its weights: as given, from the cache, or trained now and cached."""
    job = prepared.job
    if job.model.weights is not None or job.baseline is None:
        return Baseline(prepared.model, (), (), reused=False)
    folder = _baseline_folder(prepared)
    cached = main_process_only(_read_baseline)(prepared, folder, log)
    if main_has(cached):
        share_model(prepared.model, "the dense model")
        log(f"dense: reused {folder} (same model, data, settings and seed)")
        return cached or Baseline(prepared.model, (), (), reused=True)
    chart = None if job.baseline.regularize is None else trace(prepared.model, prepared.example_inputs)
    log(
        f"dense: training {job.model.name} on {len(prepared.splits.train)} "
        f"{prepared.splits.task.samples}, epochs: {job.baseline.epochs}"
    )
    with threads(job.threads):
        history = fit(
            prepared.model,
            prepared.splits,
            job.baseline,
            device=prepared.device,
            seed=job.seed,
            batch=job.data.batch,
            workers=job.data.reading,
            callbacks=[
                *watch,
                *build_callbacks(job.baseline, CallbackInputs(prepared.splits, job.data.batch, channel_map=chart)),
            ],
            own_optimizer=prepared.optimizer_for(job.baseline),
            progress=progress,
            label="dense",
            on_epoch=on_epoch,
            checkpoints=checkpoints,
        )
    prepared.model.cpu()
    task = described_task(prepared.splits.task)
    for line in unbeaten({"trainings": {"baseline": history.chosen()}, "task": task}):
        log(line)
    _save_baseline(folder, prepared.model, history, log)
    return Baseline(prepared.model, history.rows, history.clamps, reused=False, compilation=history.compilation)


@main_process_only
def _save_baseline(folder: Path, model: nn.Module, history: History, log: Log) -> None:
    """Cache a trained model; that it cannot be must not end its run."""
    weights = {name: tensor.detach() for name, tensor in named_tensors(model)}
    rows, clamps = ([asdict(row) for row in table] for table in (history.rows, history.clamps))
    try:
        write_state(folder, {"weights": weights, "training": {"rows": rows, "clamps": clamps}})
    except OSError as error:
        log(f"dense: not cached, so that another run trains it again: {error}")
    with suppress(OSError):  # another run removes the same one
        keep_newest(folder.parent, CACHED_NAME, CACHED_BYTES)


def cached_baseline(prepared: JobSubject) -> Baseline | None:
    """Return the trained dense model from the cache; None if it is not there."""
    return None if prepared.job.baseline is None else _read_baseline(prepared, _baseline_folder(prepared))


def _read_baseline(prepared: JobSubject, folder: Path, log: Log = lambda message: None) -> Baseline | None:
    """Return the baseline from its folder, once all of it is checked; None if it is damaged or not there."""
    if not folder.is_dir():
        return None
    try:
        state = read_state(folder)
        training = as_record(_Training, state.get("training"), str(folder))
        require_same_kind(state.get("weights"), named_tensors(prepared.model), str(folder))
    except (OSError, PrunekitError) as error:
        log(f"dense: {error}; trained again")
        return None
    with torch.no_grad():
        for name, tensor in named_tensors(prepared.model):
            tensor.copy_(state["weights"][name])
    with suppress(OSError):  # a cache that can only be read
        os.utime(folder)
    return Baseline(prepared.model, training.rows, training.clamps, reused=True)


@dataclass(frozen=True)
class _Training:
    """Figures of a baseline's training, as in the cache."""

    rows: tuple[EpochRow, ...]
    clamps: tuple[ClampRow, ...]


def save_weights(path: Path, model: nn.Module) -> None:
    """Write a model's parameters and buffers as safetensors, completely or not at all."""
    with atomic_file(path) as temporary:
        save_file({name: tensor.detach().contiguous() for name, tensor in named_tensors(model)}, temporary)


CACHED_BYTES = 4 << 30
"""Bytes of the user's cache that trained models may take; those that were not used for longest go first."""
CACHED_NAME = re.compile("[0-9a-f]{16}")
PACKAGES = ("numpy", "prunekit", "timm", "torch", "torchvision", "transformers", "ultralytics")
"""Packages whose code decides the weights: models, initial weights, augmentation, training."""


def _baseline_folder(prepared: JobSubject) -> Path:
    """Return where the trained model is cached for all runs of a user, by all that decides its weights."""
    job, device = prepared.job, prepared.device
    assert job.baseline is not None
    named = {name for _, name, _ in registered_names(TrainSettings, job.baseline) if is_reference(name)}
    key = digest(
        {
            "model": prepared.structure,
            "initial": weights_digest(prepared.model),
            "data": [prepared.splits.fingerprint, job.data.augment],
            "training": asdict(job.baseline),
            "code": {name: own_source(name) for name in named},
            "optimizer": prepared.optimizer_source if job.baseline.optimizer == "own" else None,
            "task": [prepared.splits.task.name, prepared.task_source],
            "batch": job.data.batch,
            "seed": job.seed,
            "threads": job.threads,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {cpu_name()}",
            "processes": size(),
            "packages": {name: _version(name) for name in PACKAGES},
        }
    )
    return user_cache("baselines") / key


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
