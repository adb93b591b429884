"""Quantized files: where they are, which layers they compute in float and why, and what each layer costs in int8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prunekit.utils.display import Displayed, Table, plural, share


@dataclass(frozen=True)
class LayerError:
    """The error that a layer makes in int8.

    Attributes:
        layer: path of its module.
        error: relative error of the output if this layer alone is in int8: the norm of the difference from float over
            the norm of the output in float, on calibration data.
    """

    layer: str
    error: float


@dataclass(frozen=True, repr=False)
class Quantized(Displayed):
    """A file that was quantized to int8.

    Attributes:
        path: of the file.
        layers: paths of the modules that compute in int8, in order of execution.
        float_layers: why a layer, or an operator of it, computes in float, by the path of the module.
        error: relative error of the output on calibration data: the norm of the difference from float over the norm of
            the output in float.
        sensitivity: what each layer costs in int8, the worst first; empty where no limit made it worth measuring.
        float_score: of the file that was quantized, by the function that was given; None without one.
        score: of the quantized file, likewise.
        notes: for the user.
        lower_is_better: whether less of the score is better, as for a perplexity.
    """

    path: Path
    layers: tuple[str, ...]
    float_layers: Mapping[str, str] = field(default_factory=dict)
    error: float = 0.0
    sensitivity: tuple[LayerError, ...] = ()
    float_score: float | None = None
    score: float | None = None
    notes: tuple[str, ...] = ()
    lower_is_better: bool = False

    @property
    def drop(self) -> float | None:
        """Points that the score fell by, or rose by where less is better; None without scores."""
        if self.float_score is None or self.score is None:
            return None
        return (self.score - self.float_score) if self.lower_is_better else (self.float_score - self.score)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "path": str(self.path),
            "layers": list(self.layers),
            "float_layers": dict(self.float_layers),
            "error": self.error,
            "sensitivity": [asdict(one) for one in self.sensitivity],
            "float_score": self.float_score,
            "score": self.score,
            "drop": self.drop,
            "notes": list(self.notes),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each layer: layer, computes (int8, float or both), error (None if not measured), reason."""
        errors = {one.layer: one.error for one in self.sensitivity}
        return [
            {
                "layer": name,
                "computes": "float" if name not in self.layers else "both" if name in self.float_layers else "int8",
                "error": errors.get(name),
                "reason": self.float_layers.get(name, ""),
            }
            for name in dict.fromkeys((*self.layers, *self.float_layers))
        ]

    def _headline(self) -> str:
        drop = "" if self.drop is None else f", {self.drop:.2f} points lost"
        floats = f", {len(self.float_layers)} with operators in float" if self.float_layers else ""
        return f"{self.path.name}: {plural(len(self.layers), 'layer')} in int8{floats}{drop}"

    def _parts(self) -> Iterable[str | Table]:
        yield self._headline()
        yield from self.notes
        if self.float_layers:
            rows = [(name or "the model's own code", reason) for name, reason in self.float_layers.items()]
            yield Table(("in float", "reason"), rows, text=("reason",))
        if self.sensitivity:
            errors = [(one.layer or "the model's own code", share(one.error)) for one in self.sensitivity]
            yield Table(("layer alone in int8", "output error"), errors)
