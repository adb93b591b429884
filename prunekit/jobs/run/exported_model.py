"""Exported files among the models that commands work on: what is known of them, and what needs the model itself."""

from __future__ import annotations

from typing import Any

from prunekit.backends.files.exported_model import ExportedModel
from prunekit.errors import UsageError
from prunekit.jobs.run.model_sources import InputModel
from prunekit.measure.model_size import count_macs, count_parameters


def figures_of(target: InputModel) -> dict[str, Any]:
    """Return `params` and `macs` (one sample) of a model; of an exported file `file_bytes`, and None for these."""
    if isinstance(target.model, ExportedModel):
        return {"params": None, "macs": None, "file_bytes": target.model.file_bytes}
    return {"params": count_parameters(target.model), "macs": count_macs(target.model, target.example_inputs())}


def require_module(target: InputModel, purpose: str) -> None:
    """Raise if a model is an exported file, which has no modules that could be looked into."""
    if isinstance(target.model, ExportedModel):
        raise UsageError(
            f"{target.name}: a file of {target.model.form} has no modules to {purpose}: give the model folder that it "
            "was exported from; bench, evaluate, predict and inspect take the file"
        )
