"""Feature maps of models as pictures in a folder.

Where a dense model and what pruning left of it see a class in one image, and how much that differs.

How gradients flow through a job's dense model while it trains.

How weights and activations of models are distributed, and which of their channels are dead or redundant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.channels.cut.model_copy import copied
from prunekit.data.loader import Batches
from prunekit.data.sources import Splits
from prunekit.errors import UsageError
from prunekit.inspection.capture.layer_selection import Layers, channels_of, choose
from prunekit.inspection.capture.redundancy import CorrelationCollector, redundant
from prunekit.inspection.visualize.class_maps import ClassMap, correlation
from prunekit.inspection.visualize.distributions import activation_distributions, rows_of, weight_distributions
from prunekit.inspection.visualize.feature_maps import LayerFeatures, View, feature_maps
from prunekit.inspection.visualize.filters import draw_filters, first_filters
from prunekit.inspection.visualize.image_files import write_png
from prunekit.inspection.visualize.image_grids import GridSettings, draw
from prunekit.jobs.run.dense_model import prepare
from prunekit.jobs.run.job_inputs import RECIPE_ONLY, Own, chosen_batches, job_splits, require_optimizer
from prunekit.jobs.run.model_pair import ModelPair
from prunekit.jobs.run.run_folder import Log
from prunekit.settings.job import JobSettings
from prunekit.statistics.calibration import StatsCollector
from prunekit.statistics.forward_passes import run_passes
from prunekit.training.callbacks.gradient_flow import FlowRow, GradientFlow
from prunekit.training.loop import fit
from prunekit.utils.context import threads
from prunekit.utils.files import write_csv

INPUT = "input.png"


@dataclass(frozen=True)
class FeatureMapSettings:
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
    sides: ModelPair, image: tuple[Tensor, str], folder: Path, settings: FeatureMapSettings = FeatureMapSettings()
) -> dict[str, Any]:
    """Draw what layers make of an image, each in a PNG file.

    Args:
        sides: the models.
        image: an input (1, C, H, W) and what it is of; see `ModelPair.input`.
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


FindClassMap = Callable[[nn.Module, Tensor, str | None, int | None], ClassMap]
"""From a model, an image (1, C, H, W), a layer and a class, where they are known, to the map."""


@dataclass(frozen=True, eq=False)
class ClassMaps:
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


def class_maps(
    sides: ModelPair, image: Tensor, find: FindClassMap, *, layer: str | None, target: int | None, device: torch.device
) -> ClassMaps:
    """Look at an image with every model, for the same class at the same layer.

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
    return ClassMaps(maps, correlation(*values)[0] if len(values) == 2 else None)


def gradient_flow(
    job: JobSettings,
    *,
    epochs: int | None = None,
    records: int = 100,
    log: Log,
    progress: bool = False,
    own: Own = RECIPE_ONLY,
) -> tuple[FlowRow, ...]:
    """Train a job's dense model as the job does, by the plain loss, and record its gradients; the result is dropped.

    From its first weights as `baseline` says, or where the job gives weights, from those as `finetune` says.

    Args:
        job: the settings.
        epochs: how long; the learning-rate schedule is fitted to it. None: as the job says.
        records: see `GradientFlow`.
        log: gets a line at the start.
        progress: shows a bar on stderr.
        own: the user's own code, where the job's model, data or optimizer is their own.

    Raises:
        UsageError: data, model or settings do not fit, or there is no epoch to train.
        RunError: the training failed.
    """
    require_optimizer(job, own)
    prepared = prepare(job, own)
    section, given = "finetune", job.finetune
    if job.model.weights is None and job.baseline is not None:
        section, given = "baseline", job.baseline
    settings = replace(given, epochs=epochs or given.epochs, distill=None, regularize=None, average=None)
    if not settings.epochs:
        raise UsageError(f"{section}.epochs: expected at least one to record gradients in, got 0; give --epochs")
    log(f"gradients: training {job.model.name} as `{section}` says, epochs: {settings.epochs}")
    flow = GradientFlow(records)
    with threads(job.threads):
        fit(
            copied(prepared.model),
            prepared.splits,
            settings,
            device=prepared.device,
            seed=job.seed,
            batch=job.data.batch,
            workers=job.data.reading,
            callbacks=[flow],
            own_optimizer=prepared.optimizer_for(settings),
            progress=progress,
            label="gradients",
        )
    return flow.records()


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
    sides: ModelPair, folder: Path, device: torch.device, settings: StatisticsSettings = StatisticsSettings()
) -> dict[str, Any]:
    """Run models on the calibration images of their recipe and write `histograms.csv` and `channels.csv`.

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


def _splits(sides: ModelPair, job: JobSettings) -> Splits:
    if (job.data.source == "own") != (sides.own_data is not None):
        raise UsageError(
            f"{sides.name}: its samples are the user's own; expected --data file.py:factory with data.source 'own' "
            "alone, and a task by name"
        )
    return job_splits(job.data, Own(data=sides.own_data), job.task)


def _filters(sides: ModelPair, folder: Path) -> str | None:
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
