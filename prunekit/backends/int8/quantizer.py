"""Quantization of a file to int8 within a limit of what it may cost: layers return to float until it costs no more.

Idea. A file is quantized whole, calibrated in one way after the other. Where the score falls by more than `max_drop`,
each layer is quantized alone; its error is how far the output moves, |y_int8 - y_float| / |y_float| on calibration
data. Layers return to float in the order of their errors, the worst first, and the fewest that keep the limit are
taken: 1, 2, 4, ... layers until it is kept, then bisection between the last two counts.

1. A file that is returned was scored itself; sensitivities only order the layers.
2. At least one layer is in int8, or an error names the layers that cost most.
3. Without a score there is no limit: the way of calibration with the smallest output error is taken.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from prunekit.errors import DataError, NonFiniteError, RunError
from prunekit.settings.deployment import QuantizeSettings
from prunekit.utils.display import Displayed, Table, listed, plural, share

Array = np.ndarray[Any, Any]
Batch = Mapping[str, Array]
"""A batch of calibration data: an array for each input of the file, by its name."""
InputKinds = Mapping[str, tuple[Any, tuple[int | None, ...]]]
"""NumPy dtype and shape of each input of a file, by its name; None for an axis of any size."""
Score = Callable[[Path], float]
"""From a file to its main score on validation data, in percent."""
Log = Callable[[str], object]

GOOD_ERROR = 0.05
"""Relative error of the output up to which a way of calibration is taken without trying others, where no score is
given."""
SENSITIVITY_SAMPLES = 64
"""Samples of the calibration data that output errors are measured on."""


@dataclass(frozen=True)
class LayerError:
    """The error that a layer makes in int8."""

    layer: str  # path of its module
    # relative error of the output if this layer alone is in int8: the norm of the difference from float over the norm
    # of the output in float, on calibration data
    error: float


@dataclass(frozen=True, repr=False)
class Quantized(Displayed):
    """A file that was quantized to int8."""

    path: Path  # of the file
    layers: tuple[str, ...]  # paths of the modules that compute in int8, in order of execution
    # why a layer, or an operator of it, computes in float, by the path of the module
    float_layers: Mapping[str, str] = field(default_factory=dict)
    # relative error of the output on calibration data: the norm of the difference from float over the norm of the
    # output in float
    error: float = 0.0
    # what each layer costs in int8, the worst first; empty where no limit made it worth measuring
    sensitivity: tuple[LayerError, ...] = ()
    float_score: float | None = None  # score of the file in float; None without a function of the score
    score: float | None = None  # score of the quantized file; None likewise
    notes: tuple[str, ...] = ()  # for the user
    lower_is_better: bool = False  # whether less of the score is better, as for a perplexity

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


class Quantizer(ABC):
    """A quantizer of one file, in several ways."""

    file: Path  # in float
    layers: tuple[str, ...]  # paths of modules that can be quantized, in order of execution
    ways: tuple[str, ...]  # names of ways of calibration, the one that is tried first at the front
    kinds: tuple[str, ...] = ()  # operators that can be quantized, for a message
    notes: list[str]  # for the user

    @abstractmethod
    def quantize(self, way: str, layers: frozenset[str]) -> Path:
        """Quantize some of the layers, and return the new file."""

    @abstractmethod
    def outputs(self, file: Path) -> list[Array]:
        """Return what a file computes from the first calibration data."""

    @abstractmethod
    def described(self, file: Path, restored: Sequence[LayerError]) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the layers of a file that compute in int8, and those in float with the reason."""

    @abstractmethod
    def finish(self, file: Path, path: Path) -> None:
        """Put a quantized file into its place."""


