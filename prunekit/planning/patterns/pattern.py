"""Patterns of zeros in the weight of a layer: which weights are zero together, and the masks that scores make.

A weight is seen as (outputs, inputs, taps): the inputs of a convolution's group, and the positions of its kernel; a
linear layer has one tap.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prunekit.settings.pattern import KERNEL, PatternSettings


@dataclass(frozen=True)
class Pattern:
    """A pattern: the weights of a layer that are zero together.

    Attributes:
        name: as settings have it.
        outputs, inputs: of a block; 1 and 1 where weights are zero one by one.
        whole_kernels: whether all taps of a kernel go together.
        kept_of: (N, M): of each M neighbors along the inputs, N are kept; None for other patterns.

    Example:
        >>> import torch
        >>> pattern = Pattern("2:4", kept_of=(2, 4))
        >>> pattern.mask(torch.tensor([[[4.0], [1.0], [3.0], [2.0]]]), 0.5).flatten().tolist()
        [True, False, True, False]
    """

    name: str
    outputs: int = 1
    inputs: int = 1
    whole_kernels: bool = False
    kept_of: tuple[int, int] | None = None

    @classmethod
    def of(cls, settings: PatternSettings) -> Pattern:
        """Return the pattern that settings name."""
        outputs, inputs = settings.block or (1, 1)
        return cls(settings.in_words, outputs, inputs, settings.kind == KERNEL, settings.kept_of)

    @property
    def along_inputs(self) -> int:
        """How many neighbors along the inputs belong together."""
        return self.inputs if self.kept_of is None else self.kept_of[1]

    def problem(self, shape: tuple[int, int, int]) -> str | None:
        """Return why a weight (outputs, inputs, taps) cannot have the pattern; None if it can."""
        outputs, inputs, _ = shape
        wrong = [
            f"{size} {what}, no multiple of {unit}"
            for what, size, unit in (("outputs", outputs, self.outputs), ("inputs", inputs, self.along_inputs))
            if size % unit
        ]
        return " and ".join(wrong) or None

    def units(self, values: Tensor) -> Tensor:
        """Return the sums of values (o, i, t) over the weights that go together, (o', i', t')."""
        outputs, inputs, _ = values.shape
        parts = values.view(outputs // self.outputs, self.outputs, inputs // self.inputs, self.inputs, -1).sum((1, 3))
        return parts.sum(2, keepdim=True) if self.whole_kernels else parts

    def spread(self, units: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """Return what units (o', i', t') say of each weight, (o, i, t)."""
        wide = units.repeat_interleave(self.outputs, 0).repeat_interleave(self.inputs, 1)
        return wide.expand(shape)

    def mask(self, scores: Tensor, zeros: float) -> Tensor:
        """Return a mask (o, i, t), False for a share of zeros: the units with the least sum of scores.

        N:M has its own share, in each group. Of equal scores, the first are zero.

        Args:
            scores: (o, i, t) of the weights; finite.
        """
        if self.kept_of is not None:
            return self._best_of_each_group(scores)
        outputs, inputs, taps = scores.shape
        return self.spread(highest(self.units(scores), zeros), (outputs, inputs, taps))

    def _best_of_each_group(self, scores: Tensor) -> Tensor:
        assert self.kept_of is not None
        kept, of = self.kept_of
        outputs, inputs, taps = scores.shape
        groups = scores.view(outputs, inputs // of, of, taps)
        least = groups.argsort(dim=2, stable=True)[:, :, : of - kept]
        return torch.ones_like(groups, dtype=torch.bool).scatter_(2, least, False).view(scores.shape)

    def holds(self, mask: Tensor) -> bool:
        """Return whether a mask (o, i, t) has the pattern."""
        if self.kept_of is not None:
            kept, of = self.kept_of
            counts = mask.view(mask.shape[0], mask.shape[1] // of, of, -1).sum(2)
            return bool((counts <= kept).all())
        units = self.units(mask.double())
        return bool(((units == 0) | (units == units.max())).all()) if mask.any() else True


def highest(scores: Tensor, zeros: float) -> Tensor:
    """Return bool in the shape of scores, False for a share of the entries: the lowest, of equal ones the first."""
    keep = torch.ones(scores.numel(), dtype=torch.bool, device=scores.device)
    keep[scores.flatten().argsort(stable=True)[: round(zeros * scores.numel())]] = False
    return keep.view(scores.shape)
