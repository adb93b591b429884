"""Where a dense model and what pruning left of it see a class in one image, and how much that differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.visualize import ClassMap, correlation
from prunekit.workflow.sides import Sides

Find = Callable[[nn.Module, Tensor, str | None, int | None], ClassMap]
"""From a model, an image (1, C, H, W), a layer and a class, where they are known, to the map."""


@dataclass(frozen=True, eq=False)
class Seen:
    """The maps of one image.

    Attributes:
        maps: `dense`, `pruned` or both, in this order; of one class and one layer.
        correlation: Pearson's, of the two maps; None where there is one alone, or one is the same everywhere.
    """

    maps: Mapping[str, ClassMap]
    correlation: float | None

    @property
    def first(self) -> ClassMap:
        """The map that says which class and layer all are of."""
        return next(iter(self.maps.values()))

    def figures(self) -> dict[str, Any]:
        """`method`, `layer`, `class`, `correlation`, and of each model `probability` and `predicted`."""
        first = self.first
        models = {
            side: {"probability": float(found.probabilities[0]), "predicted": int(found.predicted[0])}
            for side, found in self.maps.items()
        }
        named = {"method": first.method, "layer": first.layer, "class": int(first.classes[0])}
        return {**named, "models": models, "correlation": self.correlation}


def seen(
    sides: Sides, image: Tensor, find: Find, *, layer: str | None, target: int | None, device: torch.device
) -> Seen:
    """Looks at an image with every model, for the same class at the same layer.

    Args:
        image: (1, C, H, W).
        layer, target: None: what the first model, the dense one where there is one, takes.

    Raises:
        PrunekitError: as `find` raises.
    """
    maps: dict[str, ClassMap] = {}
    for side, model in sides.models.items():
        found = find(model.to(device), image.to(device), layer, target)
        maps[side], layer, target = found, found.layer, int(found.classes[0])
    values = [found.values for found in maps.values()]
    return Seen(maps, correlation(*values)[0] if len(values) == 2 else None)