def quantized_file(
    make: Callable[[Path], Quantizer], path: Path, settings: QuantizeSettings, score: Score | None, log: Log
) -> Quantized:
    """Write the file within the limit that has the fewest layers in float, in place of any other of its name.

    `make` returns the quantizer of the file in float, given a folder for the quantizer's own files.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent) as place:
        quantizer = make(Path(place))
        if not quantizer.layers:
            kinds = f" ({', '.join(quantizer.kinds)})" if quantizer.kinds else ""
            raise RunError(
                f"{quantizer.file.name}: expected layers that can be quantized{kinds}, and it has none; stay in float"
            )
        limit = AccuracyLimit(quantizer, settings, score, log)
        file, error, worst, restored = limit.choose()
        layers, floats = quantizer.described(file, worst[:restored])
        scores = limit.scores_with(file)
        quantizer.finish(file, path)
    return Quantized(path, layers, floats, error, tuple(worst), *scores, tuple(quantizer.notes))


@dataclass
class AccuracyLimit:
    """The search for a quantized file within `max_drop`."""

    quantizer: Quantizer  # of the file
    settings: QuantizeSettings  # with the limit
    # None: there is nothing to limit, and ways of calibration are compared by the error of the output
    score: Score | None = None
    log: Log = lambda text: None  # gets a line for each step
    scores: dict[Path, float] = field(default_factory=dict)

    def choose(self) -> tuple[Path, float, list[LayerError], int]:
        """Return the file within the limit that has the fewest layers in float, its error, and which these are.

        They are the first of the layers with their errors, the worst first, and their number; no errors are returned
        where none were measured.
        """
        assert self._reference  # raises before anything is calibrated on what is not finite
        every, best = frozenset(self.quantizer.layers), list[tuple[float, float, str, Path]]()
        for way in self.quantizer.ways:
            file = self.quantizer.quantize(way, every)
            error, cost = self.error(file), self._cost(file)
            self.log(f"int8: calibrated by {way}: output error {share(error)}{self._in_words(cost)}")
            best.append((error if cost is None else cost, error, way, file))
            if error <= GOOD_ERROR if cost is None else self._within(cost):
                break
        lost, error, way, file = min(best, key=lambda found: found[0])
        if self.score is not None and not self._within(lost):
            return self._restored(way, lost)
        return file, error, [], 0

    @cached_property
    def _reference(self) -> list[Array]:
        found = self.quantizer.outputs(self.quantizer.file)
        if not all(np.isfinite(one).all() for one in found):
            raise NonFiniteError(
                f"{self.quantizer.file.name}: expected finite outputs on the calibration data, and got NaN or Inf in "
                "float already; check the data's preprocessing"
            )
        return found

    def _restored(self, way: str, whole: float) -> tuple[Path, float, list[LayerError], int]:
        """Return layers to float, the worst first: twice as many each time, then the fewest by bisection."""
        worst = self._sensitivity(way)
        most, tried = len(worst) - 1, dict[int, Path]()

        def enough(number: int) -> bool:
            if number not in tried:
                tried[number] = self.quantizer.quantize(way, frozenset(one.layer for one in worst[number:]))
                cost = self._cost(tried[number])
                self.log(f"int8: {number} of {len(worst)} layers returned to float{self._in_words(cost)}")
            return self._within(self._cost(tried[number]))

        low, high = 0, min(1, most)
        while high < most and not enough(high):
            low, high = high, min(2 * high, most)
        if not most or not enough(high):
            raise self._out_of_reach(worst, whole, self._cost(tried[most]) if most else None)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return tried[high], self.error(tried[high]), worst, high

    def _sensitivity(self, way: str) -> list[LayerError]:
        self.log(f"int8: measuring what each of {len(self.quantizer.layers)} layers costs alone")
        found = []
        for layer in self.quantizer.layers:
            file = self.quantizer.quantize(way, frozenset([layer]))
            found.append(LayerError(layer, self.error(file)))
            file.unlink()
        return sorted(found, key=lambda one: -one.error)

    def _out_of_reach(self, worst: Sequence[LayerError], whole: float, least: float | None) -> RunError:
        named = listed((f"{_name(one.layer)} ({share(one.error)})" for one in worst), 5)
        rest = "" if least is None else f", and {least:.2f} with {_name(worst[-1].layer)} alone in int8"
        return RunError(
            f"int8: expected to lose at most {self.settings.max_drop:g} points of the score (quantize.max_drop), and "
            f"{whole:.2f} are lost with all layers in int8{rest}; these cost most, by the error of the output with one "
            f"alone in int8: {named}; raise quantize.max_drop, calibrate on more images (quantize.images), or stay in "
            "float"
        )

    def error(self, file: Path) -> float:
        """Return the relative error of a file's output."""
        return relative_error(self._reference, self.quantizer.outputs(file))

    def scores_with(self, file: Path) -> tuple[float | None, float | None]:
        """Return the scores of the file in float and of another one; None without a function of the score."""
        return (None, None) if self.score is None else (self._scored(self.quantizer.file), self._scored(file))

    def _scored(self, file: Path) -> float:
        assert self.score is not None
        if file not in self.scores:
            self.scores[file] = float(self.score(file))
        return self.scores[file]

    def _cost(self, file: Path) -> float | None:
        """Return the points that a file loses; None without a function of the score."""
        return None if self.score is None else self._scored(self.quantizer.file) - self._scored(file)

    def _within(self, cost: float | None) -> bool:
        return cost is None or self.settings.max_drop is None or cost <= self.settings.max_drop + 1e-9

    def _in_words(self, cost: float | None) -> str:
        return "" if cost is None else f", {cost:.2f} points lost"


