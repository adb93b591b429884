"""A cause, and those in the widths of layers: off the steps of the hardware, or with slower kernels.

Steps are the vectors of a CPU, the tiles of a tensor core.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from prunekit.measure.causes.breakdown import OperatorFigures, OperatorRow, Widths
from prunekit.measure.latency.timing import Estimate
from prunekit.utils.display import listed, plural

LEAST = 0.02
"""Smallest share of the pruned model's time that is worth reporting."""


@dataclass(frozen=True)
class Cause:
    """A cause of time that the multiply-accumulates do not explain."""

    name: str  # for tables
    # estimate of the time in a forward pass of the pruned model; causes overlap, so that these do not add up. 0 for a
    # cause that makes no difference here.
    ms: float
    evidence: str  # the measurements, in sentences
    fix: str  # the change to make
    modules: tuple[str, ...] = ()  # paths of the modules concerned, the slowest first; empty for the whole model


@dataclass(frozen=True)
class OperatorGroup:
    """Operators that the pruned model ran, taken together."""

    rows: tuple[OperatorRow, ...]  # the slowest first
    figures: tuple[OperatorFigures, ...]  # of each in the pruned model
    ms: float  # together
    excess_ms: float  # milliseconds beyond the ideal
    calls: int  # number of their calls
    bytes: int  # that they moved
    kinds: str  # some of the operators' names
    modules: tuple[str, ...]  # paths of the modules that run them

    @staticmethod
    def select(rows: Iterable[OperatorRow], wanted: Callable[[OperatorRow, OperatorFigures], bool]) -> OperatorGroup:
        """Return the operators that the pruned model ran and that are wanted."""
        found = [(row, row.pruned) for row in rows if row.pruned is not None and wanted(row, row.pruned)]
        chosen, figures = tuple(row for row, _ in found), tuple(one for _, one in found)
        return OperatorGroup(
            chosen,
            figures,
            ms=sum(one.ms for one in figures),
            excess_ms=sum(max(0.0, row.excess_ms) for row in chosen),
            calls=sum(one.calls for one in figures),
            bytes=sum(one.bytes for one in figures),
            kinds=first_names([row.operator for row in chosen]),
            modules=tuple(dict.fromkeys(row.module for row in chosen)),
        )


def first_names(names: Iterable[str]) -> str:
    """Return the first three names, and how many more there are."""
    return listed(dict.fromkeys(name or "(root)" for name in names), 3)


SLACK = 1.01
"""Largest ratio of times that counts as no slower."""


@dataclass(frozen=True)
class TimedWidths:
    """A layer run alone at some widths."""

    widths: Widths  # (input, output) channels
    ms: float  # median

    def __str__(self) -> str:
        return f"{self.widths[0]}→{self.widths[1]} {self.ms:.3g} ms"


@dataclass(frozen=True)
class WidthTimes:
    """The times of a layer run alone: at its widths in the pruned model, and at widths rounded to a step."""

    module: str  # its path
    row_ms: float  # its time in the model
    step: int  # 8 or 16
    now: TimedWidths
    down: TimedWidths
    up: TimedWidths
    up_over_now: Estimate  # paired ratio of times
    tied: bool = False  # whether input and output channels are the same ones, as in a depthwise convolution

    @property
    def more_macs(self) -> float:
        """Multiply-accumulates at the widths rounded up over those now."""
        return self._macs(self.up) / self._macs(self.now)

    @property
    def free(self) -> bool:
        """True if rounding up is no slower, and surely adds less than half of the multiply-accumulates' share."""
        return self.up_over_now.median <= SLACK and self.up_over_now.high < 1 + (self.more_macs - 1) / 2

    @property
    def saved_ms(self) -> float:
        """Time in the model above the line between the widths rounded down and up, or above the time rounded up."""
        down, now, up = map(self._macs, (self.down, self.now, self.up))
        line = self.down.ms + (self.up.ms - self.down.ms) * (now - down) / (up - down)
        return self.row_ms * max(0.0, 1 - min(line, self.up.ms) / self.now.ms)

    def _macs(self, one: TimedWidths) -> int:
        return relative_macs(one.widths, tied=self.tied)


