"""Pictures and figures of what models compute: feature maps, distributions."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunekit.errors import UsageError
from prunekit.inspection.capture.layer_hooks import Layers
from prunekit.inspection.visualize.distributions import activation_distributions, rows_of, weight_distributions
from prunekit.inspection.visualize.feature_maps import feature_maps
from prunekit.inspection.visualize.filters import draw_filters, first_filters
from prunekit.inspection.visualize.image_grids import draw, write_png
from prunekit.jobs.run.job_subject import chosen_batches
from prunekit.jobs.run.model_pair import ModelPair
from prunekit.utils.context import threads
from prunekit.utils.files import write_csv

INPUT = "input.png"


def write_features(
    pair: ModelPair, image: tuple[Tensor, str], folder: Path, layers: Layers | None, most: int | None
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


HISTOGRAM_COLUMNS = ("model", "kind", "layer", "low", "high", "count")


def write_statistics(pair: ModelPair, folder: Path, device: torch.device, layers: Layers | None) -> dict[str, Any]:
    """Run models of any task on their recipe's calibration samples; write `histograms.csv`."""
    if pair.job is None:
        raise UsageError(
            f"{pair.name}: expected a run's folder or a recipe, whose calibration samples the models can be shown; "
            "a picture of weights alone: prunekit visualize filters"
        )
    job, splits = pair.job, pair.of_job()
    images = chosen_batches(job, splits.train)
    histograms: list[dict[str, Any]] = []
    with threads(job.threads):
        for name, model in pair.models.items():
            model.to(device)
            weights = weight_distributions(model)
            activations = activation_distributions(model, images, layers, device=device)
            for kind, each in (("weights", weights), ("activations", activations)):
                histograms += rows_of(each, model=name, kind=kind)
            model.cpu()
    write_csv(folder / "histograms.csv", histograms, HISTOGRAM_COLUMNS)
    return {
        "model": pair.name,
        "models": list(pair.models),
        "filters": _filters(pair, folder),
        "images": images.images,
        "samples": splits.task.samples,
    }


def _filters(pair: ModelPair, folder: Path) -> str | None:
    try:
        found = first_filters(pair.models, pair.sample_shape, kept=pair.kept)
    except UsageError:  # the model takes no images
        return None
    return write_png(folder / "filters.png", draw_filters(found, pair.name)).name
