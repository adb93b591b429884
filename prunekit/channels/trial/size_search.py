"""The size search: which sizes in a module's Python have to be set, found by trying where a trial fails.

A compact model runs the Python of the dense one, which may state sizes in three ways:

    x.view(B, self.heads, 64)             an expression in a view, a split or a slice: `size_expressions` tells which
                                          labels `64` counts, as the trace saw the tensor that came out
    self.heads                            an attribute: nothing says what it means, only that it equals an old size
    scores / math.sqrt(k.shape[-1])       a number made of a width, which has to stay that of the dense model

So only after a trial failed are sizes tried, beginning in the module that failed and going outward:

    numbers of widths at the operator that differs          `ScaleSearch`
    expressions of the module's methods, all at once        `_stated`
    attributes, one after the other, each time the one that takes the trial furthest           `_within`
    attributes together with expressions                    `_unstated`
    the same in the module around it, up to the model

1. A size is set only if the trial gets further with it: to a later run or operator, or from other shapes to other
   values (`_progress`). What does not help is left alone, as it may mean something else.
2. Whatever is tried is taken back: the compact model leaves the search as it came (`_tried`).
3. What is found for one module is set in all of its class that have the same size at the same place.
4. Axes that grow with the batch are no sizes of channels, and are never set (`BatchAxes`).
"""

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite, prod
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import nn

from prunekit.channels.float64 import Float64WhileRunning, float64_inputs, to_double
from prunekit.channels.labels.branch import is_inside
from prunekit.channels.labels.code_places import CodePlace
from prunekit.channels.labels.constraints import EqualParts, around
from prunekit.channels.labels.label_flow import Field, rows_along
from prunekit.channels.rewrite.size_expressions import StatedSizes, size_expressions
from prunekit.channels.rewrite.source_rewriter import integers, set_attributes, values_of
from prunekit.channels.rules.rule import Trait
from prunekit.channels.tracing.call_sites import (
    Site,
    calling_frame,
    definition,
    frame_here,
    number,
    operands_at,
    place_of,
    value_of,
)
from prunekit.channels.tracing.channel_map import ChannelMap, Keep, SizeAttribute
from prunekit.channels.tracing.traced_run import Examples, TracedOperator, TracedRun
from prunekit.channels.tracing.tracer import Trace, trace_model
from prunekit.channels.trial.comparison import Divergence, Failure, OperatorKey, Outcome, watch_operators
from prunekit.errors import ModelError
from prunekit.utils.inputs import repeated_samples, sample_count


class BatchAxes:
    """The axes that grow with the batch, from a trace with twice the batch, which is made on first use."""

    def __init__(self, model: nn.Module, trace: Trace, examples: Examples) -> None:
        self._model, self._trace, self._examples = model, trace, examples

    def of(self, operator: TracedOperator) -> frozenset[int]:
        """Return the axes of an operator's first result; the first one where a larger batch does not run."""
        return self._known.get(operator, frozenset([0]))

    @cached_property
    def _known(self) -> dict[TracedOperator, frozenset[int]]:
        both_modes = not all(run.repeats for run in self._trace.runs if run.training)
        try:  # some examples, such as sparse tensors, cannot be joined with themselves
            larger = [repeated_samples(one, 2 * sample_count(one, 1)) for one in self._examples]
            trace = trace_model(self._model, larger, both_modes=both_modes, read=self._trace.read)
        except (ModelError, RuntimeError):
            return {}
        return dict(_compared(self._trace, trace))


def _compared(trace: Trace, larger: Trace) -> Iterator[tuple[TracedOperator, frozenset[int]]]:
    """Yield operators with the axes of their results that grow, matched by site, as copies in between may differ."""
    others = {(run.example, run.training, run.doubled): run for run in larger.runs}
    for run in trace.runs:
        other = others.get((run.example, run.training, run.doubled))
        if other is None or run.repeats:  # a run that repeats the one before has the same operators
            continue
        sizes = {key: operator.call[2][0] for key, operator in _by_place(other)}
        for key, operator in _by_place(run):
            axes = enumerate(zip(operator.call[2][0], sizes.get(key, ()), strict=False))
            if key in sizes:
                yield operator, frozenset(axis for axis, (size, more) in axes if size != more)


