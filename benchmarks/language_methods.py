"""Methods that prune language models to a number of parameters without training: prunekit's, and simple baselines.

The baselines remove neurons of MLPs and heads, or key-value groups with their query heads, of attentions; each of
these keeps one unit at least. They return compact models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from language_models import Batch, Part, Subject, parameters
from torch import Tensor, nn
from torch.nn import functional as F

import prunekit
from prunekit.errors import PlanError

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Of the least squares, in means of the diagonal: what is best on one of `FOLDS` of the calibration is taken."""
FOLDS = 4
Kept = dict[str, Tensor]
"""Units that are kept, ascending, by the path of their reader."""


@dataclass(frozen=True, eq=False)
class Case:
    """What every method is given: a dense model, which is not changed, and the share of its parameters to leave."""

    subject: Subject
    share: float

    @property
    def limit(self) -> int:
        """Parameters that the whole model may have."""
        subject = self.subject
        return parameters(subject.model) - math.ceil((1 - self.share) * subject.counted)


Method = Callable[[Case], nn.Module]


def methods(name: str) -> dict[str, Method]:
    """Return all methods for a model, by name."""
    every: dict[str, Method] = {
        "dense": lambda case: case.subject.model,
        "prunekit": ours,
        "prunekit-unrepaired": partial(ours, repair=False),
        "magnitude": magnitude,
        "wanda-sp": wanda,
        "wanda-sp+ls": refitted,
        "wanda-sp-mlp+ls": partial(refitted, kinds=("mlp",)),
        "flap-ul-um": partial(flap, adaptive=False),
        "flap-al-am": partial(flap, adaptive=True),
    }
    return every | {"block-influence": block_influence} if name == "smollm2" else every


def ours(case: Case, repair: Literal[False] | None = None) -> nn.Module:
    """Prune as prunekit does by default: order and budget by what each layer reads, then repair."""
    subject = case.subject
    share = case.limit / parameters(subject.model)
    settings: dict[str, Any] = {"outputs": subject.outputs, "repair": repair, "progress": False}
    return prunekit.prune(subject.model, calibration=subject.calibration, params=share, **settings).model


def magnitude(case: Case) -> nn.Module:
    """Remove the units with the least L2 norm of all their weights, the same share in each layer."""
    model = case.subject.model
    scores = {}
    for part in case.subject.parts:
        squares = _linear(model, part.reader).weight.square().sum(0).view(part.units, -1).sum(1)
        for path, rows in part.writers.items():
            squares = squares + _linear(model, path).weight.square().view(part.units, -1).sum(1)
            assert len(_linear(model, path).weight) == rows * part.units
        scores[part.reader] = squares
    return compacted(case, best(scores, uniform_counts(case)))


@dataclass(eq=False)
class Inputs:
    """Sums in float64 over the calibration's tokens of what a linear layer reads."""

    count: int
    total: Tensor  # (inputs,)
    squares: Tensor  # (inputs,)
    gram: Tensor | None  # (inputs, inputs)

    @property
    def mean(self) -> Tensor:
        """(inputs,)."""
        return self.total / self.count

    def __add__(self, other: Inputs) -> Inputs:
        gram = None if self.gram is None or other.gram is None else self.gram + other.gram
        return Inputs(self.count + other.count, self.total + other.total, self.squares + other.squares, gram)

    def moments(self, *, centered: bool) -> Tensor:
        """Return the (inputs, inputs) mean of the products of all pairs."""
        assert self.gram is not None
        found = self.gram / self.count
        return found - torch.outer(self.mean, self.mean) if centered else found

    @property
    def variance(self) -> Tensor:
        """(inputs,)."""
        return (self.squares / self.count - self.mean.square()).clamp(min=0)


