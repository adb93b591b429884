"""Latency profiles: the table, how well it predicts, and the times of every layer in every network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from prunekit.channels.channel_map import ChannelMap
from prunekit.channels.labels import Labels
from prunekit.measure.latency_profile.staircase_fit import TimedNetwork
from prunekit.planning.latency_table import LatencyTable, LayerLatency, round_up
from prunekit.utils.display import NOTHING, Displayed, Table, share

OUTPUTS, INPUTS, OTHERS = "output channels", "input channels", "channels"


@dataclass(frozen=True)
class NetworkPrediction:
    """The predicted and the measured time of a network, by a table that was fitted without those held out.

    Attributes:
        predicted_ms: by the table.
        measured_ms: scaled, as the table is, by the time of the dense model beside it.
        macs_left: share of the dense model's; 1 for the dense model itself.
        held_out: whether the table was not fitted to it.
    """

    predicted_ms: float
    measured_ms: float
    macs_left: float
    held_out: bool

    @property
    def error(self) -> float:
        """The relative error; above 0 if the prediction is too slow."""
        return self.predicted_ms / self.measured_ms - 1

    def row(self) -> dict[str, Any]:
        """Return the prediction as plain data."""
        return asdict(self) | {"error": self.error}


@dataclass(frozen=True, eq=False, repr=False)
class Profile(Displayed):
    """A latency table with the networks that it was fitted to.

    Attributes:
        channel_map: of the model, after a trial; the samples are in its numbering.
        table: fitted to all networks.
        predictions: of every network, the dense one first, by a table that was fitted without those held out.
        samples: the networks, in the same order.
        notes: what to know about the figures.
        seconds: that the profiling took.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> found = pk.profile(model, torch.randn(4, 8), networks=10)
        >>> found
        <Profile: dense ... ms (eager, cpu, batch 1, threads 1, float32, contiguous); ... networks in ...>
        >>> sorted(row["module"] for row in found.rows())
        ['0', '1', '2']
    """

    channel_map: ChannelMap
    table: LatencyTable
    predictions: tuple[NetworkPrediction, ...]
    samples: tuple[TimedNetwork, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def checks(self) -> tuple[NetworkPrediction, ...]:
        """The networks that were held out."""
        return tuple(check for check in self.predictions if check.held_out)

    @property
    def error(self) -> float:
        """Median of the absolute relative errors on networks that were held out."""
        return float(np.median([abs(check.error) for check in self.checks]))

    def summary(self) -> dict[str, Any]:
        """Return the errors of the table and the times of the dense model's layers as plain data."""
        return {
            "setting": dict(self.table.setting),
            "networks": len(self.samples),
            "seconds": self.seconds,
            "dense_ms": self.table.dense_ms,
            "error": self.error,
            "layers": self.rows(),
            "checks": [check.row() for check in self.checks],
            "notes": list(self.notes),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each module that takes time, the slowest first."""
        times = self.samples[0].times.modules_ms
        total = sum(times.values())
        return [
            {
                "module": layer.module,
                "dense_ms": times[layer.module],
                "share": times[layer.module] / total,
                "constant_ms": layer.constant,
                "steps": " ".join(map(str, sorted({step for term in layer.terms for step in term.steps}))),
                "changes_at": " ".join(map(str, sorted(_turns(layer)))),
                "error": layer.error,
            }
            for layer in self._slowest()
        ]

    def fits(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the times of every module in all networks, with the fit, by its widths; the slowest first.

        Args:
            model: that was profiled; its layers tell which width is of outputs and which of inputs.
        """
        final = self.channel_map.traced.final
        kept = [sample.keep[final] for sample in self.samples]
        scales = [self.table.dense_ms / sample.times.dense_ms for sample in self.samples]
        found = []
        for layer in self._slowest():
            widths = _Widths(layer, final)
            times = [sample.times.modules_ms.get(layer.module, 0.0) for sample in self.samples]
            measured = [
                {"kept": [int(np.count_nonzero(one[width])) for width in widths.free], "ms": scale * ms}
                for one, scale, ms in zip(kept, scales, times, strict=True)
            ]
            found.append(
                {
                    "module": layer.module,
                    "constant_ms": layer.constant,
                    "widths": [
                        {"name": _name(layer.module, final[width], model, self.channel_map), "channels": width.size}
                        for width in widths.free
                    ],
                    "terms": widths.terms,
                    "measured": measured,
                }
            )
        return found

    def _slowest(self) -> list[LayerLatency]:
        """Return the layers that take time, the slowest first."""
        times = self.samples[0].times.modules_ms
        taking = (layer for layer in self.table.layers if times.get(layer.module, 0.0) > 0)
        return sorted(taking, key=lambda layer: -times[layer.module])

    @property
    def accuracy(self) -> str:
        """The errors of the table in a sentence."""
        worst = max(abs(check.error) for check in self.checks)
        return (
            f"{len(self.samples)} networks in {self.seconds:.0f} s; the sum of the layers predicts those held out with "
            f"a median error of {self.error:.1%}, at most {worst:.1%}"
        )

    def _headline(self) -> str:
        setting = self.table.setting
        where = ", ".join(
            (
                setting["runtime"],
                setting["device"],
                f"batch {setting['batch']}",
                f"threads {setting['threads']}",
                setting["dtype"],
                setting["memory_format"],
            )
        )
        return f"dense {self.table.dense_ms:.3f} ms ({where}); {self.accuracy}"

    def _parts(self) -> Iterator[str | Table]:
        yield "\n".join([f"Profile: {self._headline()}", *(f"Note: {note}" for note in self.notes)])
        cells = [
            (
                row["module"] or "(the model's own code)",
                f"{row['dense_ms']:.3f}",
                share(row["share"], 1),
                row["steps"] or NOTHING,
                row["changes_at"] or NOTHING,
                share(row["error"], 1),
            )
            for row in self.rows()
        ]
        how = ("widths in steps of", "changes at widths")
        yield Table(("module", "ms", "share", *how, "fit error"), cells, text=how)


class _Widths:
    """The widths of a layer that plans can change, each once, and the terms of its fit in them.

    Attributes:
        free: labels of each width, in the numbering of the trace.
        terms: of each, milliseconds for a product of 1 (with the widths that no plan changes), the numbers of the
            widths that are multiplied, the step of each, and the spans in which the term holds: number of a width,
            lower end, and upper end, None without one.
    """

    def __init__(self, layer: LayerLatency, final: Labels) -> None:
        self.free: list[Labels] = []
        self.terms: list[dict[str, Any]] = []
        self._numbers: dict[bytes, int] = {}
        for term in layer.terms:
            ms, widths, steps, spans = term.ms, [], [], []
            for factor, step in zip(term.factors, term.steps, strict=True):
                if final[factor].any():
                    widths.append(self._number(final[factor], factor))
                    steps.append(step)
                else:
                    ms *= round_up(factor.size, step)
            for span in term.spans:
                assert final[span.factor].any()  # spans end at widths that plans change
                high = span.high if span.high < np.inf else None
                spans.append([self._number(final[span.factor], span.factor), span.low, high])
            self.terms.append({"ms": ms, "widths": widths, "steps": steps, "spans": spans})

    def _number(self, labels: Labels, factor: Labels) -> int:
        key = np.sort(labels).tobytes()
        if key not in self._numbers:
            self._numbers[key] = len(self.free)
            self.free.append(factor)
        return self._numbers[key]


def _turns(layer: LayerLatency) -> set[int]:
    """Return the widths at which the fit changes."""
    ends = {end for term in layer.terms for span in term.spans for end in (span.low, span.high)}
    return {int(end) for end in ends if 0 < end < np.inf}


def _name(module: str, width: Labels, model: nn.Module, channel_map: ChannelMap) -> str:
    """Return whether a width is a module's outputs or inputs, by the axes of its weight."""
    axes = channel_map.labels.get(f"{module}.weight".lstrip("."), ())
    names = (INPUTS, OUTPUTS) if isinstance(model.get_submodule(module), _ConvTransposeNd) else (OUTPUTS, INPUTS)
    same = [name for name, axis in zip(names, axes, strict=False) if axis is not None and _alike(axis, width)]
    return same[0] if len(same) == 1 and len(axes) > 1 else OTHERS


def _alike(axis: Labels, width: Labels) -> bool:
    return np.array_equal(np.sort(axis.reshape(-1)), np.sort(width))
