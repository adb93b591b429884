"""Exported models as modules: what runs a file stands where a model is expected, as in evaluation."""

from __future__ import annotations

from collections import UserDict
from typing import Any

from torch import Tensor, nn

from prunekit.formats.format import Run
from prunekit.models.interface import ModelInterface
from prunekit.utils.inputs import Keywords


class Outputs(UserDict[str, Tensor]):
    """Several tensors that an exported model returned, by name; also as attributes, as in `outputs.logits`."""

    def __getattr__(self, name: str) -> Tensor:
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


class ExportedModel(nn.Module):
    """A module that runs an exported file on the CPU; it has no parameters.

    Args:
        run: opened by an `ExportFormat`.
        interface: of the file.
    """

    def __init__(self, run: Run, interface: ModelInterface) -> None:
        super().__init__()
        self.run, self.interface = run, interface
        self.eval()

    def forward(self, *given: Any, **named: Any) -> Any:
        """Return the tensor of the output; several by their names."""
        found = self.run((*given, Keywords(named)) if named else given)
        if len(found) == 1:
            return found[0]
        names = [one.name for one in self.interface.outputs]
        if len(names) != len(found):
            names = [f"output_{index}" for index in range(len(found))]
        return Outputs(zip(names, found, strict=True))
