"""Widths between the hardware's steps: vectors of a CPU, tiles of a tensor core."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prunekit.measure.causes.cause import Cause, worth_naming
from prunekit.measure.evidence import Estimate
from prunekit.measure.layers import Widths
from prunekit.numbers import plural

SLACK = 1.01
"""Up to here a ratio of times counts as no slower."""


@dataclass(frozen=True)
class WidthTimes:
    """A layer of the pruned model run alone: at its widths, and with the pruned ones rounded to a step.

    Attributes:
        module: its path.
        row_ms: what it takes in the model.
        step: 8 or 16.
        now, down, up: (input, output) channels.
        tied: whether these are the same channels, as in a depthwise convolution.
        now_ms, down_ms, up_ms: medians.
        up_over_now: paired ratio of times.
    """

    module: str
    row_ms: float
    step: int
    now: Widths
    down: Widths
    up: Widths
    now_ms: float
    down_ms: float
    up_ms: float
    up_over_now: Estimate
    tied: bool = False

    @property
    def more_macs(self) -> float:
        """Multiply-accumulates rounded up over those now."""
        return self._size(self.up) / self._size(self.now)

    @property
    def free(self) -> bool:
        """Whether rounding up is no slower, and costs surely less than half of what its multiply-accumulates say."""
        return self.up_over_now.median <= SLACK and self.up_over_now.high < 1 + (self.more_macs - 1) / 2

    @property
    def saved_ms(self) -> float:
        """In the model, against the straight line between the widths rounded down and up, or the time rounded up."""
        down, now, up = (self._size(widths) for widths in (self.down, self.now, self.up))
        line = self.down_ms + (self.up_ms - self.down_ms) * (now - down) / (up - down)
        return self.row_ms * max(0.0, 1 - min(line, self.up_ms) / self.now_ms)

    def _size(self, widths: Widths) -> int:
        return size(widths, tied=self.tied)


def size(widths: Widths, *, tied: bool) -> int:
    """What multiply-accumulates are proportional to."""
    return widths[1] if tied else widths[0] * widths[1]


def rounded(widths: Widths, dense: Widths, step: int, *, tied: bool) -> tuple[Widths, Widths] | None:
    """The pruned ones of a layer's widths rounded down and up to multiples of a step, at most to the dense widths.

    Returns:
        (down, up); None where all are multiples already, or are not pruned.
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


def off_step_widths(times: Iterable[WidthTimes], pruned_ms: float) -> Cause | None:
    """Layers that would be no slower with more channels; the step that saves most."""
    by_step: dict[int, list[WidthTimes]] = defaultdict(list)
    for layer in times:
        if layer.free:
            by_step[layer.step].append(layer)
    if not by_step:
        return None
    step, most = max(by_step.items(), key=lambda item: sum(layer.saved_ms for layer in item[1]))
    layers = worth_naming(most, pruned_ms)
    if not layers:
        return None
    return Cause(
        name="widths off the hardware's steps",
        ms=sum(layer.saved_ms for layer in layers),
        evidence=f"widths rounded up to {step} make {plural(len(layers), 'layer')} no slower: {_shown(layers)}",
        fix=f"prune.round_to={step} (prunekit.prune(..., round_to={step}))",
        modules=tuple(layer.module for layer in layers),
    )


def _shown(layers: Sequence[WidthTimes]) -> str:
    return "; ".join(
        f"{layer.module} {text(layer.now)} {layer.now_ms:.3g} ms, {text(layer.up)} {layer.up_ms:.3g} ms, "
        f"{text(layer.down)} {layer.down_ms:.3g} ms"
        for layer in layers[:3]
    )


def text(widths: Widths) -> str:
    """As it is shown: input channels, and output channels."""
    return f"{widths[0]}→{widths[1]}"
