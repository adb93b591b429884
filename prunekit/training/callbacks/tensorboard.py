"""The log of a training for TensorBoard, epoch by epoch, and its scalars as a CSV table.

Among them are the sparsity and the clamped gradients of every layer.
"""

from __future__ import annotations

import csv
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

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


class TensorBoardLogger(Callback):
    """A callback that writes what happens in each epoch, and changes nothing; the first of all callbacks.

    Scalars are everything in an `EpochRow`; under masks the share of exact zeros in every layer's weights, as they were
    trained; for every clamped layer the share that was beyond the limit in the epoch.

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
        shown = settings.tensorboard and not missing_packages(["tensorboard"])  # the table has all scalars
        self._plan, self._warn = plan, warn
        self._folder, self._table = events if shown else None, table
        self._epoch = 0  # the last one that is written
        self._rows: list[tuple[int, str, float]] | None = None
        self._writer: SummaryWriter | None = None
        self._clamped: ClampCounts = {}
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

    @contextmanager
    def around_validation(self) -> Iterator[None]:
        """Read the weights as they were trained: before an average replaces them, or the next plan masks them."""
        model = self._run.model
        self._sparsity = {} if self._failed and not is_sharded(model) else layer_sparsity(model, self._plan())
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
        """Return the last epoch, and the counts of clamped gradients at its end."""
        return {
            "events": {"epoch": self._epoch},
            "clamped": {clamp: {path: list(both) for path, both in of.items()} for clamp, of in self._clamped.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.close()
        self._epoch, self._rows = int(state["events"]["epoch"]), None
        self._clamped = {clamp: {p: (n, of) for p, (n, of) in rows.items()} for clamp, rows in state["clamped"].items()}


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
            sizes[path] = sizes.get(path, 0) + math.prod(plan.channel_map.shapes.get(name, parameter.shape))
    if is_sharded(model):
        kept = {path: int(count) for path, count in zip(kept, total(*kept.values()), strict=True)}
    found = {f"sparsity/{path}": (sizes[path] - count) / sizes[path] for path, count in kept.items()}
    whole = sum(sizes.values())
    return found | ({"sparsity/all": (whole - sum(kept.values())) / whole} if sizes else {})
