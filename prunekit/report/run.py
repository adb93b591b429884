"""What a run folder holds, as far as the run came."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from prunekit.artifacts import read_json
from prunekit.errors import ArtifactError

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
    "gradients": ("run", "step", "epoch", "layer", "p10", "median", "p90", "zeros"),
    "networks": ("predicted_ms", "measured_ms", "macs_left", "held_out", "error"),
    "latency_samples": ("model", "device", "runtime", "batch", "threads", "dtype", "ms"),
}
TEXT_COLUMNS = (
    "module",
    "kind",
    "run",
    "group",
    "operator",
    "reason",
    "model",
    "device",
    "runtime",
    "dtype",
    "memory_format",
    "clamp",
    "by",
    "weight",
    "applied",
    "note",
    "resource",
    "layer",
)


@dataclass(frozen=True)
class Run:
    """The files of a run folder; {} or None stands for a file that the run did not write."""

    folder: Path
    status: dict[str, Any]
    metrics: dict[str, Any]
    environment: dict[str, Any]
    recipe: str | None
    layers: pd.DataFrame | None
    history: pd.DataFrame | None
    scores: pd.DataFrame | None
    coupling: pd.DataFrame | None
    locks: pd.DataFrame | None
    latency_samples: pd.DataFrame | None
    clamps: pd.DataFrame | None
    repair: pd.DataFrame | None
    sensitivity: pd.DataFrame | None
    schedule: pd.DataFrame | None
    gradients: pd.DataFrame | None
    networks: pd.DataFrame | None
    analysis: dict[str, Any]
    profile: dict[str, Any]
    fits: dict[str, Any]


def read_run(folder: Path) -> Run:
    """Reads a run folder.

    Raises:
        ArtifactError: the folder is not there, or a file in it is damaged.
    """
    if not folder.is_dir():
        raise ArtifactError(f"{folder}: expected the folder of a run, and there is none")
    recipe = folder / "recipe.yaml"
    tables = {name: _table(folder / f"{name}.csv", columns) for name, columns in COLUMNS.items()}
    return Run(
        folder,
        status=_object(folder / "status.json"),
        metrics=_object(folder / "metrics.json"),
        environment=_object(folder / "environment.json"),
        recipe=recipe.read_text(encoding="utf-8") if recipe.exists() else None,
        layers=tables["layers"],
        history=tables["history"],
        scores=tables["scores"],
        coupling=tables["coupling"],
        locks=tables["locks"],
        latency_samples=tables["latency_samples"],
        clamps=tables["clamps"],
        repair=tables["repair"],
        sensitivity=tables["sensitivity"],
        schedule=tables["schedule"],
        gradients=tables["gradients"],
        networks=tables["networks"],
        analysis=_object(folder / "sensitivity.json"),
        profile=_object(folder / "profile.json"),
        fits=_object(folder / "fits.json"),
    )


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
    return frame