def _by_place(run: TracedRun) -> Iterator[tuple[Any, TracedOperator]]:
    counts: Counter[Any] = Counter()
    for operator in run.operators:
        if operator.site is not None:
            place = (operator.module, operator.owner, operator.site)
            yield (*place, counts[place]), operator
            counts[place] += 1


Numbers = dict[tuple[str, CodePlace], int]
"""Path of a module and a place in one of its methods -> the number there."""


class ScaleSearch:
    """Search for numbers that the Python of a compact model makes of its widths, and that have to stay dense."""

    def __init__(self, model: nn.Module, examples: Examples) -> None:
        self._model, self._examples = model, examples

    def at(self, divergence: Divergence, run: TracedRun, compact: nn.Module) -> list[SizeAttribute]:
        """Return the numbers at a divergence that other widths changed, as sizes that no plan changes.

        They are returned for all modules of the class that computes with them.
        """
        example = float64_inputs(run.inputs(self._examples))
        small = self._numbers(compact, example, run, divergence.key) if divergence.operator else {}
        dense = self._numbers(self._model, example, run) if small else {}
        changed = {key for key, value in small.items() if dense.get(key, value) != value}
        if not changed:
            return []
        larger = self._numbers(self._model, repeated_samples(example, 2 * sample_count(example, 1)), run)
        classes = {type(self._model.get_submodule(path)) for path, _ in changed}
        places = {place for _, place in changed}
        return [
            SizeAttribute(path, str(place), None, np.zeros((value, 1), dtype=np.int64))
            for (path, place), value in dense.items()
            if place in places and type(self._model.get_submodule(path)) in classes
            if larger.get((path, place)) == value
        ]

    def _numbers(
        self, model: nn.Module, example: tuple[Any, ...], run: TracedRun, at: OperatorKey | None = None
    ) -> Numbers:
        """Return the numbers that a forward pass computes with, at one operator or at all, as far as the model runs."""
        with Float64WhileRunning(model, to_double, borrowed=run.borrowed) as running:
            paths = {module: path for path, module in running.model.named_modules()}
            numbers: Numbers = {}

            def see(key: OperatorKey, *_: Any) -> None:
                running = sys._getframe(4)
                found = (frame_here(running) or calling_frame(running)) if at in (None, key) else None
                if found is not None:
                    frame, method, owner = found
                    for node in operands_at(Site(method, frame.f_code, frame.f_lasti)):
                        for place, value in _numbers_in(node, method, frame.f_locals):
                            numbers[paths[owner], place] = value

            watch_operators(running.model, example, run, see)
        return numbers


def _numbers_in(node: ast.expr, method: CodeType, names: Mapping[str, Any]) -> Iterator[tuple[CodePlace, int]]:
    """Yield whole numbers that an expression reads from variables and shapes; a float is followed to its expression."""
    for part in ast.walk(node):
        value = _value(part, names)
        if type(value) is int and isinstance(part, ast.expr) and (place := place_of(method, part)) is not None:
            yield place, value
        elif isinstance(value, float) and isinstance(part, ast.Name) and (found := definition(method)) is not None:
            given = value_of(part.id, found[0])
            yield from () if given is None else _numbers_in(given, method, names)


