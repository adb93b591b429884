"""The dense model of a model folder, for comparisons of time: structure alone, its weights are random."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from prunekit.compaction import read_manifest
from prunekit.context import seeded
from prunekit.errors import ModelError
from prunekit.models import ModelSettings, build_model, load_factory


def dense_of(folder: Path, factory: str | None = None) -> nn.Module:
    """Builds the dense model that a folder's model was pruned from.

    Args:
        folder: a model folder.
        factory: `file.py:factory`, the user's own code, where the folder cannot say how the model is built.

    Raises:
        ArtifactError: it is no model folder, or its manifest is damaged.
        ModelError: the folder does not say how, and there is no factory; or building fails.
    """
    manifest = read_manifest(folder)
    with seeded(0):
        match manifest.get("build"):
            case {"name": str(name), "zoo": "torchvision" | "cifar" | "timm" | "hf" as zoo, "arguments": dict(given)}:
                return build_model(ModelSettings(name, zoo, arguments=given), num_classes=None)
        if factory is None:
            raise ModelError(
                f"{folder}: the dense model ({manifest.get('class')}) was built by its owner's code; give that as "
                "--model file.py:factory, or another model as --dense"
            )
        return load_factory(factory)
