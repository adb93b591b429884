"""What tells how far a model is from the dense one: its outputs, or what they are made of before values select."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from prunekit.calibration.finding import Finder
from prunekit.calibration.layers import Call, CallWatch
from prunekit.channels.storages import plain_in
from prunekit.inputs import call, count_of, rows_of, taken

FEW = 2
"""Samples, and one more, that show which outputs have samples first."""


@dataclass(frozen=True)
class Judge:
    """What of a model is compared with the dense one.

    All outputs that have samples first count. Of others the layers do that they are made of without another in between;
    and so do those from whose outputs computed values select something, as a detector does the boxes that score best:
    a list of what comes out behind that has no counterpart in the other model.

    Attributes:
        outputs: places among all tensors that the model returns.
        weights: of layers whose outputs are compared, over all of their calls.
    """

    outputs: tuple[int, ...]
    weights: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, inputs: tuple[Any, ...]) -> Judge:
        """What can be compared of a model.

        Args:
            model: the dense one, in eval mode.
            inputs: at least three samples, if there are so many.
        """
        finder = Finder(model, ())
        few, more = (_returned(model, taken(inputs, slice(count)), finder) for count in (FEW, FEW + 1))
        counts = [count_of(taken(inputs, slice(count))) for count in (FEW, FEW + 1)]
        outputs, made = list[int](), set(finder.boundary)
        pairs = zip(few, more, strict=True) if len(few) == len(more) else ((tensor, tensor) for tensor in more)
        for place, (one, other) in enumerate(pairs):
            flow, lengths = finder.flow(other), [len(tensor) if tensor.dim() else 0 for tensor in (one, other)]
            by_sample = other.is_floating_point() and lengths == counts and other is not one
            if by_sample and (not flow.selected or one.shape[1:] == other.shape[1:]):
                if not any(other is more[earlier] for earlier in outputs):
                    outputs.append(place)
            elif not flow.selected:
                made |= flow.origins
        alone = {draft.layer.weight for draft in finder.drafts if draft.layer.selected}
        weights = dict.fromkeys(finder.drafts[i].layer.weight for i in sorted(made))
        return cls(tuple(outputs), tuple(weight for weight in weights if weight not in alone))

    def values(
        self, model: nn.Module, inputs: tuple[Any, ...], counted: Tensor | None = None
    ) -> list[tuple[int | str, Tensor]]:
        """What is compared, samples or positions first, in float64, each with the place or the weight that it is of.

        Args:
            counted: which positions of the samples are no padding, see `counted_positions`; None: all.
        """
        watch = _Outputs(model, frozenset(self.weights), counted)
        with watch.watching():
            tensors = plain_in(call(model, inputs))
        found: list[tuple[int | str, Tensor]] = [
            (place, rows_of(tensors[place], counted).double()) for place in self.outputs
        ]
        return found + watch.found


def _returned(model: nn.Module, inputs: tuple[Any, ...], finder: Finder) -> list[Tensor]:
    with finder.watching():
        return plain_in(call(model, inputs))


class _Outputs(CallWatch):
    """Takes what some layers give."""

    def __init__(self, model: nn.Module, weights: frozenset[str], counted: Tensor | None) -> None:
        super().__init__(model)
        self._counted = counted
        self.found: list[tuple[int | str, Tensor]] = []
        self._weights = weights

    def call(self, call: Call) -> Any:
        operands = self.operands(call)
        result = call.run()
        if operands is not None and operands.weight in self._weights:
            axis = 1 if call.name.startswith("conv") else -1
            values = rows_of(result.movedim(axis, -1), self._counted)
            self.found.append((operands.weight, values.flatten(0, -2).double()))
        return result


class Spread:
    """Sums over batches of how far a model is from the dense one, as a share of what that one varies by."""

    def __init__(self) -> None:
        self._squares: dict[int | str, float] = {}
        self._counts: dict[int | str, int] = {}
        self._sums: dict[int | str, Tensor] = {}
        self._totals: dict[int | str, Tensor] = {}

    def add(self, key: int | str, want: Tensor, got: Tensor) -> None:
        """Adds some samples, (n, ...) each."""
        self._squares[key] = self._squares.get(key, 0.0) + float((got - want).square().sum())
        self._counts[key] = self._counts.get(key, 0) + len(want)
        self._sums[key] = want.sum(0) + self._sums.get(key, 0)
        self._totals[key] = want.square().sum(0) + self._totals.get(key, 0)

    def shares(self, flat: float) -> Iterator[float]:
        """Squared difference over variance of all that varies by more than a share `flat` of its mean square."""
        for key, total in self._totals.items():
            count = self._counts[key]
            around = total if count == 1 else total - self._sums[key].square() / count
            if not float(around.sum()) <= flat * float(total.sum()):  # NaN passes: where from is found out later
                yield self._squares[key] / float(around.sum())
