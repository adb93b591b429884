"""Resuming of runs: the recipe and identity in a run's folder, and the search for the run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from prunekit.distributed.process_group import size
from prunekit.errors import ArtifactError, ResumeError
from prunekit.jobs.run.job_inputs import RECIPE_ONLY, Own, Prepared, code_of_job, own_source
from prunekit.jobs.run.run_folder import RESUME, RunFolder, alive, digest, weights_digest
from prunekit.models.zoo import is_weights_file
from prunekit.reading.text_files import read_json
from prunekit.settings.job import WITHOUT_EFFECT, JobSettings, dump
from prunekit.training.checkpoints import require_same
from prunekit.utils.files import StrPath, write_json
from prunekit.utils.progress import Log
from prunekit.utils.registry import registered_names, replaced_at
from prunekit.utils.state_folders import differences
from prunekit.utils.user_code import absolute_reference, is_reference

AUTO = "auto"


def find_run(asked: StrPath, runs: Path, identity: Mapping[str, Any], log: Log) -> Path | None:
    """Return the folder of the run to resume; None if there is none, which is logged.

    Args:
        asked: its folder, or `auto` for the newest unfinished run of the same recipe.
        runs: folder of all runs of this name.
        identity: of the job.
        log: gets a line on what was found.

    Raises:
        ResumeError: the run is of another recipe, model, version or data (names what differs), still runs, or has
            finished.
    """
    if asked != AUTO:
        return _named(Path(asked), identity)
    for folder, there in _unfinished(runs):
        if list(differences(there.get("recipe"), identity["recipe"])) or there.get("command") != identity["command"]:
            continue
        if alive(_status(folder)):
            log(f"resume: {folder} is of this recipe, and still runs")
            continue
        require_same(folder, there, identity)
        return folder
    log(f"resume: no run of this recipe in {runs} is left unfinished; starting a new one")
    return None


def _named(folder: Path, identity: Mapping[str, Any]) -> Path:
    status = _status(folder)
    if not status:
        raise ResumeError(f"{folder}: expected the folder of a run, with a status.json, or 'auto'; found none")
    if status.get("state") == "finished":
        raise ResumeError(f"{folder}: the run has finished; there is nothing to resume")
    if alive(status):
        raise ResumeError(f"{folder}: the run is still running, as process {status['pid']}; end that first")
    there = _identity(folder)
    if there is None:
        raise ResumeError(f"{folder}: the run ended before it had anything to resume; start a new one")
    require_same(folder, there, identity)
    return folder


def _unfinished(runs: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the folders of unfinished runs with their identities, the newest first."""
    found = [folder.parent for folder in runs.glob(f"*/{RESUME}") if _status(folder.parent).get("state") != "finished"]
    for folder in sorted(found, key=lambda folder: (str(_status(folder).get("started")), folder.name), reverse=True):
        if (there := _identity(folder)) is not None:
            yield folder, there


def _status(folder: Path) -> dict[str, Any]:
    return _object(folder / "status.json") or {}


def _identity(folder: Path) -> dict[str, Any] | None:
    return _object(folder / RESUME / "run.json")


def _object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if it is missing or unreadable."""
    try:
        found = read_json(path)
    except ArtifactError:
        return None
    return found if isinstance(found, dict) else None


def identity_of(prepared: Prepared, *, training: bool) -> dict[str, Any]:
    """Return the identity of a run as plain data: only a job with the same one can resume it."""
    job = resolved(prepared.job)
    recipe = {key: value for key, value in asdict(job).items() if key not in WITHOUT_EFFECT}
    facts = {
        "command": "finetune" if training else "prune",
        "recipe": recipe,
        "code": {name: own_source(name) for name, _ in code_of_job(job)},
        "data": prepared.splits.fingerprint,
        "model": {"structure": digest(prepared.structure), "weights": weights_digest(prepared.model)},
        "device": prepared.device.type,
        "processes": size(),
        "versions": {"prunekit": version("prunekit"), "torch": str(torch.__version__)},
    }
    plain: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return plain


def note(run: RunFolder, identity: Mapping[str, Any]) -> None:
    """Write the identity of a run into its folder."""
    write_json(run.resume / "run.json", identity)


def run_recipe(job: JobSettings, own: Own) -> str:
    """Return the text of the recipe in a run's folder: the resolved job, below a comment with the options it needs.

    These name the user's own model, data and optimizer, which are not settings.
    """
    named = {each.name: getattr(own, each.name) for each in fields(own)}
    options = [
        f"#   --{name} {shlex.quote(absolute_reference(reference))}" for name, reference in named.items() if reference
    ]
    said = "# Partly your own code, which no recipe runs: commands that take this recipe need these options too."
    return "\n".join([*([said, *options] if options else []), dump(resolved(job, own))])


def resolved(job: JobSettings, own: Own = RECIPE_ONLY) -> JobSettings:
    """Return a job whose paths are absolute, and whose own model is named by its factory.

    Args:
        job: the settings; their relative paths are relative to the working directory.
        own: the user's own code.
    """
    data, model = job.data, job.model
    if data.root is not None:
        data = replace(data, root=Path(data.root).absolute())
    if model.weights is not None and is_weights_file(model):
        model = replace(model, weights=str(Path(model.weights).absolute()))
    if data.tokenizer is not None:
        data = replace(data, tokenizer=Path(data.tokenizer).absolute())
    if model.folder is not None:
        model = replace(model, name=str(model.folder.absolute()))
    if model.zoo == "own":
        model = replace(model, name=absolute_reference(own.model or model.name))
    job = replace(job, data=data, model=model, output=Path(job.output).absolute())
    for key, name, _ in registered_names(JobSettings, job):
        job = replaced_at(job, key, absolute_reference(name)) if is_reference(name) else job
    return job
