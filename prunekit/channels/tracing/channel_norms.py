"""Norms over channels, found while a trace runs: their labels pass, because masked runs normalize over kept ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import nn

from prunekit.channels.labels.constraints import LockRecord
from prunekit.channels.labels.label_flow import Field, LabelFlow
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.execution import FIXED_CODE, has_fixed_code
from prunekit.utils.tensors import gather

Axes = tuple[tuple[int, Labels], ...]
SEVERAL = "which of these are taken is computed from all of them, in a module that reads or returns several tensors"


@dataclass(frozen=True, eq=False)
class ChannelNorm:
    """A module that takes statistics over channels: under masks its narrow copy runs on the kept channels."""

    # every labeled axis of its input tensor with the labels (size,) along it; the last axis is -1. Of several inputs,
    # as where a gate multiplies what is normalized, all have these
    inputs: Axes
    outputs: Axes  # the same of its one output tensor

    @property
    def axes(self) -> Axes:
        """Labeled axes of input and output."""
        return self.inputs + self.outputs

    def alike(self, other: ChannelNorm) -> bool:
        """Return whether another call has its labels on the same axes."""
        return [(axis, labels.shape) for axis, labels in self.axes] == [(a, b.shape) for a, b in other.axes]

    def renumbered(self, final: Labels) -> Self:
        """Return the same with a map's labels in place of a trace's, given the map's label of each of these."""
        inputs, outputs = (
            tuple((axis, final[labels]) for axis, labels in side) for side in (self.inputs, self.outputs)
        )
        return replace(self, inputs=inputs, outputs=outputs)

    @property
    def is_free(self) -> bool:
        """Whether a plan may remove any of these channels."""
        return any(np.any(labels) for _, labels in self.axes)


@dataclass(frozen=True, eq=False)
class NarrowBlock(ChannelNorm):
    """A module with interchangeable positions: where some of these, (size,), are removed, it runs narrow like a norm.

    Results after its first have no labels.
    """

    positions: Labels

    def renumbered(self, final: Labels) -> Self:
        """Return the same with a map's labels in place of a trace's."""
        return replace(super().renumbered(final), positions=final[self.positions])

    @property
    def is_free(self) -> bool:
        """Whether a plan may remove any of the positions."""
        return bool(self.positions.any())


N = TypeVar("N", bound=ChannelNorm)


