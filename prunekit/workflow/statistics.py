"""How weights and activations of models are distributed, and which of their channels are dead or redundant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prunekit.artifacts import write_csv
from prunekit.calibration import StatsCollector
from prunekit.calibration.passes import run_passes
from prunekit.capturing import CorrelationCollector, Layers, choose, redundant
from prunekit.capturing.layers import channels_of
from prunekit.context import threads
from prunekit.data import Batches, Splits
from prunekit.errors import UsageError
from prunekit.settings.job import JobSettings
from prunekit.visualize import draw_filters, first_filters, write_png
from prunekit.visualize.distributions import activation_distributions, rows_of, weight_distributions
from prunekit.workflow.own import Own, job_splits
from prunekit.workflow.prepared import chosen_batches
from prunekit.workflow.sides import Sides

Row = dict[str, Any]
HISTOGRAM_COLUMNS = ("model", "kind", "layer", "low", "high", "count")
CHANNEL_COLUMNS = ("model", "layer", "channel", "finding", "like", "correlation", "cosine")


@dataclass(frozen=True)
class StatisticsSettings:
    """What is looked at.

    Attributes:
        layers: whose activations and correlations, see `prunekit.capture`; None: convolutions, linear layers,
            projections of attention.
        threshold: see `redundant`.
    """

    layers: Layers | None = None
    threshold: float = 0.99


def write_statistics(
    sides: Sides, folder: Path, device: torch.device, settings: StatisticsSettings = StatisticsSettings()
) -> dict[str, Any]:
    """Runs models on the calibration images of their recipe and writes `histograms.csv` and `channels.csv`.

    Args:
        sides: the models, with their recipe.
        folder: made where it is not there.
        device: where to run; the models are afterwards on the CPU.

    Returns:
        `model`, `models` (their names), `filters` (file of a picture of the first layer's, None without), `images`,
        `threshold`, `channels` (of each model, those of layers that were looked at) and `findings`: the rows of
        `channels.csv`.

    Raises:
        UsageError: there is no recipe, a glob matches nothing, or the threshold is none.
    """
    if sides.job is None:
        raise UsageError(
            f"{sides.name}: expected a run's folder or a recipe, whose calibration images the models can be shown; "
            "a picture of weights alone: prunekit visualize filters"
        )
    images = chosen_batches(sides.job, sides.splits or _splits(sides, sides.job))
    histograms: list[Row] = []
    findings: list[Row] = []
    channels = {}
    with threads(sides.job.threads):
        for name, model in sides.models.items():
            model.to(device)
            histograms += _histograms(name, model, images, device, settings.layers)
            found, channels[name] = channel_findings(model, images, device, settings.threshold, settings.layers)
            findings += [{"model": name, **row} for row in found]
            model.cpu()
    write_csv(folder / "histograms.csv", histograms, HISTOGRAM_COLUMNS)
    # As text: next to empty fields, whole numbers would be written with a decimal point.
    likes = [{**row, "like": None if row["like"] is None else str(row["like"])} for row in findings]
    write_csv(folder / "channels.csv", likes, CHANNEL_COLUMNS)
    return {
        "model": sides.name,
        "models": list(sides.models),
        "filters": _filters(sides, folder),
        "images": images.images,
        "threshold": settings.threshold,
        "channels": channels,
        "findings": findings,
    }


def _splits(sides: Sides, job: JobSettings) -> Splits:
    if (job.data.source == "own") != (sides.own_data is not None):
        raise UsageError(
            f"{sides.name}: its samples are the user's own; expected --data file.py:factory with data.source 'own' "
            "alone, and a task by name"
        )
    return job_splits(job.data, Own(data=sides.own_data), job.task)


def _filters(sides: Sides, folder: Path) -> str | None:
    try:
        found = first_filters(sides.models, sides.sample_shape, kept=sides.kept)
    except UsageError:  # a model that reads no images
        return None
    return write_png(folder / "filters.png", draw_filters(found, sides.name)).name


def _histograms(
    name: str, model: nn.Module, images: Batches, device: torch.device, layers: Layers | None
) -> Sequence[Row]:
    weights = weight_distributions(model)
    activations = activation_distributions(model, images, layers, device=device)
    return [
        *rows_of(weights, model=name, kind="weights"),
        *rows_of(activations, model=name, kind="activations"),
    ]


def channel_findings(
    model: nn.Module, batches: Any, device: torch.device, threshold: float = 0.99, layers: Layers | None = None
) -> tuple[list[Row], int]:
    """Dead channels, which never change on the data, of every module's output, and redundant ones, see `redundant`.

    Args:
        model: already on `device`; in eval mode while it runs.
        batches: see `run_passes`.
        threshold: see `redundant`.
        layers: whose correlations are looked at; None: of all convolutions, linear layers and projections.

    Returns:
        Rows: layer, channel, finding (`dead` or `redundant`), and of redundant ones like, correlation and cosine; and
        of how many channels the correlations were looked at.

    Raises:
        UsageError: a glob matches nothing, or correlations take more memory than there is.
    """
    widths = channels_of(model)
    chosen = (
        list(widths) if layers is None else [path for path in choose(model, layers, "layers").paths if path in widths]
    )
    stats = StatsCollector(model, inputs=False, fused=False)
    pairs = [CorrelationCollector(model, chosen)] if chosen else []
    run_passes(model, batches, device, stats, *pairs)
    found, products = stats.stats(), [product for one in pairs for product in one.products()]
    dead: list[tuple[str, Iterable[int]]] = [
        (f"{key.module}, call {key.call + 1}" if key.call else key.module, channels)
        for key, channels in found.dead().items()
    ]
    called = {key.module for key in found}
    dead += [(seen.layer, seen.constant) for seen in products if seen.layer not in called]
    empty = {"like": None, "correlation": None, "cosine": None}
    rows: list[Row] = [
        {"layer": layer, "channel": int(channel), "finding": "dead", **empty}
        for layer, channels in dead
        for channel in channels
    ]
    for pair in redundant(model, products, threshold):
        facts = asdict(pair)
        rows.append({"layer": facts.pop("layer"), "channel": facts.pop("channel"), "finding": "redundant", **facts})
    return rows, sum(len(seen.shift) for seen in products)