def relative_macs(widths: Widths, *, tied: bool) -> int:
    """Return a number that the multiply-accumulates of a layer are proportional to."""
    return widths[1] if tied else widths[0] * widths[1]


def rounded(widths: Widths, dense: Widths, step: int, *, tied: bool) -> tuple[Widths, Widths] | None:
    """Return a layer's widths with the pruned ones rounded down and up to multiples of a step.

    They are at most the dense widths. None if all are multiples already, or are not pruned.
    """
    down, up = list(widths), list(widths)
    for axis, (width, before) in enumerate(zip(widths, dense, strict=True)):
        if width < before and width % step:
            down[axis], up[axis] = max(step, width // step * step), min(before, -(-width // step) * step)
    if tied:
        down[0], up[0] = down[1], up[1]
    if (up[0], up[1]) == widths or down[0] > widths[0] or down[1] > widths[1]:
        return None
    return (down[0], down[1]), (up[0], up[1])


def off_step_widths(found: Iterable[WidthTimes], pruned_ms: float) -> Cause | None:
    """Return the time of layers that would be no slower with more channels, for the step that saves most."""
    by_step: dict[int, list[WidthTimes]] = defaultdict(list)
    for layer in found:
        if layer.free:
            by_step[layer.step].append(layer)
    if not by_step:
        return None
    step, most = max(by_step.items(), key=lambda item: sum(layer.saved_ms for layer in item[1]))
    layers = _worth_naming(most, pruned_ms)
    if not layers:
        return None
    times = "; ".join(f"{layer.module} {layer.now}, {layer.up}, {layer.down}" for layer in layers[:3])
    return Cause(
        name="widths off the hardware's steps",
        ms=sum(layer.saved_ms for layer in layers),
        evidence=f"widths rounded up to {step} make {plural(len(layers), 'layer')} no slower: {times}",
        fix=f"prune.round_to={step} (prunekit.prune(..., round_to={step}))",
        modules=tuple(layer.module for layer in layers),
    )


SLOWER = 0.9
"""Share of the dense layer's speed below which a layer is slower."""


@dataclass(frozen=True)
class KernelTimes:
    """The times of a layer run alone, at its widths in the pruned and in the dense model."""

    module: str  # its path
    row_ms: float  # its time in the model
    now: TimedWidths
    dense: TimedWidths
    more_macs: float  # multiply-accumulates at the dense widths over those now
    dense_over_now: Estimate  # paired ratio of times

    @property
    def slower(self) -> bool:
        """True if it surely does fewer multiply-accumulates per second than at the dense widths."""
        return self.dense_over_now.high < SLOWER * self.more_macs

    @property
    def saved_ms(self) -> float:
        """Time in the model that the speed at the dense widths would save."""
        return self.row_ms * max(0.0, 1 - self.dense_over_now.median / self.more_macs)


def slower_kernels(found: Iterable[KernelTimes], pruned_ms: float) -> Cause | None:
    """Return the time of layers that do fewer multiply-accumulates per second than at the dense model's widths."""
    layers = _worth_naming([layer for layer in found if layer.slower], pruned_ms)
    if not layers:
        return None
    times = "; ".join(
        f"{layer.module} {layer.now}, {layer.dense} for {layer.more_macs:.3g} times as many" for layer in layers[:3]
    )
    return Cause(
        name="slower kernels at these widths",
        ms=sum(layer.saved_ms for layer in layers),
        evidence=(
            f"fewer multiply-accumulates in a second than at the dense model's widths, each alone, in "
            f"{plural(len(layers), 'layer')}: {times}"
        ),
        fix=(
            "name the time and not the multiply-accumulates: prune.budget.speedup with this prune.target; such plans "
            "know what each layer takes at which widths, and where the library chooses another kernel"
        ),
        modules=tuple(layer.module for layer in layers),
    )


Layers = TypeVar("Layers", list[WidthTimes], list[KernelTimes])


def _worth_naming(layers: Layers, pruned_ms: float) -> Layers:
    """Return the layers that save most first; none if all together save too little to report."""
    layers.sort(key=lambda layer: -layer.saved_ms)
    return layers if sum(layer.saved_ms for layer in layers) >= LEAST * pruned_ms else []