class NormFinder:
    """Decides whether each module that takes statistics over channels is a norm, and locks the channels if not.

    A module is a norm if it can run by itself on the kept channels of its inputs. In every call it has one input, or
    several with the same labels, and one output tensor with labels on single axes. It has no buffers that are saved,
    and the parameters of its children are not of these channels: they work on the statistics, as in spatial attention.
    """

    def __init__(self, flow: LabelFlow) -> None:
        self.flow = flow
        self.norms: dict[str, ChannelNorm] = {}
        self.blocks: dict[str, NarrowBlock] = {}
        self._others: set[str] = set()
        self._zeroed: dict[Field, Field] = {}

    def leave(self, path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Decide on a module whose forward ends, given its arguments and its result."""
        if path in self.flow.interchangeable:
            self._leave_block(path, gather(inputs), gather(output))
        taken, known = self.flow.statistics.pop(path, None), self.norms.get(path)
        if taken is None and known is None:
            self._others.add(path)
            return
        found = "it also runs on other tensors" if path in self._others else norm_of(module, self.flow, inputs, output)
        if isinstance(found, ChannelNorm) and known is not None and not known.alike(found):
            known, found = self._live(known), self._live(found)
            self.norms[path] = known
            found = found if known.alike(found) else "it runs on tensors of several shapes"
        if isinstance(found, str):
            self._refuse(path, found, taken or [])
            return
        if path not in self.norms:
            self.norms[path] = found
            self.flow.lock(_labels_of_children(module, self.flow), "works on statistics over channels")
        self._merge(self.norms[path], found)
        result = gather(output)[0]
        self.flow.set(result, [self._with_zeros(field) for field in self.flow.fields(result)])

    def _live(self, norm: ChannelNorm) -> ChannelNorm:
        """Return a norm without the axes that are locked by now, which need not be the same in each of its calls."""
        inputs, outputs = (
            tuple((axis, labels) for axis, labels in axes if self.flow.union.find(labels).any())
            for axes in (norm.inputs, norm.outputs)
        )
        return ChannelNorm(inputs, outputs)

    def _leave_block(self, path: str, sources: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Take note of the labels around a module with interchangeable positions, or lock these positions."""
        positions = self.flow.interchangeable[path].labels
        before, after = (_axes(self.flow, tensors[0]) if tensors else None for tensors in (sources, results))
        plain = len(sources) == 1 and not any(self.flow.fields(tensor) for tensor in results[1:])
        if before is not None and after is not None and plain:
            block = NarrowBlock(before, after, positions)
            known = self.blocks.setdefault(path, block)
            if known.alike(block):
                self._merge(known, block)
                return
        self._lock(LockRecord(SEVERAL, path, "", positions))

    def _merge(self, one: ChannelNorm, other: ChannelNorm) -> None:
        """Merge the labels of two calls of a module."""
        for (_, labels), (_, others) in zip(one.axes, other.axes, strict=True):
            self.flow.union.merge(labels, others)

    def _lock(self, record: LockRecord) -> None:
        self.flow.locks.append(record)
        self.flow.union.lock(record.labels)

    def abandon(self) -> None:
        """Lock the channels of modules that took statistics and will never end."""
        for path in list(self.flow.statistics):
            self._refuse(path, "its module did not end", self.flow.statistics.pop(path))

    def _refuse(self, path: str, why: str, taken: Iterable[LockRecord]) -> None:
        self._others.add(path)
        for record in taken:
            self._lock(replace(record, reason=f"{record.reason}; {why}", module=path))
        known = self.norms.pop(path, None)
        for _, labels in known.axes if known is not None else ():
            self._lock(LockRecord(f"statistics over these channels; {why}", path, "", labels))

    def _with_zeros(self, field: Field) -> Field:
        """Return the field with exact zeros for removed channels; one object for each, so that runs can repeat."""
        return field if field.zero else self._zeroed.setdefault(field, Field(field.labels, zero=True))


APART = "; in a module of its own, which takes these channels and returns them normalized, they would be free"


def norm_of(module: nn.Module, flow: LabelFlow, inputs: Any, output: Any) -> ChannelNorm | str:
    """Return a call of a module as a norm, or the reason why it is none."""
    name = type(module).__name__
    whole = [(one, one._non_persistent_buffers_set) for one in module.modules()]  # state_dict() would be traced
    if any(found is not None and key not in unsaved for one, unsaved in whole for key, found in one._buffers.items()):
        return f"{name} does more than normalize: it has buffers"
    sources, results = gather(inputs), gather(output)
    if not sources or len(results) != 1:
        return f"{name} takes {len(sources)} tensors and returns {len(results)}, where a norm has one of each{APART}"
    before, *others, after = (_axes(flow, tensor) for tensor in (*sources, *results))
    if any(not _same_axes(flow, before, other) for other in others):
        return f"{name} takes {len(sources)} tensors, which have other channels, where a norm has one{APART}"
    if not before or after is None:
        return f"{name} has no labels, or joint ones over several axes, on its input or its output{APART}"
    norm = ChannelNorm(before, after)
    both = [a for _, a in norm.axes], _labels_of_children(module, flow)
    channels, parts = (flow.union.find(np.concatenate([np.zeros(1, np.int64), *labels])) for labels in both)
    if np.intersect1d(channels, parts).any():
        advice = f" ({FIXED_CODE})" if has_fixed_code(module) else APART
        return f"{name} does more than normalize: it has modules with parameters of these channels{advice}"
    return norm


def _labels_of_children(module: nn.Module, flow: LabelFlow) -> list[Labels]:
    """Return the labels of all parameters of a module's children."""
    parameters = (parameter for child in module.children() for parameter in child.parameters())
    return [field.labels.reshape(-1) for parameter in parameters for field in flow.fields(parameter)]


def _same_axes(flow: LabelFlow, one: Axes | None, other: Axes | None) -> bool:
    """Return whether two tensors have the same labels on the same axes, as far as these are merged by now."""
    found = ([(axis, flow.union.find(labels).tolist()) for axis, labels in axes or ()] for axes in (one, other))
    return next(found) == next(found)


def _axes(flow: LabelFlow, tensor: torch.Tensor) -> Axes | None:
    """Return the labels by axis; None if a field lies on several axes jointly."""
    found: dict[int, Labels] = {}
    for one in (part for field in flow.fields(tensor) for part in flow.parted.get(field, [field])):
        if flow.has_any_size(one):  # of a new tensor that met no parameter, as the batch of a state of zeros
            continue
        if len(one.span) != 1:
            return None
        axis = -1 if one.span[0] == tensor.dim() - 1 else one.span[0]
        labels = one.labels.reshape(-1)
        flow.union.merge(found.setdefault(axis, labels), labels)
    return tuple(found.items())


def renumbered_norms(norms: Mapping[str, N], final: Labels) -> dict[str, N]:
    """Return modules that run narrow with the labels of a map, without those that can lose nothing."""
    numbered = {path: norm.renumbered(final) for path, norm in norms.items()}
    return {path: norm for path, norm in numbered.items() if norm.is_free}
