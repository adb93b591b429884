"""The files of a run folder, as far as the run wrote them."""

import re
import shlex
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from prunekit.errors import ArtifactError, DataError
from prunekit.reading.text_files import read_json, read_text
from prunekit.reading.yaml_files import parse_yaml
from prunekit.settings.job import JobSettings
from prunekit.utils.display import training_name
from prunekit.utils.registry import registered_names
from prunekit.utils.user_code import is_reference

LAYER_COLUMNS = ("in", "out", "macs", "params")
COLUMNS = {
    "layers": ("module", "kind", *(f"{name}_{when}" for name in LAYER_COLUMNS for when in ("before", "after"))),
    "history": ("run", "epoch", "train_loss", "validation_loss"),
    "scores": ("group", "score", "kept"),
    "coupling": ("group", "channels", "kept", "module", "axis", "position"),
    "sensitivity": ("group", "kept", "channels", "error_fast", "error_total", "error_measured"),
    "locks": ("module", "operator", "channels", "reason"),
    "clamps": ("run", "clamp", "module", "by", "limit", "share"),
    "repair": ("weight", "applied", "before", "after", "columns", "rank", "ridge", "note"),
    "schedule": ("step", "epoch", "resource", "planned", "actual", "pruned", "regrown"),
    "networks": ("predicted_ms", "measured_ms", "macs_left", "held_out", "error"),
    "latency_samples": ("model", "device", "runtime", "batch", "threads", "dtype", "ms"),
}
TEXT_COLUMNS = (
    "module", "kind", "run", "group", "operator", "reason", "model", "device", "runtime", "dtype", "memory_format",
    "clamp", "by", "weight", "applied", "note", "resource", "layer",
)  # fmt: skip
OBJECTS = {
    "status": "status.json",
    "metrics": "metrics.json",
    "environment": "environment.json",
    "analysis": "sensitivity.json",
    "profile": "profile.json",
    "fits": "fits.json",
    "frontier": "frontier.json",
}
Found = TypeVar("Found")


@dataclass(frozen=True)
class Run:
    """The files of a run folder; {} or None stands for a file that the run did not write."""

    folder: Path
    status: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    layers: pd.DataFrame | None = None
    history: pd.DataFrame | None = None
    scores: pd.DataFrame | None = None
    coupling: pd.DataFrame | None = None
    locks: pd.DataFrame | None = None
    latency_samples: pd.DataFrame | None = None
    clamps: pd.DataFrame | None = None
    repair: pd.DataFrame | None = None
    sensitivity: pd.DataFrame | None = None
    schedule: pd.DataFrame | None = None
    networks: pd.DataFrame | None = None
    analysis: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)
    fits: dict[str, Any] = field(default_factory=dict)
    frontier: dict[str, Any] = field(default_factory=dict)
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Names of files that cannot be read and are left out, with the reason."""


def read_run(folder: Path, *, whole: bool = True) -> Run:
    """Read the files of a run."""
    damaged: dict[str, str] = {}

    def found(name: str, read: Callable[[Path], Found], instead: Found) -> Found:
        try:
            return read(folder / name)
        except ArtifactError as error:
            if whole:
                raise
            damaged[name] = str(error)
            return instead

    if not folder.is_dir():
        raise ArtifactError(f"{folder}: expected the folder of a run, and there is none")
    read: dict[str, Any] = {
        name: found(f"{name}.csv", partial(_table, columns=columns), None) for name, columns in COLUMNS.items()
    }
    read |= {name: found(file, _object, dict[str, Any]()) for name, file in OBJECTS.items()}
    recipe = found("recipe.yaml", lambda path: read_text(path) if path.exists() else None, None)
    return Run(folder, recipe=recipe, damaged=damaged, **read)


def _object(path: Path) -> dict[str, Any]:
    value = read_json(path) if path.exists() else {}
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: expected a JSON object, got {type(value).__name__}; the file is damaged")
    return value


def _table(path: Path, columns: tuple[str, ...]) -> pd.DataFrame | None:
    if not path.exists():
        return None
    try:
        # A module may be called "NA": only an empty field means that there is no value.
        text = dict.fromkeys(TEXT_COLUMNS, str)
        frame = pd.read_csv(path, dtype=text, keep_default_na=False, na_values=[""])
    except (ValueError, OSError) as error:
        raise ArtifactError(f"{path}: expected a CSV table, but {error}; the file is damaged") from error
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise ArtifactError(f"{path}: expected the columns {', '.join(columns)}; {', '.join(missing)} not found")
    if "run" in frame.columns:
        frame["run"] = frame["run"].map(training_name, na_action="ignore")
    return frame


def records(frame: Any) -> list[dict[str, Any]] | None:
    """Return the rows of a table, with None for empty fields; None if there is no table."""
    if frame is None:
        return None
    return [dict(record) for record in frame.astype(object).where(frame.notna(), None).to_dict("records")]


def recipe_of(run: Run) -> dict[str, Any]:
    """Return the recipe of a run as nested dicts; {} if there is none, or none that can be read."""
    return deepcopy(_parsed(run.recipe or ""))


OPTION = re.compile(r"#   --(model|data|optimizer) (.+)")


def own_code(run: Run) -> dict[str, str]:
    """Return the user's own code of a run, `file.py:factory` by option, as the head of its recipe names it."""
    head = (OPTION.fullmatch(line) for line in (run.recipe or "").splitlines())
    return {line[1]: shlex.split(line[2])[0] for line in head if line}


def options_of(run: Run, *names: str) -> list[str]:
    """Return the words that a command on a run's recipe needs: those of the options for own code, --allow-code."""
    own = own_code(run)
    code = any(is_reference(name) for _, name, _ in registered_names(JobSettings, recipe_of(run)))
    return [*(word for name in names if name in own for word in (f"--{name}", own[name])), *["--allow-code"] * code]


@lru_cache(maxsize=8)
def _parsed(recipe: str) -> dict[str, Any]:
    """Return the values of a recipe; a page asks several times, and parsing takes a quarter of a second."""
    try:
        found = parse_yaml(recipe, "recipe.yaml")
    except DataError:
        return {}
    return found if isinstance(found, dict) else {}
