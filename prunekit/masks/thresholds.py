"""Thresholds of activation masks, found for a target sparsity on calibration data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from prunekit.channels.tracing.tracer import channel_axis
from prunekit.errors import ArtifactError, DataError, ModelError, NonFiniteError, UsageError
from prunekit.hooks.owner import HookOwner
from prunekit.hooks.wrappers import unwrapped
from prunekit.masks.activation_masks import ActivationMasks, Side, change_activations
from prunekit.masks.module_values import paths_matching
from prunekit.settings.train import ActivationSettings
from prunekit.statistics.magnitude_sketch import MagnitudeSketch
from prunekit.tasks.batches import ModelBatches
from prunekit.tasks.task import Task
from prunekit.utils.context import device_of, training_mode
from prunekit.utils.display import Displayed, Table, digits, plural, share
from prunekit.utils.files import StrPath, read_json, write_json
from prunekit.utils.inputs import call, running, to_device
from prunekit.utils.progress import reporting, stage, tracked

ROUNDS = 20
"""The most passes over the calibration data."""
NEAR = 0.001
"""Distance from the target, as a share of the values, at which the search for a layer ends."""


@dataclass(frozen=True, eq=False, repr=False)
class ActivationThresholds(Displayed, Mapping[str, float]):
    """Thresholds by module path, and the sparsity that they reach; `ActivationMasks` takes this as it is.

    Attributes:
        thresholds: by module path.
        reached: share of zeros behind the masks on the calibration data, with all masks active, by module path.
        target: share of zeros to reach; None if the thresholds were not searched.
        side: whether outputs or inputs are masked.
        rounds: passes over the data that the search took.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> found = pk.calibrate_thresholds(model, torch.randn(256, 8), ["1"], target=0.75)
        >>> print(found)
        Activation thresholds: outputs of 1 module, target 75.0 % of zeros; 2 passes
        <BLANKLINE>
          module  threshold   zeros
          1           ...  7... %
        >>> with pk.ActivationMasks(model, found):
        ...     y = model(x)
    """

    thresholds: Mapping[str, float]
    reached: Mapping[str, float]
    target: float | None
    side: Side
    rounds: int

    def __getitem__(self, path: str) -> float:
        return self.thresholds[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.thresholds)

    def __len__(self) -> int:
        return len(self.thresholds)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for every module: its threshold, and the share of zeros that it reaches, None if unknown."""
        return [
            {"module": path, "threshold": float(value), "zeros": self.reached.get(path)}
            for path, value in self.thresholds.items()
        ]

    def _headline(self) -> str:
        target = "" if self.target is None else f", target {share(self.target)} of zeros"
        off = f", {len(self.off_target())} off it" if self.off_target() else ""
        return f"{self.side}s of {plural(len(self), 'module')}{target}{off}; {plural(self.rounds, 'pass', 'es')}"

    def _parts(self) -> Iterator[str | Table]:
        yield f"Activation thresholds: {self._headline()}"
        cells = [(row["module"] or "(root)", digits(row["threshold"]), share(row["zeros"])) for row in self.rows()]
        yield Table(("module", "threshold", "zeros"), cells)

    def off_target(self, tolerance: float = 0.01) -> dict[str, float]:
        """Return layers that miss the target, with the share that they reach.

        Zeros alone exceed it (then the threshold is 0), many values are equal, or the search ended early.
        """
        target = self.target
        return {path: share for path, share in self.reached.items() if target and abs(share - target) > tolerance}

    def save(self, path: StrPath) -> None:
        """Write the thresholds as JSON."""
        write_json(Path(path), {**vars(self), "thresholds": dict(self.thresholds), "reached": dict(self.reached)})

    @classmethod
    def load(cls, path: StrPath) -> Self:
        """Read what `save` wrote.

        Raises:
            ArtifactError: the file is missing, damaged, or something else.
        """
        found = read_json(Path(path))
        if not isinstance(found, dict) or found.keys() != _VALID.keys():
            raise ArtifactError(f"{path}: expected activation thresholds, an object with {', '.join(_VALID)}")
        for name, (valid, expected) in _VALID.items():
            if not valid(found[name]):
                raise ArtifactError(f"{path}: {name}: expected {expected}, got {found[name]!r}; the file is damaged")
        return cls(**found)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_number, value.values()))


_VALID: dict[str, tuple[Callable[[Any], bool], str]] = {
    "thresholds": (_numbers, "numbers of at least 0 by module path"),
    "reached": (_numbers, "shares by module path"),
    "target": (lambda value: value is None or _number(value), "a share or null"),
    "side": (lambda value: value in ("input", "output"), "'input' or 'output'"),
    "rounds": (lambda value: type(value) is int and value >= 0, "a whole number of at least 0"),
}


def chosen_paths(model: nn.Module, settings: ActivationSettings) -> list[str]:
    """Return the paths of the modules that the settings select.

    Raises:
        UsageError: a glob matches nothing, or not exactly one of threshold and target is given.
    """
    if (settings.threshold is None) == (settings.target is None):
        raise UsageError("activations: expected exactly one of 'threshold' and 'target'")
    return paths_matching(model, settings.modules, "activations.modules")


