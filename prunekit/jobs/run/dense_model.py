"""Dense models that pruned ones were made from: built anew, or with the weights that a run has kept."""

from pathlib import Path

from torch import nn

from prunekit.compaction.model_folder import read_manifest
from prunekit.errors import ArtifactError, ModelError
from prunekit.hooks.model_copy import named_tensors, with_tensors
from prunekit.jobs.run.early_checks import MANIFEST
from prunekit.models.zoo import build_model, from_build, load_factory
from prunekit.reading.array_files import read_tensors
from prunekit.utils.context import seeded, set_mode


def model_folder(folder: Path) -> Path:
    """Return the model folder of a path: the path itself, or the folder `model` of a run."""
    if (folder / MANIFEST).is_file():
        return folder
    if not (folder / "model" / MANIFEST).is_file():
        raise ModelError(f"{folder}: expected the folder of a model, or of a run that has one, and found no {MANIFEST}")
    return folder / "model"


def build_dense(folder: Path, factory: str | None = None) -> nn.Module:
    """Build the dense model that a folder's model was pruned from, with random weights."""
    manifest = read_manifest(folder)
    with seeded(0):
        if (known := from_build(manifest.get("build"))) is not None:
            return build_model(known, num_classes=None)
        if factory is None:
            raise ModelError(
                f"{folder}: the dense model ({manifest.get('class')}) was built by its owner's code; give that as "
                "--model file.py:factory, or another model as --dense"
            )
        return load_factory(factory)


def load_dense(folder: Path, factory: str | None = None) -> nn.Module | None:
    """Load the dense model of a run, or of its model folder, in eval mode; None if no run has kept its weights."""
    folder = model_folder(folder)
    path = folder.resolve().parent / "checkpoints" / "dense.safetensors"
    if not path.is_file():
        return None
    dense = load_factory(factory) if factory is not None else build_dense(folder)
    tensors, _ = read_tensors(path, "the dense weights of the run (.safetensors)")
    shapes = {name: tensor.shape for name, tensor in named_tensors(dense)}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    wrong = sorted(name for name in shapes.keys() | found.keys() if found.get(name) != shapes.get(name))
    if wrong:
        raise ArtifactError(f"{path}: does not belong to this dense model: {', '.join(wrong[:3])} differ")
    return set_mode(with_tensors(dense, tensors), False)
