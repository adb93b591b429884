"""The interface of a model, of a model folder or of an exported file."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from prunekit.compaction.model_folder import folder_interface
from prunekit.errors import UsageError
from prunekit.formats.exported_model import ExportedModel, is_exported, open_exported
from prunekit.hooks.wrappers import unwrapped
from prunekit.models.interface import ModelInterface, attached, interface_of
from prunekit.modes.public_call import public_call
from prunekit.utils.files import StrPath
from prunekit.utils.inputs import as_example, running


@public_call
def interface(model: nn.Module | StrPath, example: Any = None, *, allow_code: bool = False) -> ModelInterface:
    """Return how a model is fed: inputs and outputs by name, task, classes, and the preprocessing of images.

    Args:
        model: that `prunekit.load` returned, or any with an example; or the path of a model folder or an exported file.
        example: of its inputs: a tensor, a tuple of positional arguments, or a mapping by name; the model is run once.
        allow_code: whether an exported file may be loaded though it could run code, as a program of ExecuTorch is to
            read its interface.

    Raises:
        ArtifactError: there is no such folder or file, or its interface is damaged.
        UsageError: it is none of these, or an example is needed.
        ModelError: the model does not run on the example.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 2))
        >>> small = pk.prune(model, torch.randn(1, 3, 8, 8), macs=0.5)
        >>> folder = pk.save(small, "small", preprocessing=pk.Preprocessing(8, 8), classes=["cat", "dog"])
        >>> found = pk.interface(folder)
        >>> print(found.inputs[0], "->", found.outputs[0])
        input: float32 (batch, 3, 8, 8) -> output: float32 (batch, 2)
        >>> found.classes
        ('cat', 'dog')
        >>> pk.interface(pk.load(folder, model=model)) == found
        True
    """
    if not isinstance(model, nn.Module):
        if not isinstance(model, (str, PathLike)):
            raise UsageError(f"expected a model, or the path of a folder or a file, got {type(model).__name__}")
        path = Path(model)
        return open_exported(path, allow_code=allow_code).interface if is_exported(path) else folder_interface(path)
    own = unwrapped(model)
    known = own.interface if isinstance(own, ExportedModel) else attached(own)
    if example is None and known is not None:
        return known
    if example is None:
        raise UsageError(
            f"{type(own).__name__}: expected an example of its inputs too, or a model that prunekit.load returned"
        )
    given = as_example(own, example)
    with running(own, given):
        found = interface_of(own, given)
    if known is None:
        return found
    return ModelInterface(found.inputs, found.outputs, known.task, known.classes, known.preprocessing)
