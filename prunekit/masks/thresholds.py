"""Thresholds of activation masks, found for a target sparsity on calibration data."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Self, get_args

import torch
from annotated_types import Ge
from pydantic import ConfigDict
from torch import nn

from prunekit.errors import ArtifactError, UsageError
from prunekit.hooks.wrappers import unwrapped
from prunekit.masks.activation_budget import SavedBy, better_way, spread_budgets
from prunekit.masks.activation_masks import Side
from prunekit.masks.module_values import one_of, paths_matching
from prunekit.masks.threshold_search import MaskedActivations, search_thresholds
from prunekit.modes.public_call import public_call
from prunekit.reading.text_files import as_record, read_json
from prunekit.settings.train import ActivationSettings
from prunekit.tasks.batches import ModelBatches
from prunekit.tasks.task import Task
from prunekit.utils.context import device_of
from prunekit.utils.display import Displayed, Table, digits, plural, share
from prunekit.utils.files import StrPath, write_json
from prunekit.utils.progress import reporting

Amount = Annotated[float, Ge(0)]
KNOWN_NAMES = ConfigDict(extra="forbid")
"""Files with other entries than the fields are refused."""


@dataclass(frozen=True)
class ActivationBudget:
    """A budget of zeros for all masks together, and how it was spread over them."""

    overall: Amount  # share of zeros asked for, weighted by what they save
    by: SavedBy  # what that is: MACs of the layers that read the masked values, or the values themselves
    # share of all that can be saved that lies behind each mask, by module path; they add up to 1. With 0, nothing that
    # computes by MACs reads these values, and they are not masked.
    weights: Mapping[str, Amount]
    # share of zeros that each mask was given; where zeros alone exceed it, the threshold is 0
    shares: Mapping[str, Amount]
    # mean squared difference of the model's output from the unmasked one's on held-out samples, as a share of the
    # latter's variance: `spread` over the layers by measured errors, and `uniform` with one share for all
    errors: Mapping[str, Amount]
    __pydantic_config__ = KNOWN_NAMES

    @property
    def way(self) -> str:
        """`spread`, or `uniform` where that does better on held-out samples."""
        return better_way(self.errors)

    @property
    def compared(self) -> str:
        """The way, and the errors of both."""
        spread, uniform = (share(self.errors[way], 2) for way in ("spread", "uniform"))
        if self.way == "spread":
            return f"spread by errors: output error {spread} of its variance, {uniform} with one share for all"
        return f"one share for all: output error {uniform} of its variance, {spread} if spread by errors"


@dataclass(frozen=True, eq=False, repr=False)
class ActivationThresholds(Displayed, Mapping[str, float]):
    """Thresholds by module path, and the sparsity that they reach; `ActivationMasks` takes this as it is.

    Attributes:
        thresholds: by module path.
        reached: share of zeros behind the masks on the calibration data, with all masks active, by module path.
        target: share of zeros to reach behind each mask; None if there is none, or a budget for all together.
        side: whether outputs or inputs are masked.
        rounds: passes over the data that the search took.
        budget: of zeros overall; None without one.

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

    thresholds: Mapping[str, Amount]
    reached: Mapping[str, Amount]
    target: Amount | None
    side: Side
    rounds: Annotated[int, Ge(0)]
    budget: ActivationBudget | None = None
    __pydantic_config__ = KNOWN_NAMES

    def __getitem__(self, path: str) -> float:
        return self.thresholds[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.thresholds)

    def __len__(self) -> int:
        return len(self.thresholds)

    @property
    def overall(self) -> float | None:
        """Share of zeros behind all masks that is reached, weighted by what they save; None without a budget."""
        return None if self.budget is None else self.budget_share(self.reached)

    def budget_share(self, shares: Mapping[str, float]) -> float:
        """Return the mean of shares of zeros by module path, weighted by what they save.

        Raises:
            UsageError: there is no budget.
        """
        if self.budget is None:
            raise UsageError("budget_share: these thresholds were not found for an overall budget")
        return math.fsum(weight * shares[path] for path, weight in self.budget.weights.items() if weight)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for every module: its threshold, and the share of zeros that it reaches, None if unknown.

        With a budget, `weight` is the share of all that can be saved there.
        """
        weights = None if self.budget is None else self.budget.weights
        return [
            {"module": path, "threshold": float(value), "zeros": self.reached.get(path)}
            | ({} if weights is None else {"weight": weights[path]})
            for path, value in self.thresholds.items()
        ]

    def _headline(self) -> str:
        masked, passes = f"{self.side}s of {plural(len(self), 'module')}", plural(self.rounds, "pass", "es")
        if self.budget is not None:
            by = {"macs": "MACs", "values": "values"}[self.budget.by]
            told = f"{share(self.overall)} of zeros overall by {by} (budget {share(self.budget.overall)})"
            return f"{masked}, {told}, {self.budget.compared}; {passes}"
        target = "" if self.target is None else f", target {share(self.target)} of zeros"
        off = f", {len(self.off_target())} off it" if self.off_target() else ""
        return f"{masked}{target}{off}; {passes}"

    def _parts(self) -> Iterator[str | Table]:
        yield f"Activation thresholds: {self._headline()}"
        headings = ("module", "threshold", "zeros", *(() if self.budget is None else (f"of all {self.budget.by}",)))
        cells = [
            (row["module"] or "(root)", digits(row["threshold"]), share(row["zeros"]))
            + ((share(row["weight"]),) if "weight" in row else ())
            for row in self.rows()
        ]
        yield Table(headings, cells)

    def off_target(self, tolerance: float = 0.01) -> dict[str, float]:
        """Return layers that miss the target, with the share that they reach.

        Zeros alone exceed it (then the threshold is 0), many values are equal, or the search ended early.
        """
        target = self.target
        return {path: share for path, share in self.reached.items() if target and abs(share - target) > tolerance}

    def save(self, path: StrPath) -> None:
        """Write the thresholds as JSON."""
        budget = {} if self.budget is None else {"budget": asdict(self.budget)}
        known = {name: value for name, value in vars(self).items() if name != "budget"}
        write_json(Path(path), {**known, "thresholds": dict(self.thresholds), "reached": dict(self.reached), **budget})

    @classmethod
    def load(cls, path: StrPath) -> Self:
        """Read what `save` wrote.

        Raises:
            ArtifactError: the file is missing, damaged, or something else.
        """
        found = as_record(cls, read_json(Path(path)), str(path))
        if (budget := found.budget) is not None:
            if not budget.weights.keys() == found.thresholds.keys() == found.reached.keys():
                raise ArtifactError(f"{path}.budget.weights: expected one for each threshold; the file is damaged")
            if budget.errors.keys() != {"spread", "uniform"}:
                raise ArtifactError(f"{path}.budget.errors: expected spread and uniform; the file is damaged")
        return found


def chosen_paths(model: nn.Module, settings: ActivationSettings) -> list[str]:
    """Return the paths of the modules that the settings select."""
    if sum(value is not None for value in (settings.threshold, settings.target, settings.overall)) != 1:
        raise UsageError("activations: expected exactly one of 'threshold', 'target' and 'overall'")
    return paths_matching(model, settings.modules, "activations.modules")


@public_call
def calibrate_thresholds(
    model: nn.Module,
    batches: Any,
    modules: Iterable[str],
    *,
    target: float | None = None,
    overall: float | None = None,
    by: SavedBy = "macs",
    side: Side = "output",
    device: torch.device | str | None = None,
    task: Task | str | None = None,
    progress: bool | None = None,
) -> ActivationThresholds:
    """Find the threshold of each layer below which a share of its activations lies, with all masks active.

    A mask changes the activations of later layers, so the search takes several passes over the data: each under the
    thresholds found before, until every layer is within 0.1 points of its share. Where zeros alone, as behind a ReLU,
    exceed it, the threshold is 0 and `reached` gives their share.

    With `target` the share is the same for every layer. With `overall` it is the mean over all layers, weighted by what
    their zeros save, and spread so that the model's output changes least: its error is measured with each mask alone at
    7 shares of zeros, on at most 256 samples, and the cheapest steps are taken first, by error per saving (greedily as
    in TEAL, Liu et al. 2024, "Training-Free Activation Sparsity in Large Language Models"). Every fourth sample is held
    out: if one share for all layers does better there, it is used; see `ActivationThresholds.budget`.

    Args:
        model: run in eval mode, without gradients; moved to `device` where one is given.
        batches: as `prunekit.calibrate` takes them; read several times. Labels are not used.
        modules: globs over module paths.
        target: share of zeros behind each mask, above 0 and below 1; either this or `overall` is given.
        overall: share of zeros behind all masks together, above 0 and below 1.
        by: what zeros save, of an overall share: `macs` of the convolutions, linear layers and matrix products that
            read the masked values (values that none reads are not masked), or `values`.
        side: which activations of the modules.
        device: where it runs; None: where the model's parameters are.
        task: splits batches that come in another form; a task or its name.
        progress: whether to show bars on stderr; None: on a terminal and in a notebook.

    Raises:
        UsageError: not exactly one share is given, it is out of range, a glob matches nothing, `batches` can be read
            only once, or zeros save no MACs.
        DataError: there are no batches, one has an unknown form, or there are too few or equal samples to spread by.
        ModelError: a module does not run, has no floating-point activation, or the output's shape depends on masks.
        NonFiniteError: an activation is NaN or Inf, and the message names layer, batch and channel; or the output is.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> data = torch.randn(512, 4)
        >>> thresholds = pk.calibrate_thresholds(model, data, ["1"], target=0.7)
        >>> with pk.ActivationMasks(model, thresholds) as masks:
        ...     outputs = model(data)
        >>> round(masks.sparsity().overall, 1)  # zeros among what the last layer reads
        0.7
        >>> spread = pk.calibrate_thresholds(model, data, ["0", "2"], overall=0.6, side="input")
        >>> round(spread.overall, 2)  # of the MACs of both layers
        0.6
    """
    if (target is None) == (overall is None):
        got = "neither" if target is None else "both"
        raise UsageError(f"calibrate_thresholds: expected exactly one of target and overall, got {got}")
    for name, value in (("target", target), ("overall", overall)):
        if value is not None and not 0 < value < 1:
            raise UsageError(f"{name}: expected a share of zeros above 0 and below 1, got {value!r}")
    one_of(by, get_args(SavedBy), "by")
    model = unwrapped(model, offloaded=True)
    paths = paths_matching(model, modules, "modules")
    if isinstance(batches, Iterator):
        raise UsageError("batches: the search reads them several times; expected a list or a loader, got an iterator")
    pairs = ModelBatches(model, batches, task, "threshold search")
    place = device_of(model, device)
    if device is not None:
        model.to(place)
    masked = MaskedActivations(model, tuple(paths), side, pairs, place)
    with reporting(progress, "calibrate_thresholds"):
        if overall is None:
            found = search_thresholds(masked, lambda _: dict.fromkeys(paths, float(target or 0)))
            return ActivationThresholds(found.thresholds, found.reached, target, side, found.rounds)
        spread = next(spread_budgets(masked, [overall], by))
    found = spread.found[better_way(spread.errors)]
    budget = ActivationBudget(overall, by, spread.weights, found.shares, spread.errors)
    return ActivationThresholds(found.thresholds, found.reached, None, side, found.rounds, budget)
