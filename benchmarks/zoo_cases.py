"""What a zoo hands to the coverage benchmark: a model with random weights, and inputs it runs on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

OWN = "dense too"
"""How what a check says begins where the dense model fails in it, too: then it is the model's own."""


@dataclass(frozen=True)
class Case:
    """A model as users call it.

    Attributes:
        model: with random weights.
        inputs: an example of as many samples as asked for: positional arguments, or a mapping of arguments by name.
        outputs: which outputs the user reads, as `prunekit.prune` takes it; None: all of them.
        checks: by the column of the table, what users do with such a model once it is pruned. Each is given this case,
            the result of `prunekit.prune` and the example, and returns `yes` or what is wrong.
        exports: the same, of exporters that the model's package has.
    """

    model: nn.Module
    inputs: Callable[[int], tuple[Any, ...] | dict[str, Any]]
    outputs: Any = None
    checks: Mapping[str, Check] = field(default_factory=dict)
    exports: Mapping[str, Check] = field(default_factory=dict)

    @property
    def wanted(self) -> dict[str, Any]:
        """The argument that tells which outputs are read; none where all are."""
        return {} if self.outputs is None else {"outputs": self.outputs}


Check = Callable[[Case, Any, tuple[Any, ...]], str]


class Zoo(Protocol):
    """A module of this folder: the names of a zoo's models, and how each is built."""

    SIZE: str
    """What the sides of the inputs are where none is asked for, in words."""

    def names(self) -> list[str]:
        """Every model that the matrix has a row for."""
        ...

    def knows(self, name: str) -> bool:
        """Whether it can build a model of that name, with a row in the matrix or without."""
        ...

    def build(self, name: str, side: int | None) -> Case:
        """A model with random weights; `side` is that of its images, where it allows another than its own."""
        ...


@dataclass(frozen=True)
class Networks:
    """A zoo whose networks are of one size: by name what makes each, and its inputs."""

    known: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]]

    def names(self) -> list[str]:
        """The networks of the matrix."""
        return list(self.known)

    def knows(self, name: str) -> bool:
        """Whether it has a row in the matrix."""
        return name in self.known

    def build(self, name: str, side: int | None) -> Case:
        """A network with random weights, of the same size whatever `side` says."""
        make, inputs = self.known[name]
        return Case(make().eval(), inputs)


def images(side: int, channels: int = 3) -> Callable[[int], tuple[Any, ...]]:
    """Inputs of an image classifier."""
    return lambda batch: (torch.randn(batch, channels, side, side),)


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Takes away zeros and ones by which a wrong result could pass: statistics, affines, biases, scales, positions."""
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0, 0.5)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or not parameter.numel():
            continue
        low, high = torch.aminmax(parameter)
        if name.endswith("bias") or (low == high == 0):
            parameter.normal_(0, 0.5)
        elif low == high:
            parameter.uniform_(0.5, 1.5)
