"""The report of a repair, layer by layer."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

from prunekit.utils.display import NOTHING, Displayed, Table, listed, plural, share

NO_BETTER = "with all layers fitted the model's output is no better on held-out images"
"""Why a layer's fit was dropped."""
SAME = "computes what the dense layer does"
MUCH = 3
"""By what factor the error of an output falls where a repair does what it can."""
SELECTED = (
    "repair: computed values select entries of the output, such as the queries that score best; the pruned model takes "
    "others, or in another order, which counts as an error that no fit removes: judge by a score on labeled data"
)
GONE = "nothing of it is left"
NAMED = 8
"""The most layers that a sentence names."""


@dataclass(frozen=True)
class LayerRepair:
    """One layer: mean squared error against the dense network on held-out images, at the end of its chain."""

    weight: str  # name of the parameter
    applied: str = ""  # the fit, as in `RepairSettings.fit`; empty if the layer was left as it was
    before: float = 0.0  # the error without the fit, as a share of the dense output's variance
    after: float = 0.0  # the error with it
    columns: int = 0  # of the Gram matrix
    rank: int = 0  # of the Gram matrix, if the fit solved for one
    ridge: float = 0.0  # that was used
    note: str = ""  # why something was left out or done differently


@dataclass(frozen=True)
class RepairMemory:
    """Memory that a repair takes at most, in bytes, besides the model, two copies of it, and the images."""

    batch: int  # images that run at a time
    running_bytes: int  # for these, operators' buffers included
    held_bytes: int  # for tensors of all images where passes stop, in the dense and in the masked model
    fit_bytes: int  # for one layer's sampled rows, its Gram matrix, and intermediate results of the fit
    rows: tuple[int, int]  # fewest and most sampled positions of a layer

    @property
    def bytes(self) -> int:
        """Sum of all parts."""
        return self.running_bytes + self.held_bytes + self.fit_bytes

    def __str__(self) -> str:
        parts = (
            f"{part / 2**20:,.0f} MiB {what}"
            for part, what in (
                (self.running_bytes, f"for {self.batch} images at a time"),
                (self.held_bytes, "kept of all images"),
                (self.fit_bytes, f"for a layer's fit to {self.rows[0]:,} to {self.rows[1]:,} positions"),
            )
        )
        return f"takes up to {self.bytes / 2**20:,.0f} MiB beside the model and two copies of it: {', '.join(parts)}"


@dataclass(frozen=True, repr=False)
class RepairReport(Displayed):
    """The result of a repair.

    Attributes:
        layers: in the order in which they run.
        before: mean squared difference of the masked model's output from the dense model's on held-out images, as a
            share of the variance of the latter.
        after: the same for the returned model.
        kept: whether repaired weights were kept; if the output is no better, layers are left as they were, and their
            notes say so.
        memory: as planned before the repair started.
        fitted: the same difference with all layers fitted; if it is no less than `before`, only the first layers are
            kept, or none.
        selected: whether computed values select entries of the compared outputs, such as the queries that score best.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> repaired = pk.prune(model, calibration=torch.randn(64, 8), macs=0.5)
        >>> repaired.repair
        <RepairReport: error of the output on held-out samples ... % -> ... % of its variance; 1 of 2 layers refitted>
        >>> repaired.repair.after < repaired.repair.before
        True
    """

    layers: tuple[LayerRepair, ...]
    before: float
    after: float
    kept: bool
    memory: RepairMemory
    fitted: float = 0.0
    selected: bool = False

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for every layer, in the order in which they run; see `LayerRepair`."""
        return [asdict(layer) for layer in self.layers]

    def _headline(self) -> str:
        applied = sum(bool(layer.applied) for layer in self.layers)
        error = (
            f"error of the output on held-out samples {share(self.before, 2)} -> {share(self.after, 2)} of its variance"
        )
        return f"{error}; {applied} of {plural(len(self.layers), 'layer')} refitted"

    def _parts(self) -> Iterator[str | Table]:
        yield f"Repair: {self._headline()}"
        if self.notes:
            yield "\n".join(self.notes)
        cells = [
            (
                layer.weight.removesuffix(".weight"),
                layer.applied or NOTHING,
                share(layer.before, 2),
                share(layer.after, 2),
                layer.note,
            )
            for layer in self.layers
        ]
        yield Table(("layer", "fit", "error before", "after", "note"), cells, text=("fit", "note"))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on layers that could not be fitted or were fitted and not kept, and on a repair without effect."""
        applied = [layer for layer in self.layers if layer.applied]
        tried = [layer for layer in self.layers if layer.applied or layer.note.endswith(NO_BETTER)]
        reasons = reasons_of(self.layers)
        if not tried:
            return (f"repair: no layer was refitted: {'; '.join(reasons) or 'no layer is a convolution or linear'}",)
        error = "the output's error on held-out samples is"
        if len(applied) == len(tried):
            before, after = f"{self.before:.3g}", f"{self.after:.3g}"
            same = f"repair: changes nothing that shows: {error} {before} of its variance without it and with it"
            return (same, *self._left) if before == after else self._left
        which = f"the first {len(applied)} of {len(tried)} fitted layers are" if applied else "nothing is"
        found = f"with all of them {error} {self.fitted:.3g} of its variance, without {self.before:.3g}"
        return (f"repair: {which} kept: {found}{f', with those {self.after:.3g}' if applied else ''}", *self._left)

    @property
    def _left(self) -> tuple[str, ...]:
        """Sentences on a selection that hides what was reached, and on layers that could not be fitted, and why."""
        found: dict[str, list[str]] = {}
        for layer in self.layers:
            if layer.note and not layer.applied and not layer.before and layer.note not in {SAME, GONE}:
                found.setdefault(layer.note, []).append(layer.weight.removesuffix(".weight"))
        left = tuple(f"repair: {listed(names, NAMED)} not refitted: {note}" for note, names in found.items())
        return (SELECTED, *left) if self.selected and self.after > self.before / MUCH else left


def reasons_of(layers: Iterable[LayerRepair]) -> list[str]:
    """Return each note with the number of layers that have it."""
    notes = Counter(layer.note for layer in layers if layer.note)
    return [f"{note} ({count} layer{'s'[: count > 1]})" for note, count in notes.items()]


def dropped(layer: LayerRepair) -> LayerRepair:
    """Return the report of a layer whose fit was dropped, because the whole model is no better."""
    if not layer.applied:
        return layer
    return replace(layer, applied="", after=layer.before, note=f"{layer.applied} dropped: {NO_BETTER}")


def joined(name: str, parts: list[LayerRepair]) -> LayerRepair:
    """Return one report for all groups of a convolution."""
    if not parts:
        return LayerRepair(name, note=GONE)
    if len(parts) == 1:
        return parts[0]
    applied = next((part.applied for part in parts if part.applied), "")
    count = sum(bool(part.applied) for part in parts)
    return LayerRepair(
        name,
        applied,
        float(mean([part.before for part in parts])),
        float(mean([part.after for part in parts])),
        max(part.columns for part in parts),
        min(part.rank for part in parts),
        max(part.ridge for part in parts),
        f"{count} of {len(parts)} groups" if applied else parts[0].note,
    )
