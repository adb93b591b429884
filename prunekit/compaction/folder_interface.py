"""The interface in a model folder: found when a model is saved, read again to feed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from prunekit.errors import ArtifactError, UsageError
from prunekit.models.interface import BATCH, ModelInterface, TensorSpec, attached, interface_of
from prunekit.models.preprocessing import Preprocessing
from prunekit.utils.context import device_of
from prunekit.utils.inputs import InputSpec, arguments_by_name, as_example, to_device, zeros_of

ENTRY = "interface"
"""Key of the manifest."""


def saved_interface(
    model: nn.Module,
    specs: Sequence[InputSpec],
    *,
    example: Any,
    preprocessing: Preprocessing | None,
    classes: Sequence[str],
    task: str | None,
) -> ModelInterface:
    """Return the interface of a model that is saved; what is not given is as the model was loaded with.

    The model is run once; if it does not run, the interface has its inputs alone.
    """
    if not isinstance(preprocessing, Preprocessing | None):
        raise UsageError(f"preprocessing: expected a prunekit.Preprocessing, got {type(preprocessing).__name__}")
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        raise UsageError(f"classes: expected the name of each label, such as ['cat', 'dog'], got {classes!r:.60}")
    if not isinstance(task, str | None):
        raise UsageError(f"task: expected its name, such as 'image_classification', got {type(task).__name__}")
    before = attached(model)
    if before is not None:
        preprocessing, classes = preprocessing or before.preprocessing, classes or before.classes
        task = task or before.task
    names = tuple(map(str, classes))
    inputs = zeros_of(specs) if example is None else as_example(model, example)
    inputs = to_device(inputs, device_of(model))
    try:
        return interface_of(model, inputs, task=task, classes=names, preprocessing=preprocessing)
    except Exception:  # a model's own code may raise anything, of zeros above all
        named = arguments_by_name(model, inputs) if len(inputs) == len(specs) else {}
        called = [str(name) if isinstance(name, str) else f"input_{name}" for name in named]
        found = _specs_of(specs, called if len(called) == len(specs) else [])
        return ModelInterface(found, (), task, names, preprocessing)


def read_interface(manifest: Mapping[str, Any], where: str) -> ModelInterface:
    """Return the interface in a manifest; that of an older folder has its inputs, and classes if there are any."""
    if ENTRY in manifest:
        return ModelInterface.from_dict(manifest[ENTRY], f"{where}: {ENTRY}")
    example = manifest["example"]
    shapes = example.get("shapes", [])
    names, dtypes = example.get("names", [None] * len(shapes)), example.get("dtypes", ["float32"] * len(shapes))
    try:
        specs = [
            InputSpec(tuple(shape), str(dtype), name) for shape, dtype, name in zip(shapes, dtypes, names, strict=True)
        ]
        return ModelInterface(_specs_of(specs, []), (), None, tuple(map(str, manifest.get("classes") or ())))
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{where}: example: expected shapes, dtypes and names; it is damaged: {error}") from error


def _specs_of(specs: Sequence[InputSpec], names: Sequence[str]) -> tuple[TensorSpec, ...]:
    """Return specifications whose first axis is the batch."""
    several = len(specs) > 1
    called = names or [spec.name or (f"input_{index}" if several else "input") for index, spec in enumerate(specs)]
    return tuple(
        TensorSpec(name, spec.dtype, (BATCH, *spec.shape[1:]) if spec.shape else ())
        for name, spec in zip(called, specs, strict=True)
    )
