"""What a repair did, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from prunekit.repair.memory import RepairMemory


@dataclass(frozen=True)
class LayerRepair:
    """One layer: mean squared error against the dense network on held-out images, at the end of its chain.

    Attributes:
        weight: name of the parameter.
        applied: "bias", "moments", "channel" or "patch"; empty where the layer was left as it was.
        before, after: the error, as a share of the dense output's variance.
        rank: of the Gram matrix, where a fit solved for one, out of `columns`.
        ridge: that was used.
        note: why something was left out or done in another way.
    """

    weight: str
    applied: str = ""
    before: float = 0.0
    after: float = 0.0
    columns: int = 0
    rank: int = 0
    ridge: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class RepairReport:
    """A repair.

    Attributes:
        layers: in the order in which they run.
        before, after: mean squared difference of the model's output from the dense model's on held-out images, as a
            share of that one's variance.
        kept: whether the repaired weights were kept; they are not where they are no better.
        memory: what it took, as planned before it started.
    """

    layers: tuple[LayerRepair, ...]
    before: float
    after: float
    kept: bool
    memory: RepairMemory
