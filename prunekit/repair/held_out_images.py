"""Calibration images: batches to fit on and held-out ones to judge by, and how far outputs differ on the latter."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.errors import DataError, UsageError
from prunekit.settings.calibration import FEWEST_IMAGES
from prunekit.statistics.output_error import FLAT, OutputComparison, RelativeError
from prunekit.utils.context import same_draws
from prunekit.utils.inputs import FLATTENED, Counted, described, sample_count, sample_noun, select_samples, split
from prunekit.utils.tensors import gather, has_sample_lists, holds_samples, is_finite, map_tensors

OUTPUTS = 2**23
"""Values of each model's outputs that are compared at a time: those of a vocabulary's size fill the memory soon."""
Inputs = tuple[Any, ...]
"""Arguments of a model, see `prunekit.utils.inputs.as_example`, with samples along the first axis of every tensor."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Some of the calibration images."""

    number: int  # of the batch
    inputs: Inputs  # of the model
    share: float  # of the sampled rows
    # positions of the samples that are not padding, see `counted_positions`; None: all are
    counted: Counted | None = None


def require_images(images: Tensor | Inputs) -> Inputs:
    """Check calibration images, and return them as an example."""
    inputs = images if isinstance(images, tuple) else (images,)
    positional, named = split(inputs)
    values, samples = (*positional, *named.values()), sample_count(inputs)
    for value in values:
        if not isinstance(value, Tensor) and not holds_samples(value, samples):
            raise DataError(
                "calibration: expected samples as one tensor (B, ...), a list of images (C, H, W), or a tuple of such; "
                f"got {type(value).__name__}"
                + ('; a datasets.Dataset gives tensors after .with_format("torch")' if isinstance(value, list) else "")
            )
    texts = (tuple(value.shape) if isinstance(value, Tensor) else f"a list of {len(value)}" for value in values)
    shapes = ", ".join(map(str, texts))
    few = any((isinstance(value, Tensor) and not value.dim()) or len(value) < FEWEST_IMAGES for value in values)
    if few or (len(values) == 1 and isinstance(values[0], Tensor) and values[0].dim() < 2):  # as a sample alone has
        raise DataError(
            f"calibration: expected at least {FEWEST_IMAGES} {sample_noun(inputs)} (B, ...), some of which only judge; "
            f"got {shapes if has_sample_lists(inputs) else f'a tensor of shape {shapes}'}; "
            "to prune without samples, an example is given by itself, prune(model, x, macs=0.5)"
        )
    if len({len(value) for value in values}) > 1:
        shown = described(inputs[0] if len(inputs) == 1 else inputs)
        raise DataError(f"calibration: expected as many samples of each input, got {shown}; {FLATTENED}")
    for value in values:
        if (first := _first_not_finite(value)) is not None:
            raise DataError(f"calibration: sample {first} holds NaN or Inf; expected finite numbers")
    return inputs


def _first_not_finite(value: Any) -> int | None:
    """Return the index of the first sample with NaN or Inf in it; None if there is none."""
    if not isinstance(value, Tensor):
        return next((i for i, one in enumerate(value) if not all(map(is_finite, gather(one)))), None)
    wrong = (~torch.isfinite(value)).reshape(len(value), -1).any(1)
    return int(wrong.nonzero()[0]) if bool(wrong.any()) else None


def batches_of(
    inputs: Inputs, held_out: float, size: int, counted: Counted | None = None, least: int = 1
) -> tuple[list[Batch], int]:
    """Return batches to fit on, then those of held-out images, `least` of each at least, and how many are to fit on."""
    total = sample_count(inputs)
    split = total - max(1, round(total * held_out))
    parts = [(0, split, 1.0), (split, total, max(held_out, 1 - split / total))]  # all rows, where all are wanted
    bounds = [
        (start, min(start + each, last), share / (last - first))
        for first, last, share in parts
        for each in (min(size, -(-(last - first) // least)),)
        for start in range(first, last, each)
    ]
    found = [
        Batch(i, select_samples(inputs, slice(a, b)), each * (b - a), None if counted is None else counted[a:b])
        for i, (a, b, each) in enumerate(bounds)
    ]
    return found, sum(a < split for a, _, _ in bounds)


def difference(
    dense: nn.Module,
    model: nn.Module,
    batches: Iterable[Batch],
    judge: OutputComparison,
    running: Iterable[Batch] | None = None,
) -> float:
    """Return the mean squared difference of outputs as a share of their variance among samples, averaged over outputs.

    Where positions may be padding, as for the scores of each token, those that are not are the samples. `running` are
    batches that the other model reads in place of the dense one's.
    """
    spread, batches = RelativeError(), [*batches]
    parts = ([part for whole in some for part in _parts(whole, judge.each)] for some in (batches, running or batches))
    for batch, own in zip(*parts, strict=True):
        want, got = _values(dense, batch, judge), _values(model, own, judge)
        other_way = {key for key in judge.weights if _shapes(want, key) != _shapes(got, key)}
        if len(other_way) < len(judge.outputs) + len(judge.weights):  # a layer that is called differently under masks
            want, got = ([pair for pair in values if pair[0] not in other_way] for values in (want, got))
        shapes = [[tuple(value.shape) for _, value in values] for values in (want, got)]
        if shapes[0] != shapes[1]:
            first = next((pair for pair in zip(*shapes, strict=False) if pair[0] != pair[1]), (len(want), len(got)))
            raise UsageError(
                f"repair: expected outputs of one shape, got {first[0]} from the dense model and {first[1]} from the "
                "pruned one: their differences cannot be measured"
            )
        for (key, value), (_, other) in zip(want, got, strict=True):
            spread.add(key, value, other)
    shares = list(spread.shared().shares(FLAT))
    if not shares:
        count, name = sum(sample_count(batch.inputs) for batch in batches), type(dense).__name__
        raise DataError(
            f"calibration: the {name} returns the same for all {count} samples that judge the repair, though they "
            "differ: it may be hardly trained, or saturated. Train it first, or prune it by an example alone"
            if _differ(batches)
            else f"calibration: the dense model's output is the same for all {count} images that judge the repair; "
            "expected images that differ, preprocessed as the model wants them"
        )
    return mean(shares)


def _parts(batch: Batch, each: int) -> Iterator[Batch]:
    """Yield a batch in parts whose outputs, of `each` values a sample, are about `OUTPUTS` values at most."""
    size = max(1, OUTPUTS // max(1, each))
    for start in range(0, sample_count(batch.inputs), size):
        some = slice(start, start + size)
        counted = None if batch.counted is None else batch.counted[some]
        yield replace(batch, inputs=select_samples(batch.inputs, some), counted=counted)


def _differ(batches: Iterable[Batch]) -> bool:
    """Return whether the samples of batches differ at all."""
    first, *others = [row for batch in batches for row in zip(*gather(batch.inputs), strict=False)] or [()]
    return any(not torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def _values(model: nn.Module, batch: Batch, judge: OutputComparison) -> list[tuple[int | str, Tensor]]:
    with torch.no_grad(), same_draws(model):
        found = judge.values(model, map_tensors(batch.inputs, torch.clone), batch.counted)
    if not found:
        raise UsageError("repair: the model's output holds no tensor of floating-point numbers to compare")
    return found


def _shapes(values: list[tuple[int | str, Tensor]], key: int | str) -> list[torch.Size]:
    return [value.shape for each, value in values if each == key]
