"""What an operator costs, by the labels that it depends on."""

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