def calibrate_thresholds(
    model: nn.Module,
    batches: Any,
    modules: Iterable[str],
    *,
    target: float,
    side: Side = "output",
    device: torch.device | str | None = None,
    task: Task | str | None = None,
    progress: bool | None = None,
) -> ActivationThresholds:
    """Find for each layer the threshold below which a share of its activations lies, with all masks active.

    A mask changes the activations of later layers, so the search takes several passes over the data: each under the
    thresholds found before, until every layer is within 0.1 points of the target. Where zeros alone, as behind a ReLU,
    exceed the target, the threshold is 0 and `reached` gives their share.

    Args:
        model: run in eval mode, without gradients; moved to `device` where one is given.
        batches: as `prunekit.calibrate` takes them; read several times.
        modules: globs over module paths.
        target: share of zeros behind each mask, above 0 and below 1.
        side: which activations of the modules.
        device: where it runs; None: where the model's parameters are.
        task: splits batches that come in another form; a task or its name.
        progress: whether to show bars on stderr; None: on a terminal and in a notebook.

    Raises:
        UsageError: the target is out of range, a glob matches nothing, or `batches` can be read only once.
        DataError: there are no batches, or one has an unknown form.
        ModelError: a module does not run, or has no floating-point activation.
        NonFiniteError: an activation is NaN or Inf; names layer, batch and channel.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> data = torch.randn(512, 4)
        >>> thresholds = pk.calibrate_thresholds(model, data, ["1"], target=0.7)
        >>> with pk.ActivationMasks(model, thresholds), pk.capture(model, "2", "input") as record:
        ...     outputs = model(data)
        >>> round(float((record["2"][0].value == 0).double().mean()), 1)  # what the last layer reads
        0.7
    """
    model = unwrapped(model, offloaded=True)
    if not 0 < target < 1:
        raise UsageError(f"target: expected a share of zeros above 0 and below 1, got {target!r}")
    paths = paths_matching(model, modules, "modules")
    if isinstance(batches, Iterator):
        raise UsageError("batches: the search reads them several times; expected a list or a loader, got an iterator")
    pairs = ModelBatches(model, batches, task, "threshold search")
    place = device_of(model, device)
    if device is not None:
        model.to(place)
    thresholds, rounds = dict.fromkeys(paths, 0.0), 0
    with reporting(progress, "calibrate_thresholds"):
        while True:
            rounds += 1
            stage(f"threshold search: pass {rounds}, {ROUNDS} at most")
            sketches, reached = _measure(model, pairs, place, thresholds, side)
            # A layer that is near keeps its threshold, so that later layers can settle.
            far = {path: sketches[path].quantile(target) for path in paths if abs(reached[path] - target) > NEAR}
            if far.items() <= thresholds.items() or rounds == ROUNDS:
                return ActivationThresholds(thresholds, reached, target, side, rounds)
            thresholds = thresholds | far


def _measure(
    model: nn.Module, pairs: ModelBatches, device: torch.device, thresholds: Mapping[str, float], side: Side
) -> tuple[dict[str, MagnitudeSketch], dict[str, float]]:
    """Return sketches of the activations in front of each mask, and the share of zeros behind it."""
    sketches, masks = _Sketches(model, thresholds, side), ActivationMasks(model, thresholds, side=side)
    with training_mode(model, False), torch.no_grad(), sketches, masks:
        for inputs, _ in tracked(pairs, "threshold search"):
            sketches.batch += 1
            with running(model, inputs):
                call(model, to_device(inputs, device))
    if not sketches.batch:
        raise DataError("threshold search: expected at least one batch to calibrate on, got none")
    silent = [path for path in thresholds if path not in sketches.found]
    if silent:
        raise ModelError(f"threshold search: {silent[0]} was not called in a forward pass; choose other modules")
    return sketches.found, masks.sparsity().layers


class _Sketches(HookOwner):
    """Hooks that sketch activations; entered before the masks, they see values that are not masked yet."""

    def __init__(self, model: nn.Module, paths: Iterable[str], side: Side) -> None:
        super().__init__()
        self._model, self._paths, self._side = model, paths, side
        self.found: dict[str, MagnitudeSketch] = {}
        self.batch = 0

    def register(self) -> None:
        for path in self._paths:
            change_activations(self, self._model, path, self._side, self._add(path))

    def _add(self, path: str) -> Callable[[Tensor], Tensor]:
        def add(tensor: Tensor) -> Tensor:
            if self.found.setdefault(path, MagnitudeSketch()).add(tensor).non_finite:
                raise NonFiniteError(self._blame(path, tensor))
            return tensor

        return add

    def _blame(self, path: str, tensor: Tensor) -> str:
        axis = channel_axis(self._model.get_submodule(path), tensor.ndim)
        first = (~torch.isfinite(tensor)).nonzero()[0].tolist()
        channel = f", channel {first[axis]}" if first else ""
        return (
            f"threshold search: NaN or Inf in the {self._side} of {path}, batch {self.batch}{channel}; expected finite "
            "activations: check the images, and the weights up to there"
        )
