"""A job's settings as the text of a recipe, and the recipe that a run keeps of itself."""

from __future__ import annotations

import io
import shlex
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from prunekit.errors import UsageError
from prunekit.models import is_weights_file
from prunekit.user_code import held
from prunekit.workflow.own import RECIPE_ONLY, Own
from prunekit.workflow.settings import JobSettings


def dump(job: JobSettings) -> str:
    """Returns a job as a recipe, every default written out; `prunekit.recipe.load` of this text gives an equal job.

    Raises:
        UsageError: a setting holds what YAML has no form for; names it.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = io.StringIO()
    yaml.dump(_plain(asdict(job), ""), stream)
    return stream.getvalue()


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
    return replace(job, data=data, model=model, output=Path(job.output).absolute())


def run_recipe(job: JobSettings, own: Own) -> str:
    """Returns the recipe that a run keeps in its folder: the resolved job, and above it what it needs besides.

    A recipe never runs code, so the user's own is named in a comment, as the options that commands take.

    Raises:
        UsageError: as for `dump`.
    """
    named = {each.name: getattr(own, each.name) for each in fields(own)}
    options = [f"#   --{name} {shlex.quote(held(reference))}" for name, reference in named.items() if reference]
    said = "# Partly your own code, which no recipe runs: commands that take this recipe need these options too."
    return "\n".join([*([said, *options] if options else []), dump(resolved(job, own))])


def _plain(value: Any, path: str) -> Any:
    """A value as YAML has it: no tuples, paths, or numbers of NumPy's that only look like Python's."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{path}.{key}".strip(".")) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item, f"{path}.{index}") for index, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    text = "expected a number, text, true, false, null, or a list or mapping of them, as a recipe holds it"
    hint = "; a model that needs more is built by a factory of your own" if path.startswith("model.") else ""
    raise UsageError(f"{path}: {text}, got {type(value).__name__}{hint}")
