"""Pictures of what models compute: feature maps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from prunekit.inspection.visualize.feature_maps import feature_maps
from prunekit.inspection.visualize.image_grids import draw, write_png
from prunekit.jobs.run.model_pair import ModelPair

INPUT = "input.png"


def write_features(
    pair: ModelPair, image: tuple[Tensor, str], folder: Path, layers: Sequence[str] | None, most: int | None
) -> dict[str, Any]:
    """Draw what layers of a pair (None: its children) make of an image, a PNG file for each layer; see `draw`."""
    values, name = image
    found = feature_maps(pair.models, values, layers, kept=pair.kept)
    rows = []
    for features in found:
        file = f"{features.path}{f'.{features.call}' if features.call else ''}.png"
        write_png(folder / file, draw(features, name, most))
        facts = {name: getattr(features, name) for name in ("path", "call", "view", "what", "channels", "kept", "note")}
        kept = None if features.kept is None else int(features.kept.sum())
        rows.append({**facts, "kept": kept, "picture": file})
    write_png(folder / INPUT, pair.picture(values[0]))
    return {"model": pair.name, "image": name, "models": list(pair.models), "input": INPUT, "layers": rows}