@torch.no_grad()
def inputs_of_readers(
    subject: Subject, batches: Sequence[Batch] | None = None, *, gram: bool = False
) -> dict[str, Inputs]:
    """Collect what each reader of the dense model reads, without padding, on some batches or all of the calibration."""
    found, mask = dict[str, Inputs](), torch.empty(0)

    def hook(path: str) -> Any:
        def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0][mask].double()  # (tokens, inputs)
            size = x.shape[1]
            if path not in found:
                zeros = x.new_zeros(size, size) if gram else None
                found[path] = Inputs(0, x.new_zeros(size), x.new_zeros(size), zeros)
            sums = found[path]
            sums.count += len(x)
            sums.total += x.sum(0)
            sums.squares += x.square().sum(0)
            if sums.gram is not None:
                sums.gram.addmm_(x.T, x)

        return see

    readers = [part.reader for part in subject.parts]
    handles = [subject.model.get_submodule(path).register_forward_pre_hook(hook(path)) for path in readers]
    try:
        for batch in subject.calibration if batches is None else batches:
            mask = batch["attention_mask"].bool()
            subject.model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def wanda_scores(subject: Subject, inputs: dict[str, Inputs]) -> Kept:
    """Score each unit by the sum of |weight| times the norm of the input over its columns."""
    scores = {}
    for part in subject.parts:
        columns = _linear(subject.model, part.reader).weight.abs().sum(0) * inputs[part.reader].squares.sqrt()
        scores[part.reader] = columns.view(part.units, -1).sum(1)
    return scores


def wanda(case: Case) -> nn.Module:
    """Prune by Wanda (Sun et al. 2023), the same share of the units in each layer: Wanda-sp of An et al. 2024."""
    scores = wanda_scores(case.subject, inputs_of_readers(case.subject))
    return compacted(case, best(scores, uniform_counts(case)))


def refitted(case: Case, kinds: Sequence[str] = ("attention", "mlp")) -> nn.Module:
    """Keep the units of `wanda`, and fit each reader once by least squares to its outputs in the dense model.

    Args:
        case: what is pruned.
        kinds: of parts that units go from.
    """
    subject = case.subject
    fitted, judged = (inputs_of_readers(subject, some, gram=True) for some in folds(subject.calibration))
    every = {path: fitted[path] + judged[path] for path in fitted}
    kept = best(wanda_scores(subject, every), uniform_counts(case, kinds))
    model = compacted(case, kept)
    for part in subject.parts:
        Lost.of(subject.model, part, kept[part.reader]).refit(model, fitted[part.reader], judged[part.reader])
    return model


