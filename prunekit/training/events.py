"""Where a training is watched: TensorBoard's events, and the same scalars as a plain table."""

from __future__ import annotations

import csv
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from prunekit.artifacts import atomic_file

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


@dataclass(frozen=True)
class Histogram:
    """How values are distributed: `counts[i]` of them in (limits[i - 1], limits[i]], the first from `least` on."""

    least: float
    most: float
    total: float
    squares: float
    limits: list[float]
    counts: list[float]


def histogram(values: Tensor) -> Histogram | None:
    """Of all finite values, in even bins; made where they are, so that no more than the bins leaves a device.

    Returns:
        None where no value is finite.
    """
    flat = (values.coalesce().values() if values.is_sparse else values).detach().reshape(-1).float()
    flat = flat[flat.isfinite()]
    if not flat.numel():
        return None
    least, most = (float(end) for end in torch.aminmax(flat))
    total, squares = (
        float(flat.sum(dtype=torch.float64)),
        float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2,
    )
    if most - least <= 1e-6 * max(abs(least), abs(most)):  # too close for float32 to tell bins apart
        return Histogram(least, most, total, squares, [most], [float(flat.numel())])
    counts = torch.histc(flat, BINS, least, most).tolist()
    limits = [least + (most - least) * (bin + 1) / BINS for bin in range(BINS - 1)]
    return Histogram(least, most, total, squares, [*limits, most], counts)


def of_mask(kept: int, size: int) -> Histogram:
    """Of a mask: exactly `size - kept` zeros in the first bin, and `kept` ones in the second."""
    least, most = float(kept == size), float(kept > 0)
    return Histogram(least, most, float(kept), float(kept), [0.5, 1.0], [float(size - kept), float(kept)])


class Events:
    """The writer of one training, made when it is first needed.

    Of a training that is resumed, what came after the epoch where it goes on is taken back: from the table, and in
    TensorBoard by an event that says so.

    Args:
        folder: for events; None for none.
        table: CSV file of all scalars.
    """

    def __init__(self, folder: Path | None, table: Path) -> None:
        self.folder, self.table = folder, table
        self.epoch = 0
        """The last one that is written down."""
        self._rows: list[tuple[int, str, float]] | None = None
        self._writer: SummaryWriter | None = None

    @property
    def writer(self) -> SummaryWriter | None:
        """TensorBoard's, for whatever else there is to show; None without events."""
        if self._writer is None and self.folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            if self.epoch:
                _wait_until_last(self.folder)
                self._writer = SummaryWriter(str(self.folder), purge_step=self.epoch + 1)
            else:
                shutil.rmtree(self.folder, ignore_errors=True)
                self._writer = SummaryWriter(str(self.folder))
                self._writer.add_custom_scalars(CHARTS)
        return self._writer

    def scalars(self, epoch: int, values: Mapping[str, float]) -> None:
        """Writes scalars of an epoch."""
        writer = self.writer
        if self._rows is None:
            self._rows = _read(self.table, self.epoch) if self.epoch else []
        for tag, value in values.items():
            self._rows.append((epoch, tag, value))
            if writer is not None:
                writer.add_scalar(tag, value, epoch)
        self.table.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.table) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *self._rows])

    def histogram(self, epoch: int, tag: str, found: Histogram) -> None:
        """Writes a histogram."""
        if self.writer is not None:
            self.writer.add_histogram_raw(
                tag,
                min=found.least,
                max=found.most,
                num=sum(found.counts),
                sum=found.total,
                sum_squares=found.squares,
                bucket_limits=found.limits,
                bucket_counts=found.counts,
                global_step=epoch,
            )

    def written(self, epoch: int) -> None:
        """All of an epoch is written; whoever looks on sees it."""
        self.epoch = epoch
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Ends the file of events; another begins where more is written."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def state_dict(self) -> dict[str, Any]:
        """How far it is written."""
        return {"epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self.close()
        self.epoch, self._rows = int(state["epoch"]), None


def _wait_until_last(folder: Path) -> None:
    """TensorBoard reads files by their names, which begin with the second: a file of a later one comes last."""
    while any(path.name.split(".")[3] >= f"{int(time.time()):010d}" for path in folder.glob("events.out.tfevents.*")):
        time.sleep(0.05)


def _read(table: Path, last: int) -> list[tuple[int, str, float]]:
    """The rows of the epochs up to the last one that counts; none where there is no such table."""
    if not table.exists():
        return []
    with table.open(encoding="utf-8", newline="") as file:
        rows = [(int(row["epoch"]), row["tag"], float(row["value"])) for row in csv.DictReader(file)]
    return [row for row in rows if row[0] <= last]