def _value(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """Return a variable, an attribute or a number of a tensor's shape; else None. No code of a model runs."""
    match node:
        case ast.Name(name):
            return names.get(name)
        case ast.Attribute(owner, name) if not isinstance(found := _value(owner, names), torch.Tensor):
            held = vars(found) if hasattr(found, "__dict__") else {}
            return next((held[part][name] for part in _HELD if name in held.get(part, ())), held.get(name))
        case ast.Subscript(of, index) if (sizes := _sizes(of, names)) is not None:
            return _entry(sizes, number(index))
        case ast.Call(ast.Attribute(of, "size"), [index]) if (shape := _shape(of, names)) is not None:
            return _entry(shape, number(index))
        case ast.Call(ast.Attribute(of, "numel" | "nelement"), []):
            sizes = _shape(of, names)
            return _product(_sizes(of, names) if sizes is None else sizes)
        case ast.Call(ast.Name("len"), [of]) if shape := _shape(of, names):
            return shape[0]
        case ast.Call(ast.Name("prod") | ast.Attribute(ast.Name(), "prod"), [of]):
            return _product(_sizes(of, names))
    return None


def _entry(sizes: tuple[int, ...], at: int | None) -> int | None:
    return None if at is None or not -len(sizes) <= at < len(sizes) else sizes[at]


_HELD = ("_parameters", "_buffers", "_modules")
"""Attributes that hold the tensors and parts of a module."""


def _product(sizes: tuple[int, ...] | None) -> int | None:
    return None if sizes is None else prod(sizes)


def _sizes(node: ast.AST, names: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape that an expression reads of a tensor, such as `x.shape[1:]`; None for anything else."""
    match node:
        case ast.Attribute(of, "shape") | ast.Call(ast.Attribute(of, "size"), []):
            return _shape(of, names)
        case ast.Subscript(of, ast.Slice(lower, upper, None)) if (sizes := _sizes(of, names)) is not None:
            ends = [None if end is None else number(end) for end in (lower, upper)]
            known = all(given is None or end is not None for given, end in zip((lower, upper), ends, strict=True))
            return sizes[slice(*ends)] if known else None
        case ast.Name(name):
            found = names.get(name)
            return tuple(found) if isinstance(found, torch.Size) else None
    return None


def _shape(node: ast.AST, names: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of a tensor, or of its entry at a number as in `w[0]`; None for anything else."""
    match node:
        case ast.Subscript(of, index) if number(index) is not None:
            shape = _shape(of, names)
            return shape[1:] if shape else None
        case ast.Attribute(of, "data") | ast.Call(ast.Attribute(of, "detach"), []):
            return _shape(of, names)
    found = _value(node, names)
    return tuple(found.shape) if isinstance(found, torch.Tensor) else None


@dataclass(frozen=True)
class SizeOption:
    """An attribute, and the axis that it may be the size of, by the numbers of an operator and of a field there."""

    name: str
    position: int | None
    operator: int
    field: int
    axis: int


Found = tuple[list[SizeAttribute], Failure | None]
"""Attributes, and where the models differ with them; None if nowhere."""


@dataclass(eq=False)
class SizeSearch:
    """A search for sizes that take a failed trial past the module in which it failed."""

    model: nn.Module  # the dense model
    compact: nn.Module  # the compact model; attributes are set in place, and set back
    # channel_map, keep: the plan
    channel_map: ChannelMap
    keep: Keep
    batches: BatchAxes  # the axes that grow with the batch
    scales: ScaleSearch  # the search for numbers made of widths
    attempt: Callable[[], Outcome]  # compares `compact` as it is: the largest difference, and where the models differ
    plain: bool = False  # whether only attributes are set, and no expressions
    withheld: bool = False  # whether expressions could have been set
    difference: float | None = None  # of the attempt that passed; None without one
    equal: Sequence[EqualParts] = ()  # constraints that are needed before expressions can be set
    _sizes: dict[str, StatedSizes] = field(default_factory=dict, init=False)
    _further: list[SizeAttribute] = field(default_factory=list, init=False)

    def after(self, failed: Failure) -> list[SizeAttribute]:
        """Return sizes of the module that failed, or of the nearest one around it, and of others of its class.

        Their labels are in the trace's own numbering. The list is empty if nothing helps. If nothing takes the trial
        past the module, sizes that take it further in it are returned: what fails then may be locked alone.
        """
        numbers = self.scales.at(*failed, self.compact)
        if numbers and self.plain:
            self.withheld = True
        elif numbers and self._helps(failed, numbers):
            return numbers
        operators = by_module(failed[1])
        for path in (*around(failed[0].module), ""):
            found = self._stated(path, failed, []) or self._unstated(path, failed, operators)
            if found or self.equal:
                return found
        return self._further

    def _unstated(
        self, path: str, failed: Failure, operators: Mapping[str, list[TracedOperator]]
    ) -> list[SizeAttribute]:
        """Return attributes whose meaning no expression tells, alone or together with expressions."""
        if self.equal:
            return []
        found, reached = self._within(path, failed, operators)
        if reached is None or reached[0].module not in (path, failed[0].module):
            return found
        self._further = self._further or found
        return self._stated(path, failed, found) if found else []

    def _within(self, path: str, failed: Failure, operators: Mapping[str, list[TracedOperator]]) -> Found:
        """Choose one attribute after the other, each time the one that gets furthest, until the module is passed."""
        if path == failed[0].module and not failed[0].operator:  # it may read sizes before it calls its parts
            operators = {**operators, path: within(path, failed[1])}
        options = list(self._options(path, operators.get(path, [])))
        found: list[SizeAttribute] = []
        while options:  # a module may need several sizes before it runs: each is tried on top of those found so far
            trials = []
            for option in options:
                sizes = [*found, *self._everywhere(path, option, operators)]
                reached = self._tried(sizes)
                if reached is None:
                    return sizes, None
                trials.append((self._progress(reached), option, sizes, reached))
            progress, option, sizes, reached = max(trials, key=lambda trial: trial[0])
            if progress <= self._progress(failed):
                break
            if reached[0].module not in (path, failed[0].module):
                return sizes, reached
            failed, found = reached, sizes
            options = [other for other in options if (other.name, other.position) != (option.name, option.position)]
        return found, failed

    def _stated(self, path: str, failed: Failure, found: list[SizeAttribute]) -> list[SizeAttribute]:
        """Return all sizes in the Python of a module and of others of its class, with `found`, if that helps."""
        stated = self._collected(path)
        new = stated.changing()
        self.equal = stated.equal if new else []  # what a method needs that runs several times with one size
        choices = [stated.as_attributes(self.model), new] if new and (self.plain or not self.equal) else []
        if self.plain:
            allowed = [choice for choice in choices if all(CodePlace.named(size.name) is None for size in choice)]
            self.equal, self.withheld = (), self.withheld or len(allowed) < len(choices)
            choices = allowed
        for choice in choices:
            if self._helps(failed, [*found, *choice]):
                return [*found, *choice]
        return []

    def _collected(self, path: str) -> StatedSizes:
        if path not in self._sizes:
            stated = StatedSizes(self.channel_map, self.keep)
            operators = [o for run in self.channel_map.traced.trace.runs if not run.repeats for o in run.operators]
            here = {operator.owner for operator in operators if operator.site is not None and operator.module == path}
            classes = {type(self.model.get_submodule(owner)) for owner in here}
            for operator in operators:
                if operator.site is not None and type(self.model.get_submodule(operator.owner)) in classes:
                    stated.note(operator.owner, list(size_expressions(operator, self.batches.of(operator))))
            self._sizes[path] = stated
        return self._sizes[path]

    def _progress(self, failed: Failure) -> tuple[int, bool, int, bool]:
        """Return how far a trial came: to which run, model and operator, and whether that differs in values alone."""
        (divergence, run), runs = failed, self.channel_map.traced.trace.runs
        return runs.index(run), not divergence.masked, divergence.after, isfinite(divergence.difference)

    def _helps(self, failed: Failure, sizes: Sequence[SizeAttribute]) -> bool:
        reached = self._tried(sizes)
        return reached is None or self._progress(reached) > self._progress(failed)

    def _tried(self, sizes: Sequence[SizeAttribute]) -> Failure | None:
        modules = {self.compact.get_submodule(path) for path in {size.module for size in sizes}}
        before = [(module, type(module), dict(vars(module))) for module in modules]
        final = self.channel_map.traced.final
        known = [*self.channel_map.sizes, *(size.renumbered(final) for size in sizes)]
        set_attributes(self.compact, values_of(self.model, known, self.keep))
        try:
            difference, failure = self.attempt()
        finally:
            for module, cls, own in before:
                module.__class__ = cls
                vars(module).clear()
                vars(module).update(own)
        self.difference = difference if failure is None else None
        return failure

    def _options(self, path: str, operators: Sequence[TracedOperator]) -> Iterator[SizeOption]:
        """Yield the integers of a module that equal the old size of a resized axis, once for each new size."""
        known = {(size.module, size.name, size.position) for size in self.channel_map.sizes}
        for name, value in vars(self.model.get_submodule(path)).items():
            if not self._unset(path, name):
                continue
            for position, old in enumerate(integers(value) or ()):
                element = None if isinstance(value, int) else position
                if (path, name, element) not in known:
                    yield from self._meanings(name, element, old, operators)

    def _unset(self, path: str, name: str) -> bool:
        """Return whether an attribute is still dense: a layer's own sizes follow from its tensors, and are set."""
        dense, compact = (vars(model.get_submodule(path)) for model in (self.model, self.compact))
        return bool(integers(dense.get(name)) is None or compact.get(name) == dense.get(name))

    def _meanings(
        self, name: str, position: int | None, old: int, operators: Sequence[TracedOperator]
    ) -> Iterator[SizeOption]:
        """Yield an option for each new size; repeated axes, whose size Python alone states, come first."""
        seen, flow = {old}, self.channel_map.traced.trace.flow
        for i, j, labeled, axis in sorted(axes_of_size(operators, old), key=lambda one: not flow.is_repeated(one[2])):
            labels = self.channel_map.resolve(labeled)
            new = SizeAttribute("", name, position, rows_along(labels, axis)).kept(self.keep)
            if new not in seen:
                seen.add(new)
                yield SizeOption(name, position, i, j, axis)

    def _everywhere(
        self, path: str, option: SizeOption, operators: Mapping[str, list[TracedOperator]]
    ) -> list[SizeAttribute]:
        """Return an option as sizes of a module and of all others of its class with the same value on the same axis."""
        cls, found = type(self.model.get_submodule(path)), []
        for other, module in self.model.named_modules():
            own = operators.get(other, [])
            if type(module) is not cls or option.operator >= len(own) or not self._unset(other, option.name):
                continue
            fields = fields_at(own[option.operator])
            values = integers(vars(module).get(option.name)) or []
            if option.field < len(fields) and (option.position or 0) < len(values):
                labels = fields[option.field].labels
                if option.axis < labels.ndim and labels.shape[option.axis] == values[option.position or 0]:
                    found.append(SizeAttribute(other, option.name, option.position, rows_along(labels, option.axis)))
        return found


def by_module(run: TracedRun) -> dict[str, list[TracedOperator]]:
    """Return the operators of a run by the module that ran each itself."""
    found: dict[str, list[TracedOperator]] = {}
    for operator in run.operators:
        found.setdefault(operator.module, []).append(operator)
    return found


def within(path: str, run: TracedRun) -> list[TracedOperator]:
    """Return the operators of a module and of all its parts."""
    return [operator for operator in run.operators if not path or is_inside(operator.module, [path])]


def axes_of_size(operators: Iterable[TracedOperator], size: int) -> Iterator[tuple[int, int, Field, int]]:
    """Yield labeled axes of a size: the numbers of operator and field, the field, and the axis."""
    for i, operator in enumerate(operators):
        for j, labeled in enumerate(fields_at(operator)):
            yield from ((i, j, labeled, axis) for axis in labeled.span if labeled.labels.shape[axis] == size)


def fields_at(operator: TracedOperator) -> list[Field]:
    """Return the fields of an operator's inputs and outputs; of `zeros_like` and its kin, those of the outputs."""
    inputs = () if operator.name in Trait.MAKES else operator.inputs
    return [*inputs, *(one for fields in operator.outputs for one in fields)]
