"""Facts of the run that a model is from, for its model card: read from the files beside the model folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prunekit.errors import ArtifactError
from prunekit.reading.text_files import read_json
from prunekit.reading.yaml_files import read_yaml

RUN = "run"
"""Name of the facts of a run among those of an export."""
MODELS = ("dense", "control", "pruned", "deployed")
_COPIED = ("name", "task", "sparsity", "latency", "speedup", "shortfalls", "fine_tuned", "repair")
_MACHINE = ("python", "platform", "cpu", "torch", "torchvision", "prunekit")


def run_facts(folder: Path) -> dict[str, Any]:
    """Return what is known of the run that a model is from; nothing if there is no run.

    Returns:
        Under `run`: `figures` of each model (scores in percent with their interval, MACs, parameters, bytes), `model`,
    """
    home = next((place for place in (folder, folder.absolute().parent) if (place / "metrics.json").is_file()), None)
    if home is None:
        return {}
    metrics = read_json(home / "metrics.json")
    if not isinstance(metrics, dict) or not isinstance(metrics.get("pruned"), dict):
        raise ArtifactError(f"{home / 'metrics.json'}: expected an object with figures of the pruned model")
    figures = {
        name: {**_mapping(metrics[name]), **_mapping(_mapping(metrics.get("accuracy")).get(name))}
        for name in MODELS
        if isinstance(metrics.get(name), dict)
    }
    plan, recipe = _mapping(metrics.get("plan")), _recipe(home / "recipe.yaml")
    environment = _mapping(metrics.get("environment"))
    facts = {
        **{name: metrics[name] for name in _COPIED if metrics.get(name) is not None},
        "figures": figures,
        "model": "deployed" if folder.name == "deployed" and "deployed" in figures else "pruned",
        "budgets": _mapping(plan.get("budgets")),
        "environment": {name: environment[name] for name in _MACHINE if name in environment},
        **recipe,
    }
    return {RUN: facts}


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _recipe(path: Path) -> dict[str, Any]:
    """Return the names of the dense model and of the data in the recipe of a run, without paths of the machine."""
    if not path.is_file():
        return {}
    recipe = _mapping(read_yaml(path, "a recipe", ArtifactError))
    model, data = _mapping(recipe.get("model")), _mapping(recipe.get("data"))
    found = {}
    if model.get("name"):
        found["dense"] = {"name": _without_folders(model["name"]), "zoo": model.get("zoo")}
    if data.get("source"):
        found["data"] = {"source": data["source"], "name": _without_folders(data.get("name") or data["source"])}
    return found


def _without_folders(text: Any) -> str:
    return str(text).replace("\\", "/").rpartition("/")[2]
