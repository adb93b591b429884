"""Which attributes are sizes: found by trying, and only where a trial needs them.

Never eagerly: an attribute that happens to equal a size may mean something else. Only after a model failed in a
module's Python, or computed something else there, are the integers tried that equal an old size of an axis resized in
that module's operators; what does not take the trial further is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from operator import itemgetter

import numpy as np
from torch import nn

from prunekit.channels.attributes import integers, set_attributes, values_of
from prunekit.channels.comparing import Divergence
from prunekit.channels.labels import Field, Labels
from prunekit.channels.map import ChannelMap, Keep, SizeAttribute
from prunekit.channels.tracing import Operator, Run


@dataclass(frozen=True)
class Option:
    """An attribute, and the axis it may be the size of: of a field at an operator, both counted within the module."""

    name: str
    position: int | None
    operator: int
    field: int
    axis: int

    @property
    def attribute(self) -> tuple[str, int | None]:
        """Name, and position in it."""
        return self.name, self.position


Failure = tuple[Divergence, Run]
_Reached = tuple[tuple[int, int], tuple[Option, ...], list[SizeAttribute], Failure]
"""How far a choice of options got, the choice, what it sets, and where the models parted then."""
Trial = tuple[float, Failure | None]


@dataclass(eq=False)
class SizeSearch:
    """Looks for attributes that take a failed trial past the module it failed in.

    Attributes:
        model: the dense model.
        compact: what is tried; attributes are set in place, and set back.
        channel_map, keep: the plan.
        attempt: tries `compact` as it is: the largest difference, and where the models parted.
        difference: of the attempt that agreed everywhere, where one did.
    """

    model: nn.Module
    compact: nn.Module
    channel_map: ChannelMap
    keep: Keep
    attempt: Callable[[], Trial]
    difference: float | None = None

    def after(self, failed: Failure) -> list[SizeAttribute]:
        """Attributes of the module that failed, or of the nearest around it that has some, and of others of its class.

        Their labels are in the trace's own numbering. None where nothing helps.
        """
        path = failed[0].module
        operators: dict[str, list[Operator]] = {}
        for operator in failed[1].operators:
            operators.setdefault(operator.module, []).append(operator)
        while True:
            found = self._within(path, failed, operators)
            if found or not path:
                return found
            path = path.rpartition(".")[0]

    def _within(self, path: str, failed: Failure, operators: Mapping[str, list[Operator]]) -> list[SizeAttribute]:
        """Takes one attribute after the other, each time the one that gets furthest, until the module is passed."""
        if path == failed[0].module and path not in operators:  # it only looks at sizes before it calls its parts
            operators = {**operators, path: within(path, failed[1])}
        options = list(self._options(path, operators.get(path, [])))
        at_once = (1, 2) if path == failed[0].module else (1,)
        found, tempting = self._greedily(path, failed, operators, options, at_once=at_once)
        if not found and tempting and 2 in at_once:
            found, _ = self._greedily(path, failed, operators, options, at_once=(2,))
        return found

    def _greedily(
        self,
        path: str,
        failed: Failure,
        operators: Mapping[str, list[Operator]],
        options: Sequence[Option],
        *,
        at_once: tuple[int, ...],
    ) -> tuple[list[SizeAttribute], bool]:
        """Also two at once, where none gets further: a view may need the number of heads and their width.

        Returns what was found, and whether an attribute alone got further at first.
        """
        found: list[SizeAttribute] = []
        tempting = False
        while options:
            trials: list[_Reached] = []
            for chosen in (chosen for count in at_once for chosen in _apart(options, count)):
                if len(chosen) > at_once[0] and any(trial[0] > self._progress(failed) for trial in trials):
                    break
                sizes = [*found, *(size for option in chosen for size in self._everywhere(path, option, operators))]
                reached = self._tried(sizes)
                if reached is None:
                    return sizes, tempting
                trials.append((self._progress(reached), chosen, sizes, reached))
            if not any(trial[0] > self._progress(failed) for trial in trials):
                break
            _, chosen, sizes, reached = max(trials, key=itemgetter(0))
            if reached[0].module not in (path, failed[0].module):
                return sizes, tempting
            tempting |= len(chosen) == 1
            failed, found, at_once = reached, sizes, tuple(sorted({1, *at_once}))
            taken = {option.attribute for option in chosen}
            options = [option for option in options if option.attribute not in taken]
        return [], tempting

    def _progress(self, failed: Failure) -> tuple[int, int]:
        return self.channel_map.traced.trace.runs.index(failed[1]), failed[0].after

    def _tried(self, sizes: Sequence[SizeAttribute]) -> Failure | None:
        final = self.channel_map.traced.final
        resolved = [replace(size, labels=final[size.labels]) for size in sizes]
        before = {size.module: dict(vars(self.compact.get_submodule(size.module))) for size in sizes}
        set_attributes(self.compact, values_of(self.model, [*self.channel_map.sizes, *resolved], self.keep))
        try:
            difference, failure = self.attempt()
        finally:
            for size in sizes:
                setattr(self.compact.get_submodule(size.module), size.name, before[size.module][size.name])
        self.difference = difference if failure is None else None
        return failure

    def _options(self, path: str, operators: Sequence[Operator]) -> Iterator[Option]:
        """Every integer of a module that equals the old size of a resized axis, once for each new size."""
        known = {(size.module, size.name, size.position) for size in self.channel_map.sizes}
        for name, value in vars(self.model.get_submodule(path)).items():
            if not self._unset(path, name):
                continue
            for position, old in enumerate(integers(value) or ()):
                element = None if isinstance(value, int) else position
                if (path, name, element) not in known:
                    yield from self._meanings(name, element, old, operators)

    def _unset(self, path: str, name: str) -> bool:
        """Whether an attribute is what it was: a layer's own sizes follow from its tensors, and are set."""
        dense, compact = (vars(model.get_submodule(path)) for model in (self.model, self.compact))
        return bool(integers(dense.get(name)) is None or compact.get(name) == dense.get(name))

    def _meanings(self, name: str, position: int | None, old: int, operators: Sequence[Operator]) -> Iterator[Option]:
        seen = {old}
        for i, operator in enumerate(operators):
            for j, field in enumerate(_fields_at(operator)):
                for axis in field.span:
                    if field.labels.shape[axis] != old:
                        continue
                    labels = self.channel_map.resolve(field)
                    new = SizeAttribute("", name, position, _rows(labels, axis)).kept(self.keep)
                    if new not in seen:
                        seen.add(new)
                        yield Option(name, position, i, j, axis)

    def _everywhere(self, path: str, option: Option, operators: Mapping[str, list[Operator]]) -> list[SizeAttribute]:
        """An option for a module and for all others of its class that have the same value on the same axis."""
        cls, found = type(self.model.get_submodule(path)), []
        for other, module in self.model.named_modules():
            own = operators.get(other, [])
            if type(module) is not cls or option.operator >= len(own) or not self._unset(other, option.name):
                continue
            fields = _fields_at(own[option.operator])
            values = integers(vars(module).get(option.name)) or []
            if option.field < len(fields) and (option.position or 0) < len(values):
                labels = fields[option.field].labels
                if option.axis < labels.ndim and labels.shape[option.axis] == values[option.position or 0]:
                    found.append(SizeAttribute(other, option.name, option.position, _rows(labels, option.axis)))
        return found


def _apart(options: Sequence[Option], count: int) -> Iterator[tuple[Option, ...]]:
    """Options for so many different attributes."""
    for chosen in combinations(options, count):
        if len({option.attribute for option in chosen}) == count:
            yield chosen


def within(path: str, run: Run) -> list[Operator]:
    """The operators of a module and of all its parts."""
    return [operator for operator in run.operators if f"{operator.module}.".startswith(f"{path}." if path else "")]


def _fields_at(operator: Operator) -> list[Field]:
    return [*operator.inputs, *(field for fields in operator.outputs for field in fields)]


def _rows(labels: Labels, axis: int) -> Labels:
    return np.moveaxis(labels, axis, 0).reshape(labels.shape[axis], -1)