def folds(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Return the batches without each fourth sample, and these samples."""
    found: tuple[list[Batch], list[Batch]] = ([], [])
    for batch in batches:
        last = torch.arange(len(batch["input_ids"])) % FOLDS == FOLDS - 1
        for place, rows in zip(found, (~last, last), strict=True):
            if rows.any():
                place.append({name: values[rows] for name, values in batch.items()})
    return found


@dataclass(frozen=True, eq=False)
class Lost:
    """A reader's columns that go, and what makes up for them in those that stay."""

    path: str
    stay: Tensor
    gone: Tensor
    weight: Tensor  # (outputs, gone), float64
    centered: bool

    @classmethod
    def of(cls, dense: nn.Module, part: Part, kept: Tensor) -> Lost:
        """The columns without some units of the dense model; with a bias, inputs are centered."""
        stay, gone = columns_of(part, kept)
        reader = _linear(dense, part.reader)
        return cls(part.reader, stay, gone, reader.weight.detach().double()[:, gone], reader.bias is not None)

    def change(self, inputs: Inputs, ridge: float) -> Tensor:
        """Return what is added to the columns that stay: (outputs, stay)."""
        moments = inputs.moments(centered=self.centered)
        square = moments[self.stay][:, self.stay]
        square.diagonal().add_(ridge * square.diagonal().mean())
        return torch.linalg.solve(square, moments[self.stay][:, self.gone] @ self.weight.T).T

    def error(self, change: Tensor, inputs: Inputs) -> float:
        """Return the mean squared error of the outputs."""
        whole = change.new_zeros(len(change), len(self.stay) + len(self.gone))
        whole[:, self.stay], whole[:, self.gone] = change, -self.weight
        return float((whole @ inputs.moments(centered=self.centered) * whole).sum())

    @torch.no_grad()
    def refit(self, model: nn.Module, fitted: Inputs, judged: Inputs) -> None:
        """Add what makes up best to a reader, by the ridge that is best on inputs that it was not fitted to."""
        ridge = min(RIDGES, key=lambda one: self.error(self.change(fitted, one), judged))
        every, reader = fitted + judged, _linear(model, self.path)
        change = self.change(every, ridge)
        reader.weight += change.to(reader.weight.dtype)
        if self.centered:
            assert reader.bias is not None
            reader.bias += (self.weight @ every.mean[self.gone] - change @ every.mean[self.stay]).to(reader.bias.dtype)


def flap(case: Case, *, adaptive: bool) -> nn.Module:
    """Prune by FLAP (An et al. 2024): what varies least on the calibration's tokens goes, biases make up for its mean.

    Args:
        case: what is pruned.
        adaptive: standardized scores are ranked over all layers (AL-AM), else each layer loses the same share (UL-UM).
    """
    subject = case.subject
    inputs, scores = inputs_of_readers(subject), Kept()
    for part in subject.parts:
        weight = _linear(subject.model, part.reader).weight
        columns = inputs[part.reader].variance * weight.square().sum(0)
        if adaptive:
            columns = (columns - columns.mean()) / columns.std()
        scores[part.reader] = columns.view(part.units, -1).mean(1)
    linears = {part.reader: _linear(subject.model, part.reader) for part in subject.parts}
    added = sum(linear.out_features for linear in linears.values() if linear.bias is None)
    kept = best_of_all(case, scores, added) if adaptive else best(scores, uniform_counts(case, added=added))
    model = compacted(case, kept)
    for part in subject.parts:
        _, gone = columns_of(part, kept[part.reader])
        whole, reader = linears[part.reader], _linear(model, part.reader)
        mean = (whole.weight.double()[:, gone] @ inputs[part.reader].mean[gone]).detach()
        before = torch.zeros_like(mean) if whole.bias is None else whole.bias.detach()
        reader.bias = nn.Parameter((before + mean).to(whole.weight.dtype))
    return model


@torch.no_grad()
def block_influence(case: Case) -> nn.Module:
    """Remove whole layers, those first that turn their input least (ShortGPT, Men et al. 2024)."""
    subject = case.subject
    model = deepcopy(subject.model)
    layers: Any = model.get_submodule(subject.layers)
    turned, mask = [0.0] * len(layers), torch.empty(0)

    def hook(index: int) -> Any:
        def see(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
            after = output if isinstance(output, Tensor) else output[0]
            turned[index] += float((1 - F.cosine_similarity(args[0][mask], after[mask], dim=-1)).sum())

        return see

    handles = [layer.register_forward_hook(hook(index)) for index, layer in enumerate(layers)]
    for batch in subject.calibration:
        mask = batch["attention_mask"].bool()
        model(**batch)
    for handle in handles:
        handle.remove()
    order = sorted(range(len(layers)), key=lambda index: turned[index])
    gone, left = set[int](), parameters(model)
    while left > case.limit:
        if len(gone) == len(order) - 1:
            raise PlanError(f"{case.limit} parameters are fewer than are left with one layer")
        left -= parameters(layers[order[len(gone)]])
        gone.add(order[len(gone)])
    path, _, name = subject.layers.rpartition(".")
    staying = nn.ModuleList(layer for index, layer in enumerate(layers) if index not in gone)
    setattr(model.get_submodule(path), name, staying)
    model.config.num_hidden_layers = len(staying)
    return model


def cost(model: nn.Module, part: Part) -> int:
    """Count the parameters of a unit."""
    found = part.width * _linear(model, part.reader).out_features
    for path, rows in part.writers.items():
        linear = _linear(model, path)
        found += rows * (linear.in_features + (linear.bias is not None))
    return found


def uniform_counts(case: Case, kinds: Sequence[str] = ("attention", "mlp"), added: int = 0) -> dict[str, int]:
    """Say how many units of each part stay: the same share of all, heads rounded, as many neurons as the limit allows.

    Args:
        case: what is pruned.
        kinds: of parts that units go from.
        added: parameters that the method adds.

    Raises:
        PlanError: no neurons are left.
    """
    model, parts = case.subject.model, [part for part in case.subject.parts if part.kind in kinds]
    goes = parameters(model) + added - case.limit
    ratio = 1 - goes / sum(part.units * cost(model, part) for part in parts)
    counts = {part.reader: part.units for part in case.subject.parts}
    for part in parts:
        if part.kind == "attention":
            counts[part.reader] = max(1, round(ratio * part.units))
            goes -= (part.units - counts[part.reader]) * cost(model, part)
    mlps = [part for part in parts if part.kind == "mlp"]
    neurons = sum(part.units for part in mlps) - max(0, math.ceil(goes / cost(model, mlps[0])))
    if neurons < len(mlps):
        raise PlanError(f"{case.limit} parameters are fewer than are left without neurons")
    each, more = divmod(neurons, len(mlps))
    return counts | {part.reader: each + (index < more) for index, part in enumerate(mlps)}


def best(scores: Kept, counts: dict[str, int]) -> Kept:
    """Choose the units of the highest scores of each part."""
    return {path: values.topk(counts[path]).indices.sort().values for path, values in scores.items()}


def best_of_all(case: Case, scores: Kept, added: int) -> Kept:
    """Choose the best unit of each part, then those of the highest scores over all parts while the limit allows."""
    model, parts = case.subject.model, case.subject.parts
    costs = torch.cat([torch.full((part.units,), cost(model, part)) for part in parts])
    firsts = {part.reader: scores[part.reader].clone() for part in parts}
    for values in firsts.values():
        values[values.argmax()] = math.inf
    room = case.limit - (parameters(model) + added - int(costs.sum()))
    fits = torch.zeros(len(costs), dtype=torch.bool)
    for index in torch.cat([firsts[part.reader] for part in parts]).argsort(descending=True).tolist():
        if costs[index] <= room:
            fits[index] = True
            room -= int(costs[index])
    pieces = fits.split([part.units for part in parts])
    return {part.reader: piece.nonzero()[:, 0] for part, piece in zip(parts, pieces, strict=True)}


def columns_of(part: Part, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the reader's columns that stay, and those that go."""
    stays = torch.zeros(part.units, part.width, dtype=torch.bool)
    stays[kept] = True
    return stays.flatten().nonzero()[:, 0], (~stays).flatten().nonzero()[:, 0]


def compacted(case: Case, kept: Kept) -> nn.Module:
    """Return a copy of the model that has the kept units alone."""
    model = deepcopy(case.subject.model)
    for part in case.subject.parts:
        units = kept[part.reader]
        reader = _linear(model, part.reader)
        reader.weight = nn.Parameter(reader.weight.detach()[:, columns_of(part, units)[0]])
        reader.in_features = reader.weight.shape[1]
        for path, rows in part.writers.items():
            linear = _linear(model, path)
            index = (units[:, None] * rows + torch.arange(rows)).flatten()
            linear.weight = nn.Parameter(linear.weight.detach()[index])
            linear.out_features = len(index)
            if linear.bias is not None:
                linear.bias = nn.Parameter(linear.bias.detach()[index])
    return model


def _linear(model: nn.Module, path: str) -> nn.Linear:
    found = model.get_submodule(path)
    assert isinstance(found, nn.Linear)
    return found
