"""The log of a training for TensorBoard, epoch by epoch, and its scalars as a CSV table.

Scalars, sparsity and clamped gradients of every layer, and on request histograms and images.
"""

from __future__ import annotations

import csv
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prunekit.distributed.process_group import is_main, is_sharded, local_part, total
from prunekit.masks.module_values import count_zeros
from prunekit.planning.plan import Plan
from prunekit.settings.train import WatchSettings
from prunekit.training.callbacks.callback import Callback, ClampCounts, CurrentPlan, EpochRow, TrainingRun
from prunekit.utils.availability import missing_packages
from prunekit.utils.files import atomic_file

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

COLUMNS = ("epoch", "tag", "value")
BINS = 64
CHARTS = {
    "training": {
        "loss": ["Multiline", ["loss/.*"]],
        "top-1, %": ["Multiline", ["top1/.*"]],
        "learning rate": ["Multiline", ["lr"]],
    },
    "layers": {
        "sparsity": ["Multiline", ["sparsity/.*"]],
        "share clamped": ["Multiline", ["clamped/.*"]],
    },
}
"""Scalars that belong together, each group in one chart of the tab of custom scalars; tags as regular expressions."""
MOST_FILTERS = 256


class TensorBoardLogger(Callback):
    """A callback that writes what happens in each epoch, and changes nothing; the first of all callbacks.

    Scalars are everything in an `EpochRow`; under masks the share of exact zeros in every layer's weights, as they were
    trained; for every clamped layer the share that was beyond the limit in the epoch. On request: histograms of every
    parameter, of its mask and of its gradient in the epoch's first step (under its mask, before it is clamped, without
    the loss scale), the filters of the first convolution as an image, and a figure of the sparsity.

    In several processes the main one writes. A file that cannot be written ends the log, not the training. When a
    training is resumed, rows after the epoch where it continues are removed from the table, and hidden in TensorBoard
    by an event.
    """

    def __init__(
        self,
        settings: WatchSettings,
        events: Path,  # folder of TensorBoard's events
        table: Path,  # CSV table of all scalars
        plan: CurrentPlan = lambda: None,  # returns the plan that masks the model, or that made it compact
        warn: Callable[[str], None] = lambda message: None,  # called with a message if something cannot be written
    ) -> None:
        if missing_packages(["tensorboard"]):  # the table has all scalars
            settings = replace(settings, tensorboard=False)
        self._settings, self._plan, self._warn = settings, plan, warn
        self._folder, self._table = events if settings.tensorboard else None, table
        self._epoch = 0  # the last one that is written
        self._rows: list[tuple[int, str, float]] | None = None
        self._writer: SummaryWriter | None = None
        self._clamped: ClampCounts = {}
        self._gradients: dict[str, Histogram] = {}
        self._failed = not is_main()

    @contextmanager
    def active(self, run: TrainingRun) -> Iterator[None]:
        """Close the files when the run ends."""
        self._run = run
        try:
            yield
        finally:
            with self._safely():
                self.close()

    @property
    def reads_weights(self) -> bool:
        """True if weights themselves are shown, and not only figures about them."""
        return self._settings.tensorboard and (self._settings.histograms or self._settings.images)

    def before_step(self, step: int) -> None:
        """Take histograms of gradients in the first step of an epoch."""
        epoch, place = divmod(step - 1, self._run.steps)
        if not place and self._settings.histograms and self._due(epoch + 1):
            scale = self._run.scale()
            named = self._run.model.named_parameters()
            gradients = {name: parameter.grad / scale for name, parameter in named if parameter.grad is not None}
            found = {name: histogram(gradient) for name, gradient in gradients.items()}
            self._gradients = {name: shape for name, shape in found.items() if shape is not None}

    def _due(self, epoch: int) -> bool:
        return not self._failed and self._settings.tensorboard and epoch % self._settings.every == 0

    @contextmanager
    def around_validation(self) -> Iterator[None]:
        """Read the weights as they were trained: before an average replaces them, or the next plan masks them."""
        model = self._run.model
        self._sparsity = {} if self._failed and not is_sharded(model) else layer_sparsity(model, self._plan())
        due = self._due(self._epoch + 1)
        self._shapes: dict[str, Histogram] = {}
        if due and self._settings.histograms:
            gradients = {f"gradients/{name}": shape for name, shape in self._gradients.items()}
            self._shapes = _histograms(model, self._plan()) | gradients
        self._image = filters(model) if due and self._settings.images else None
        yield

    def after_epoch(self, row: EpochRow) -> None:
        """Write everything about the epoch."""
        before, self._clamped = self._clamped, self._run.clamped()
        if self._failed:
            return
        shares = {}  # of gradients that were beyond the limit in this epoch, 0..1
        for clamp, counts in self._clamped.items():
            for path, (beyond, seen) in counts.items():
                already, of = before.get(clamp, {}).get(path, (0, 0))
                if seen > of:
                    shares[f"clamped/{clamp}/{path}"] = (beyond - already) / (seen - of)
        with self._safely():
            writer = self._opened()
            if writer is not None:
                for tag, found in self._shapes.items():
                    writer.add_histogram_raw(tag, num=sum(found.bucket_counts), **asdict(found), global_step=row.epoch)
                images = self._settings.images and self._due(row.epoch)
                if images and self._image is not None:
                    writer.add_image("filters", self._image, row.epoch)
                if images and self._sparsity:
                    add_sparsity(writer, self._sparsity, row.epoch)
            self.scalars(row, self._sparsity | shares)

    def _opened(self) -> SummaryWriter | None:
        """Return TensorBoard's writer, made on first use; None without events."""
        if self._writer is None and self._folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            if self._epoch:
                # TensorBoard reads files in the order of their names, which contain the second: wait for a later one.
                names = [path.name.split(".")[3] for path in self._folder.glob("events.out.tfevents.*")]
                while any(name >= f"{int(time.time()):010d}" for name in names):
                    time.sleep(0.05)
                self._writer = SummaryWriter(str(self._folder), purge_step=self._epoch + 1)
            else:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._writer = SummaryWriter(str(self._folder))
                self._writer.add_custom_scalars(CHARTS)
        return self._writer

    def scalars(self, row: EpochRow, more: Mapping[str, float] | None = None) -> None:
        """Write the scalars of an epoch, and finish it."""
        named: dict[str, float] = {}
        for name, value in row.figures().items():
            part, _, kind = name.partition("_")
            tag = f"{kind}/{part}" if part in ("train", "validation") else name  # so that the two share a chart
            if name != "epoch" and value is not None:
                named[tag] = float(value)
        writer = self._opened()
        if self._rows is None:
            self._rows = []
            if self._epoch and self._table.exists():
                with self._table.open(encoding="utf-8", newline="") as file:
                    rows = [(int(line["epoch"]), line["tag"], float(line["value"])) for line in csv.DictReader(file)]
                self._rows = [line for line in rows if line[0] <= self._epoch]
        for tag, number in {**named, **(more or {})}.items():
            self._rows.append((row.epoch, tag, number))
            if writer is not None:
                writer.add_scalar(tag, number, row.epoch)
        self._table.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(self._table) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *self._rows])
        self._epoch = row.epoch
        if writer is not None:
            writer.flush()  # so that TensorBoard shows the epoch

    def close(self) -> None:
        """Close the file of events; another one is begun if more is written."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    @contextmanager
    def _safely(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed = True
            self._warn(f"watching: {error}; no more is written of this training, which goes on")

    def state_dict(self) -> dict[str, Any]:
        """Return the last epoch, and the counts and histograms of the epoch that has begun."""
        return {
            "events": {"epoch": self._epoch},
            "clamped": {clamp: {path: list(both) for path, both in of.items()} for clamp, of in self._clamped.items()},
            "gradients": {name: asdict(shape) for name, shape in self._gradients.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.close()
        self._epoch, self._rows = int(state["events"]["epoch"]), None
        self._clamped = {clamp: {p: (n, of) for p, (n, of) in rows.items()} for clamp, rows in state["clamped"].items()}
        self._gradients = {name: Histogram(**shape) for name, shape in state["gradients"].items()}


def layer_sparsity(model: nn.Module, plan: Plan | None) -> dict[str, float]:
    """Return `sparsity/<module path>`: the share of exact zeros in a layer's weights, 0..1, and `sparsity/all`.

    Only weights with two or more axes count, because new biases and norms are zero without being pruned. Entries that
    a compact model no longer has count as zeros. Empty without a plan. All processes of a sharded model call this.
    """
    if plan is None:
        return {}
    kept: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            path, own = name.rpartition(".")[0] or name, local_part(parameter)
            kept[path] = kept.get(path, 0) + own.numel() - int(count_zeros(own))
            sizes[path] = sizes.get(path, 0) + _dense_size(name, parameter, plan)
    if is_sharded(model):
        kept = {path: int(count) for path, count in zip(kept, total(*kept.values()), strict=True)}
    found = {f"sparsity/{path}": (sizes[path] - count) / sizes[path] for path, count in kept.items()}
    whole = sum(sizes.values())
    return found | ({"sparsity/all": (whole - sum(kept.values())) / whole} if sizes else {})


def _histograms(model: nn.Module, plan: Plan | None) -> dict[str, Histogram]:
    found: dict[str, Histogram] = {}
    for name, parameter in model.named_parameters():
        if (shape := histogram(parameter)) is not None:
            found[f"weights/{name}"] = shape
        if plan is not None and (mask := plan.mask(name)) is not None:
            size = _dense_size(name, parameter, plan)
            kept = float(int(torch.count_nonzero(mask)) * (size // mask.numel()))
            ends = float(kept == size), float(kept > 0)
            found[f"masks/{name}"] = Histogram(*ends, kept, kept, [0.5, 1.0], [size - kept, kept])  # of zeros and ones
    return found


def _dense_size(name: str, parameter: Tensor, plan: Plan | None) -> int:
    """Return how many entries a parameter has in the dense model."""
    return parameter.numel() if plan is None else math.prod(plan.channel_map.shapes.get(name, parameter.shape))


@torch.no_grad()
def filters(model: nn.Module) -> Tensor | None:
    """Return the filters of the first convolution in two dimensions, as one image (3, height, width) with values 0..1.

    All are on one scale, with zero as mid-gray, so that pruned filters are plain gray. Filters of 1 or 3 input channels
    are shown as they are, others as the mean over input channels. None if the model has no such convolution.
    """
    from torchvision.utils import make_grid

    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if first is None:
        return None
    weight = first.weight.detach()[:MOST_FILTERS].float().cpu()  # (filters, in, height, width)
    if weight.shape[1] not in (1, 3):
        weight = weight.mean(1, keepdim=True)
    scale = weight.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    image: Tensor = make_grid(0.5 + 0.5 * weight / scale, nrow=16, padding=1, pad_value=1.0)
    return image


def add_sparsity(writer: SummaryWriter, sparsity: Mapping[str, float], step: int) -> None:
    """Write a figure with a bar for each layer, in the order of the model, of what `layer_sparsity` returns.

    Without matplotlib there is none.
    """
    if missing_packages(["matplotlib"]):
        return
    from matplotlib.figure import Figure

    layers = {tag.partition("/")[2]: share for tag, share in sparsity.items() if tag != "sparsity/all"}
    figure = Figure(figsize=(8, 1 + 0.2 * len(layers)), layout="constrained")
    axes = figure.subplots()
    axes.barh(list(layers), [100 * share for share in layers.values()], color="#0f766e")
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="zeros among the weights, %")
    writer.add_figure("sparsity", figure, step, close=False)


@dataclass(frozen=True)
class Histogram:
    """Distribution of values, with the names that TensorBoard's `add_histogram_raw` takes.

    `bucket_counts[i]` of them are in (bucket_limits[i - 1], bucket_limits[i]], the first from `min` on.
    """

    min: float
    max: float
    sum: float
    sum_squares: float
    bucket_limits: list[float]
    bucket_counts: list[float]


def histogram(values: Tensor) -> Histogram | None:
    """Return the histogram of all finite values, computed on their device; None if no value is finite."""
    flat = (values.coalesce().values() if values.is_sparse else values).detach().reshape(-1).float()
    flat = flat[flat.isfinite()]
    if not flat.numel():
        return None
    least, most = (float(end) for end in torch.aminmax(flat))
    total = float(flat.sum(dtype=torch.float64))
    squares = float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2
    if most - least <= 1e-6 * max(abs(least), abs(most)):  # too close for float32 to tell bins apart
        return Histogram(least, most, total, squares, [most], [float(flat.numel())])
    counts = torch.histc(flat, BINS, least, most).tolist()
    limits = [least + (most - least) * (bin + 1) / BINS for bin in range(BINS - 1)]
    return Histogram(least, most, total, squares, [*limits, most], counts)
