"""Widths between the hardware's steps: vectors of a CPU, tiles of a tensor core.

Layers that multiply slower at their widths than at the dense ones: another kernel, or one with too little to do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prunekit.measure.causes.cause import Cause, worth_naming
from prunekit.measure.causes.operator_times import Widths
from prunekit.measure.latency.timing import Estimate
from prunekit.utils.display import plural

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
    """Return what multiply-accumulates are proportional to."""
    return widths[1] if tied else widths[0] * widths[1]


def rounded(widths: Widths, dense: Widths, step: int, *, tied: bool) -> tuple[Widths, Widths] | None:
    """Return the pruned ones of a layer's widths rounded down and up to multiples of a step, at most to the dense
    widths.

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
    """Return layers that would be no slower with more channels; the step that saves most."""
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


CLEARLY = 0.9
"""Share of the dense layer's speed below which one is slower, its whole interval."""


@dataclass(frozen=True)
class KernelTimes:
    """A layer of the pruned model run alone, at its widths and at those of the dense model.

    Attributes:
        module: its path.
        row_ms: what it takes in the model.
        now, dense: (input, output) channels.
        more_macs: multiply-accumulates at the dense widths over those now.
        now_ms, dense_ms: medians.
        dense_over_now: paired ratio of times.
    """

    module: str
    row_ms: float
    now: Widths
    dense: Widths
    more_macs: float
    now_ms: float
    dense_ms: float
    dense_over_now: Estimate

    @property
    def slower(self) -> bool:
        """Whether it surely does fewer multiply-accumulates in a second than at the dense widths."""
        return self.dense_over_now.high < CLEARLY * self.more_macs

    @property
    def saved_ms(self) -> float:
        """In the model, if it did as many in a second."""
        return self.row_ms * max(0.0, 1 - self.dense_over_now.median / self.more_macs)


def slower_kernels(times: Iterable[KernelTimes], pruned_ms: float) -> Cause | None:
    """Return layers that do fewer multiply-accumulates in a second than at the dense model's widths."""
    layers = worth_naming((layer for layer in times if layer.slower), pruned_ms)
    if not layers:
        return None
    return Cause(
        name="slower kernels at these widths",
        ms=sum(layer.saved_ms for layer in layers),
        evidence=(
            f"fewer multiply-accumulates in a second than at the dense model's widths, each alone, in "
            f"{plural(len(layers), 'layer')}: {_shown_kernels(layers)}"
        ),
        fix=(
            "name the time and not the multiply-accumulates: prune.budget.speedup with this prune.target; such plans "
            "know what each layer takes at which widths, and where the library chooses another kernel"
        ),
        modules=tuple(layer.module for layer in layers),
    )


def _shown_kernels(layers: Sequence[KernelTimes]) -> str:
    return "; ".join(
        f"{layer.module} {text(layer.now)} {layer.now_ms:.3g} ms, {text(layer.dense)} {layer.dense_ms:.3g} ms for "
        f"{layer.more_macs:.3g} times as many"
        for layer in layers[:3]
    )
