"""Checks of what the words of a command or a recipe name: models, files, code, packages. They need no torch.

A command makes them before it imports torch, so that a typo is told at once; the work itself makes them again, because
it may be called from Python.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from prunekit.data.roots import missing_data
from prunekit.errors import ArtifactError, DataError, ModelError, ResumeError, UsageError
from prunekit.known_names import FORMATS, RUNTIMES, is_export_name
from prunekit.models.names import missing_file, require_bare_name, zoo_of
from prunekit.reading.text_files import read_json
from prunekit.utils.availability import ADAPTERS, QAT, REPORT, missing_packages, unusable
from prunekit.utils.user_code import is_reference, require_object

if TYPE_CHECKING:
    from prunekit.settings.job import JobSettings
    from prunekit.utils.registry import Registry

MANIFEST = "prunekit.json"
"""The manifest in a model folder."""
TENSOR_FILES = (".npy", ".npz", ".safetensors")
"""Ends of the names of files of inputs."""
AUTO = "auto"
"""In place of a run's folder: the newest unfinished run of the same recipe."""


def require_job(job: JobSettings, *, model: str | None, data: str | None, optimizer: str | None = None) -> None:
    """Raise if a job names what is not there: model, data, weights, or own code of the command line."""
    require_own(job, model, data)
    for reference, error in ((model, ModelError), (data, DataError), (optimizer, UsageError)):
        if reference is not None:
            require_object(reference, error)
    require_bare_name(job.model.name, job.model.zoo)
    require_files(job)


def require_packages(job: JobSettings, *, dry: bool, training: bool) -> None:
    """Raise if a runtime, format or adapter of a run needs what this machine lacks; a dry run exports nothing."""
    for key, package, install in (("adapter", "peft", ADAPTERS), ("fake_quantize", "torchao", QAT)):
        wanted = training and getattr(job.finetune, key) is not None
        if wanted and (missing := missing_packages([package], install)):
            raise UsageError(f"finetune.{key} {missing}")
    target = [job.prune.target.runtime] if job.prune.budget.measured and not dry else []
    require_usable("runtime", RUNTIMES, dict.fromkeys([*target, *job.latency.runtimes]))
    require_usable("export", FORMATS, () if dry else job.export)


def left_out(job: JobSettings) -> str:
    """Return what a run leaves out because packages are not installed; empty if it leaves out nothing."""
    parts = {"matplotlib": "figures"}
    if job.watch is not None and job.watch.tensorboard:
        parts["tensorboard"] = "TensorBoard's events"
    lacking = {package: part for package, part in parts.items() if missing_packages([package])}
    what, packages = " and ".join(lacking.values()), " and ".join(lacking)
    return f"without {what}, which need {packages}: {REPORT}" if lacking else ""


def require_own(job: JobSettings, model: str | None, data: str | None) -> None:
    """Raise if a job's model or data is the user's own code and the command names none, or the other way round."""
    pairs = (
        ("model.zoo", job.model.zoo, model, "--model", job.model.name),
        ("data.source", job.data.source, data, "--data", None),
    )
    for key, value, reference, option, named in pairs:
        if (value == "own") != (reference is not None):
            given = f"{option} was not given" if reference is None else f"{option} is {reference}"
            text = f"{key} is {value!r} and {given}: expected 'own' together with {option} file.py:factory"
            if reference is None and is_reference(named):
                text += f"; if you trust that code, add {option} {named}"
            raise UsageError(text)


def require_files(job: JobSettings, downloads: str | None = None) -> None:
    """Raise if the root of a job's data, its file of weights or its folder of transformers is not there.

    `downloads` says which weights would be downloaded, but not while the data is missing.
    """
    data, file = missing_data(job.data), missing_file(job.model)
    missing = [text for text in (data, file or downloads) if text is not None]
    if data is not None or file is not None:
        raise DataError("\n  ".join([f"{len(missing)} things are missing:", *missing]) if missing[1:] else missing[0])


def require_usable(kind: str, registry: Registry[object], names: Iterable[str]) -> None:
    """Raise if a runtime or a format needs what this machine lacks; names of the user's own code are not looked at."""
    facts = registry.facts()
    lacking = {name: unusable(facts[name]) for name in names if name in facts}
    if problems := [f"{kind} {name!r} {reason}" for name, reason in lacking.items() if reason]:
        raise UsageError("; ".join(problems))


def require_format(name: str) -> None:
    """Raise if a format of exports is unknown, or needs what this machine lacks."""
    if (problem := FORMATS.problem(name)) is not None:
        raise UsageError(f"format: {problem}")
    if reason := unusable(FORMATS.facts().get(name, {})):
        raise UsageError(f"export to {name} {reason}")


def require_target(name: str, zoo: str | None = None) -> None:
    """Raise if a word that names a model on a command line is no model folder, no file and no name of its zoo."""
    path = Path(name)
    if zoo is not None:
        if not path.exists():  # else the command says that a path is no name
            require_bare_name(name, zoo)
    elif path.is_dir():
        require_model_folder(path)
        read_json(path / MANIFEST)  # raises where it is damaged
    elif not path.exists():
        if is_export_name(name):
            raise ArtifactError(f"{name}: expected an exported file, and there is none")
        zoo_of(name)


def require_trained(name: str, trained: bool) -> None:
    """Raise a `ModelError` for a model with random weights, whose outputs would mean nothing."""
    if not trained:
        raise ModelError(
            f"{name}: expected trained weights, but they are random; give --weights, or a recipe or model folder"
        )


def require_images(paths: Iterable[Path]) -> None:
    """Raise a `DataError` if an image, or a file of inputs, is not there."""
    if (missing := next((path for path in paths if not path.exists()), None)) is not None:
        kind = "a file of inputs" if missing.suffix in TENSOR_FILES else "an image file"
        raise DataError(f"{missing}: expected {kind}, and there is none")


def is_pruned(folder: Path) -> bool:
    """Return whether a path is the folder of a run or of a model."""
    return folder.is_dir() and any((folder / name).is_file() for name in (MANIFEST, f"model/{MANIFEST}", "status.json"))


def require_model_folder(folder: Path) -> None:
    """Raise a `ModelError` unless a folder is a model folder; names the one inside it that may be meant."""
    if not (folder / MANIFEST).is_file():
        inside = folder / "model"
        meant = f"; did you mean {inside}?" if (inside / MANIFEST).is_file() else ""
        raise ModelError(f"{folder}: expected a recipe (.yaml) or a model folder, which holds a {MANIFEST}{meant}")


def require_run(folder: Path) -> None:
    """Raise a `ResumeError` unless a folder is that of a run."""
    if not (folder / "status.json").is_file():
        raise ResumeError(f"{folder}: expected the folder of a run, with a status.json, or 'auto'; found none")
