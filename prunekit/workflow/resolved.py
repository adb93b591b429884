"""The recipe that a run keeps of itself: with paths that hold from anywhere."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from pathlib import Path

from prunekit.models import is_weights_file
from prunekit.registry import changed, named
from prunekit.settings.job import JobSettings
from prunekit.settings.text import dump
from prunekit.user_code import held, is_reference
from prunekit.workflow.own import RECIPE_ONLY, Own


def resolved(job: JobSettings, own: Own = RECIPE_ONLY) -> JobSettings:
    """Returns a job whose paths are absolute, so that they hold from anywhere; its own model is named by its factory.

    Args:
        job: the settings; their relative paths are relative to the working directory.
        own: the user's own code, where the job's model or data is their own.
    """
    data, model = job.data, job.model
    if data.root is not None:
        data = replace(data, root=Path(data.root).absolute())
    if model.weights is not None and is_weights_file(model):
        model = replace(model, weights=str(Path(model.weights).absolute()))
    if model.zoo == "own":
        model = replace(model, name=held(own.model or model.name))
    job = replace(job, data=data, model=model, output=Path(job.output).absolute())
    for key, name, _ in named(JobSettings, job):
        job = changed(job, key, held(name)) if is_reference(name) else job
    return job


def run_recipe(job: JobSettings, own: Own) -> str:
    """Returns the recipe that a run keeps in its folder: the resolved job, and above it what it needs besides.

    Models, data and optimizers of one's own are no settings, so they are named in a comment, as the options that
    commands take.

    Raises:
        UsageError: as for `dump`.
    """
    named = {each.name: getattr(own, each.name) for each in fields(own)}
    options = [f"#   --{name} {shlex.quote(held(reference))}" for name, reference in named.items() if reference]
    said = "# Partly your own code, which no recipe runs: commands that take this recipe need these options too."
    return "\n".join([*([said, *options] if options else []), dump(resolved(job, own))])