def _name(layer: str) -> str:
    return layer or "the model's own code"


def relative_error(expected: Sequence[Array], found: Sequence[Array]) -> float:
    """Return the norm of the difference of outputs over the norm of the expected ones; 1 if those are all zero.

    Outputs that are not of floating-point numbers are left out.
    """
    pairs = [
        (want.astype(np.float64), got.astype(np.float64))
        for want, got in zip(expected, found, strict=True)
        if np.issubdtype(want.dtype, np.floating)
    ]
    difference = sum(float(np.square(want - got).sum()) for want, got in pairs) ** 0.5
    norm = sum(float(np.square(want).sum()) for want, _ in pairs) ** 0.5
    if not np.isfinite(difference):
        return 1e9  # JSON has no infinity
    return 0.0 if difference == 0 else difference / norm if norm > 0 else 1.0


def calibration_batches(batches: Iterable[Batch], inputs: InputKinds, images: int, where: str) -> list[Batch]:
    """Return batches of calibration data with at least so many samples, checked against the inputs of a file."""
    found = list[Batch]()
    for number, batch in enumerate(with_samples(batches, images)):
        if set(batch) != set(inputs):
            raise DataError(
                f"calibration batch {number} for {where}: expected arrays named {', '.join(inputs)}, got "
                f"{', '.join(batch) or 'none'}"
            )
        arrays = {name: np.ascontiguousarray(batch[name], dtype=kind) for name, (kind, _) in inputs.items()}
        for name, array in arrays.items():
            _require_fitting(array, inputs[name][1], f"calibration batch {number} for {where}: {name}")
        found.append(arrays)
    if not found:
        raise DataError(f"calibration data for {where}: expected at least one batch, got none")
    return found


def _require_fitting(array: Array, shape: tuple[int | None, ...], where: str) -> None:
    fits = array.ndim == len(shape) and all(
        size is None or size == got for size, got in zip(shape, array.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise DataError(f"{where}: expected shape ({wanted}), got {array.shape}")
    if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
        raise DataError(f"{where}: expected finite numbers, got NaN or Inf")


def with_samples(batches: Iterable[Batch], least: int) -> Iterator[Batch]:
    """Yield the first batches that have so many samples together."""
    taken = 0
    for batch in batches:
        if taken >= least:
            return
        yield batch
        taken += max((len(array) for array in batch.values() if np.ndim(array)), default=1)


def returned_layers(restored: Iterable[LayerError]) -> dict[str, str]:
    """Return the layers that were returned to float, each with the reason."""
    return {
        one.layer: f"returned to float: alone in int8 it changes the output by {share(one.error)}" for one in restored
    }
