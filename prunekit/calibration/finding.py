"""Finds a model's linear layers, and what becomes of their outputs: a norm, a sum with a shortcut, a rectifier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from prunekit.calibration.layers import Call, CallWatch, Layer
from prunekit.calibration.patches import reading
from prunekit.nested import gather

_SUMS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})


class _Mark(NamedTuple):
    """On a tensor: which call made its values, and the end of which layer's chain they are."""

    call: int
    version: int
    layer: int | None
    stage: str


@dataclass
class _Draft:
    layer: Layer
    stages: list[str] = field(default_factory=lambda: ["layer"])
    reads: Counter[str] = field(default_factory=Counter)
    rectified: str = ""
    normed: int = 0

    def finished(self, calls: int) -> Layer:
        """The layer, with as much of the chain behind it as nothing else reads from."""
        layer = replace(self.layer, calls=calls, rectified=self._alone(self.rectified) and self._ends(self.rectified))
        if not self._alone("layer"):
            return replace(layer, end=layer.call, norm=None, total=None, other=None, rectified=False)
        if "norm" in self.stages and not self._alone("norm"):
            return replace(layer, end=self.normed, total=None, other=None, rectified=False)
        return layer

    def _alone(self, stage: str) -> bool:
        return self.reads[stage] == 1

    def _ends(self, stage: str) -> bool:
        return stage == self.stages[-1]


class _Finder(CallWatch):
    """Finds the layers of a forward pass."""

    def __init__(self, model: nn.Module, norms: Iterable[str]) -> None:
        super().__init__(model, norms)
        self.drafts: list[_Draft] = []

    def call(self, call: Call) -> Any:
        inputs = gather((call.args, dict(call.named)))
        marks = [_mark(tensor) for tensor in inputs]
        result = call.run()
        if any(result is tensor and _mark(tensor) is not None for tensor in inputs):
            return result  # dropout in eval mode hands on what it was given
        for mark in marks:
            if mark is not None and mark.layer is not None:
                self.drafts[mark.layer].reads[mark.stage] += 1
        if isinstance(result, Tensor):
            layer, stage = self._role(call, marks)
            result._prunekit_mark = _Mark(call.number, result._version, layer, stage)  # type: ignore[attr-defined]
        return result

    def _role(self, call: Call, marks: list[_Mark | None]) -> tuple[int | None, str]:
        weight = self.layer_weight(call)
        if weight is not None:
            return self._layer(call, weight)
        mark = marks[0] if marks else None
        draft = self.drafts[mark.layer] if mark is not None and mark.layer is not None else None
        if call.name == "batch_norm" and mark is not None and draft is not None and mark.stage == "layer":
            return self._norm(call, mark, draft)
        if call.name in _SUMS:
            return self._sum(call, marks)
        if call.name in {"relu", "relu_"} and mark is not None and draft is not None:
            draft.rectified = mark.stage
        return None, ""

    def _layer(self, call: Call, weight: str) -> tuple[int | None, str]:
        how = reading(call.name, call.args, call.named)
        if how is None:
            return None, ""
        bias = call.args[2] if len(call.args) > 2 else call.named.get("bias")
        self.drafts.append(_Draft(Layer(weight, self.names.get(id(bias)), call.number, how, call.number)))
        return len(self.drafts) - 1, "layer"

    def _norm(self, call: Call, mark: _Mark, draft: _Draft) -> tuple[int | None, str]:
        running = self.names.get(id(call.args[1]))
        training = call.args[5] if len(call.args) > 5 else call.named.get("training", False)
        if running is None or training:
            return None, ""
        draft.layer = replace(draft.layer, norm=running.rpartition(".")[0], end=call.number)
        draft.normed = call.number
        draft.stages.append("norm")
        return mark.layer, "norm"

    def _sum(self, call: Call, marks: list[_Mark | None]) -> tuple[int | None, str]:
        summands = [argument for argument in call.args if isinstance(argument, Tensor)]
        if len(summands) != 2 or summands[0].shape != summands[1].shape or len(marks) != 2 or call.named:
            return None, ""
        ends = [(m.layer, i) for i, m in enumerate(marks) if m and m.layer is not None and m.stage in ("layer", "norm")]
        if not ends:
            return None, ""
        layer, position = max(ends)
        other = marks[1 - position]
        draft = self.drafts[layer]
        if other is None:
            return None, ""
        draft.layer = replace(draft.layer, total=call.number, other=other.call, end=call.number)
        draft.stages.append("sum")
        return layer, "sum"


def _mark(tensor: Tensor) -> _Mark | None:
    mark: _Mark | None = getattr(tensor, "_prunekit_mark", None)
    return mark if mark is not None and mark.version == tensor._version else None


def find_layers(model: nn.Module, inputs: Tensor | tuple[Tensor, ...], norms: Iterable[str] = ()) -> tuple[Layer, ...]:
    """The convolutions and linear layers that a model in eval mode calls, in the order in which it does.

    Args:
        model: runs on `inputs`.
        inputs: a few samples: the first argument, or all positional ones.
        norms: paths of modules whose insides are not looked at: those of a channel map.
    """
    finder = _Finder(model, norms)
    with finder.watching():
        model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    calls = Counter(draft.layer.weight for draft in finder.drafts)
    return tuple(draft.finished(calls[draft.layer.weight]) for draft in finder.drafts)
