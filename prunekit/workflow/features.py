"""Feature maps of models as pictures in a folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from prunekit.capturing import Layers
from prunekit.visualize import GridSettings, LayerFeatures, View, draw, feature_maps, write_png
from prunekit.workflow.sides import Sides

INPUT = "input.png"


@dataclass(frozen=True)
class FeatureSettings:
    """Which feature maps are drawn, and how.

    Attributes:
        layers: see `prunekit.capture`; None: the children of the model.
        view: None: as each output fits.
        grid: how pictures look.
    """

    layers: Layers | None = None
    view: View | None = None
    grid: GridSettings = field(default_factory=GridSettings)


def write_features(
    sides: Sides, image: tuple[Tensor, str], folder: Path, settings: FeatureSettings = FeatureSettings()
) -> dict[str, Any]:
    """Draws what layers make of an image, each in a PNG file.

    Args:
        sides: the models.
        image: an input (1, C, H, W) and what it is of; see `Sides.input`.
        folder: made where it is not there.

    Returns:
        `model`, `image`, `models` (their names), `input` (the file of the image), and `layers`: `path`, `call`, `view`,
        `what`, `channels`, `kept` (None where nobody knows), `note` and `picture` of each.

    Raises:
        UsageError: a glob matches nothing, or an output cannot be shown; nothing was written.
    """
    values, name = image
    found = feature_maps(sides.models, values, settings.layers, kept=sides.kept, view=settings.view)
    rows = []
    for features in found:
        file = f"{features.path}{f'.{features.call}' if features.call else ''}.png"
        write_png(folder / file, draw(features, settings.grid, name))
        rows.append(_row(features, file))
    write_png(folder / INPUT, sides.preprocessing.shown(values[0]))
    return {"model": sides.name, "image": name, "models": list(sides.models), "input": INPUT, "layers": rows}


def _row(features: LayerFeatures, file: str) -> dict[str, Any]:
    return {
        "path": features.path,
        "call": features.call,
        "view": features.view,
        "what": features.what,
        "channels": features.channels,
        "kept": None if features.kept is None else int(features.kept.sum()),
        "note": features.note,
        "picture": file,
    }
