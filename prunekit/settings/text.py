"""A job's settings as the text of a recipe."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from prunekit.errors import UsageError
from prunekit.settings.job import JobSettings


def dump(job: JobSettings) -> str:
    """Returns a job as a recipe, every default written out; `prunekit.recipe.load` of this text gives an equal job.

    Raises:
        UsageError: a setting holds what YAML has no form for; names it.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = io.StringIO()
    values = asdict(job)
    values["prune"]["budget"] |= values["prune"]["budget"].pop("others")  # all budgets stand beside each other
    yaml.dump(plain(values, ""), stream)
    return stream.getvalue()


def plain(value: Any, path: str) -> Any:
    """A value as YAML has it: no tuples, paths, or numbers of NumPy's that only look like Python's."""
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{path}.{key}".strip(".")) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item, f"{path}.{index}") for index, item in enumerate(value)]
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
