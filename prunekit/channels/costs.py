"""What an operator costs, and a tensor takes up, by the labels that it depends on."""

from __future__ import annotations

from dataclasses import dataclass

from prunekit.channels.labels import Labels


@dataclass(frozen=True, eq=False)
class MacTerm:
    """Multiply-accumulates of one operator for one sample: `constant` times the kept labels of every factor."""

    module: str
    operator: str
    constant: float
    factors: tuple[Labels, ...]


@dataclass(frozen=True)
class Stored:
    """How a model's file holds a tensor: bytes of one element, and whether it is a parameter or a buffer."""

    element_bytes: int
    parameter: bool
