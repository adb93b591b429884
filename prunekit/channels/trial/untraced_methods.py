"""Untraced methods: sizes that only methods read which no example runs, such as a second forward for export.

An attribute that no operator of the trace used keeps its dense value in a compact model, where such a method then
fails. Some methods can be run: those with the arguments of forward that compute the same in the dense model, and those
without arguments that change the module but not what it computes. They have to do so in the compact model too; if they
don't, attributes that equal the old size of a resized axis are tried, as in the trial. Methods that cannot be run, and
sizes that are not found, are named in notes.
"""

import ast
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import nn

from prunekit.channels.cut.slicing import KeptIndices
from prunekit.channels.float64 import RUN_PRECISIONS, ForwardCall, evaluating, first_calls, float64_copy, to_double
from prunekit.channels.labels.branch import is_inside
from prunekit.channels.labels.label_flow import rows_along
from prunekit.channels.rewrite.source_rewriter import integers, original_of, set_attributes, values_of
from prunekit.channels.tracing.call_sites import attributes_of_first, codes_in, definition, nodes_of_sizes
from prunekit.channels.tracing.channel_map import ChannelMap, Keep, SizeAttribute
from prunekit.channels.tracing.execution import as_in_trace
from prunekit.channels.tracing.traced_run import Examples, TracedOperator, TracedRun
from prunekit.channels.trial.size_search import axes_of_size, within
from prunekit.utils.display import listed
from prunekit.utils.inputs import call

COMBINATIONS = 64
"""How many combinations of values of attributes are tried for one method."""
_NEVER = frozenset({"__init__", "extra_repr", "__repr__"})

Holder = tuple[str, str]
"""Path of a module and the name of its attribute."""


@dataclass(frozen=True)
class UntracedSizes:
    """Sizes that untraced methods read."""

    sizes: tuple[SizeAttribute, ...] = ()  # attributes that hold a size, with labels in the trace's own numbering
    notes: tuple[str, ...] = ()  # sentences on methods whose sizes are not known


def untraced_sizes(
    model: nn.Module, compact: nn.Module, channel_map: ChannelMap, keep: Keep, kept: KeptIndices, examples: Examples
) -> UntracedSizes:
    """Return the sizes that methods of a compact model read which its trial did not run."""
    repeats = tuple(_unread_repeats(model, channel_map, keep))
    search = _UntracedSearch(model, compact, channel_map, keep, kept, examples)
    found = search.result() if search.found else UntracedSizes()
    return UntracedSizes((*repeats, *found.sizes), found.notes)


def _unread_repeats(model: nn.Module, channel_map: ChannelMap, keep: Keep) -> Iterator[SizeAttribute]:
    """Yield attributes that say how often heads are repeated where a function lets an operator of torch repeat them."""
    trace = channel_map.traced.trace
    known = {(size.module, size.name) for size in channel_map.sizes}
    for operator in (operator for run in trace.runs for operator in run.operators):
        if operator.function is None:
            continue
        owner = vars(model.get_submodule(operator.owner))
        repeats = [one.labels.reshape(-1, 1) for one in operator.outputs[0] if trace.flow.is_repeated(one)]
        # the function reads them on other lines: with a mask it repeats the heads itself
        names = sorted(attributes_of_first(operator.function)) if repeats else ()
        for name, labels in itertools.product(names, repeats):
            size, value = SizeAttribute(operator.owner, name, None, labels), owner.get(name)
            left = size.renumbered(channel_map.traced.final).kept(keep)
            if type(value) is int and left < value == len(labels) and (size.module, name) not in known:
                known.add((size.module, name))
                yield size


@dataclass(eq=False)
class _UntracedSearch:
    """A search for the sizes that untraced methods of modules read which lose channels."""

    model: nn.Module
    compact: nn.Module
    channel_map: ChannelMap
    keep: Keep
    kept: KeptIndices
    examples: Examples
    # path of a module -> its methods that read attributes which may be sizes, and its other forwards
    found: dict[str, dict[str, FunctionType]] = field(init=False)

    def __post_init__(self) -> None:
        self._values: dict[tuple[Holder, str], list[list[SizeAttribute]]] = {}  # what `_meanings` returned
        self._read = set[Holder]()  # what methods read as sizes on lines that the examples run: no search for these
        self._known: dict[tuple[str, str, int | None], SizeAttribute] = {}  # sizes that were found
        self._notes: dict[str, list[str]] = {}  # each with the paths of the modules that it is about
        touched = {name.rpartition(".")[0] for name in self.kept}
        self._paths_left = {path for path, _ in self.compact.named_modules(remove_duplicate=False)}
        self.found = {}
        others: set[tuple[type, str]] = set()
        for path, module in self.model.named_modules():
            lost = touched if not path else [other for other in touched if is_inside(other, [path])]
            if path not in self._paths_left or not lost:
                continue
            for name, method in methods_of(type(module)).items():
                known = name == "forward" or (type(module), name) in others
                another = not known and "forward" in name and _way_to_run(module, method) is False
                if self._holders(path, method) or another:
                    self.found.setdefault(path, {})[name] = method
                    others.add((type(module), name))

    def result(self) -> UntracedSizes:
        """Run the methods that can be run, and return sizes, and notes on the others."""
        lines = self._lines_run()
        every = [(path, name, method) for path, methods in self.found.items() for name, method in methods.items()]
        self._read = {
            holder
            for path, _, method in every
            for holder in self._holders(path, method)
            if _reads_as_size(method.__code__, holder[1], lines.get(method.__code__, set()), ran=True)
        }
        missed: dict[str, dict[str, FunctionType]] = {}
        for path, name, method in every:
            if method.__code__ not in lines and _way_to_run(self.model.get_submodule(path), method) is not None:
                missed.setdefault(path, {})[name] = method
        settled: set[tuple[str, str]] = set()
        for run in self.channel_map.traced.trace.runs:
            if missed and not run.training:
                settled.update(self._proven(missed, run))
        follow = {(module, name) for module, name, _ in self._known}
        for path, name, method in every:
            if (path, name) not in settled:
                self._note_reads(path, name, method, lines.get(method.__code__, set()), follow)
        places = {
            note: listed((path or "the model itself" for path in paths), 3) for note, paths in self._notes.items()
        }
        return UntracedSizes(tuple(self._known.values()), tuple(f"{note} ({of})" for note, of in places.items()))

    def _holders(self, path: str, method: FunctionType) -> list[Holder]:
        """Return attributes that a method, or one that it calls, reads and that may be the size of a resized axis."""
        module = self.model.get_submodule(path)
        names = _names_in(type(module), method.__code__.co_name, method)
        parts = [child for child in module._modules if child in names and module._modules[child] is not None]
        owners = [path, *(f"{path}.{child}" if path else child for child in parts)]
        found = []
        for owner in owners:
            for name in vars(self.model.get_submodule(owner)) if owner in self._paths_left else ():
                if name in names and self._meanings((owner, name), path):
                    found.append((owner, name))
        return found

    def _meanings(self, holder: Holder, path: str) -> list[list[SizeAttribute]]:
        """Return the sizes that each item of an attribute may be, in the operators of a module that reads it."""
        if (holder, path) not in self._values:
            owner, name = holder
            dense, small = (vars(model.get_submodule(owner)).get(name) for model in (self.model, self.compact))
            values = integers(dense) or []
            single = isinstance(dense, int)
            positions = enumerate(values) if values and small == dense else ()
            where = [operator for run in self.channel_map.traced.trace.runs for operator in within(path, run)]
            every = [self._sizes(holder, None if single else i, old, where) for i, old in positions if old > 1]
            self._values[holder, path] = [sizes for sizes in every if sizes]
        return [] if holder in self._read else self._values[holder, path]

    def _sizes(
        self, holder: Holder, position: int | None, old: int, where: list[TracedOperator]
    ) -> list[SizeAttribute]:
        found: dict[int, SizeAttribute] = {}
        for *_, labeled, axis in axes_of_size(where, old):
            size = SizeAttribute(*holder, position, rows_along(labeled.labels, axis))
            found.setdefault(self._left(size), size)
        return [size for left, size in found.items() if 0 < left < old]

    def _lines_run(self) -> dict[CodeType, set[int]]:
        """Return the lines of the untraced methods that the examples run in the compact model."""
        codes = {method.__code__ for methods in self.found.values() for method in methods.values()}
        codes |= {code for _, code in self._recompiled()}
        lines: dict[CodeType, set[int]] = {}

        def local(frame: FrameType, event: str, argument: Any) -> Any:
            lines[frame.f_code].add(frame.f_lineno)
            return local

        def enter(frame: FrameType, event: str, argument: Any) -> Any:
            if frame.f_code not in codes:
                return None
            lines.setdefault(frame.f_code, set()).add(frame.f_lineno)
            return local

        before = sys.gettrace()
        for run in self.channel_map.traced.trace.runs:
            for way in (RUN_PRECISIONS[-1], RUN_PRECISIONS[0]):
                running, example = float64_copy(self.compact, way.convert), way.inputs(run.inputs(self.examples))
                with ExitStack() as stack, suppress(Exception):  # of a model whose code asks for the other precision
                    stack.enter_context(as_in_trace(running, run.training))
                    stack.enter_context(way.precision())
                    stack.callback(sys.settrace, before)
                    sys.settrace(enter)
                    call(running, example)
                    break
        for method, code in self._recompiled():
            if code in lines:
                lines.setdefault(method.__code__, set()).update(lines[code])
        return lines

    def _recompiled(self) -> Iterator[tuple[FunctionType, CodeType]]:
        """Yield methods that are compiled again in the compact model, with their new code."""
        for path, methods in self.found.items():
            cls = type(self.compact.get_submodule(path))
            for name, method in methods.items():
                own = getattr(cls, name, None)
                if isinstance(own, FunctionType) and own.__code__ is not method.__code__:
                    yield method, own.__code__

    def _proven(self, missed: Mapping[str, Mapping[str, FunctionType]], run: TracedRun) -> Iterator[tuple[str, str]]:
        """Yield methods that do what forward does in the dense model, and add the sizes for this in the compact one."""
        called = first_calls(self.model, missed, run.inputs(self.examples), run, partly=True)
        again = first_calls(self.compact, called, run.inputs(self.examples), run, partly=True)
        pairs = [(path, name) for path in again for name in missed[path]]
        # inner modules first, because methods of the modules around them call theirs
        for path, name in sorted(pairs, key=lambda pair: -pair[0].count(".")):
            method, module = missed[path][name], self.model.get_submodule(path)
            changes = _way_to_run(module, method) is True
            if not _does_the_same(float64_copy(module, to_double), name, called[path], changes=changes):
                continue
            for choice in self._choices(path, method):
                if _does_the_same(self._with(path, choice), name, again[path], changes=changes):
                    self._known |= {(size.module, size.name, size.position): size for size in choice}
                    break
            else:
                self._notes.setdefault(
                    f"{type(module).__name__}.{name} computes what forward does in the dense model and not in the "
                    "compact one: do not call it there",
                    [],
                ).append(path)
            yield path, name

    def _choices(self, path: str, method: FunctionType) -> Iterator[list[SizeAttribute]]:
        """Yield no sizes, and then every combination of sizes of attributes that no earlier method has set."""
        settled = {(module, name) for module, name, _ in self._known}
        holders = [holder for holder in self._holders(path, method) if holder not in settled]
        every = [sizes for holder in holders for sizes in self._meanings(holder, path)]
        options: list[list[SizeAttribute | None]] = [[None, *sizes] for sizes in every]
        for choice in itertools.islice(itertools.product(*options), COMBINATIONS):
            yield [size for size in choice if size is not None]

    def _with(self, path: str, choice: list[SizeAttribute]) -> nn.Module:
        """Return a float64 copy of a module of the compact model, with other values of attributes."""
        twin = float64_copy(self.compact.get_submodule(path), to_double)
        final = self.channel_map.traced.final
        before = [size for size in self._known.values() if not path or is_inside(size.module, [path])]
        values = values_of(self.model, [size.renumbered(final) for size in (*before, *choice)], self.keep)
        set_attributes(twin, {owner[len(path) :].lstrip("."): named for owner, named in values.items()})
        return twin

    def _note_reads(
        self, path: str, name: str, method: FunctionType, lines: set[int], follow: set[tuple[str, str]]
    ) -> None:
        """Add notes on attributes that a method reads as sizes on lines that never ran."""
        module = self.model.get_submodule(path)
        for owner, attribute in self._holders(path, method):
            if (owner, attribute) in follow or not _reads_as_size(method.__code__, attribute, lines, ran=False):
                continue
            # what the attribute may need to be, by the operators of the module's own Python
            runs = self.channel_map.traced.trace.runs
            own = [operator for run in runs for operator in run.operators if path in (operator.module, operator.owner)]
            every = integers(getattr(self.model.get_submodule(owner), attribute)) or []
            left = sorted({self._left(one) for old in every for one in self._sizes((owner, attribute), None, old, own)})
            if not left:
                continue
            old, part = getattr(self.model.get_submodule(owner), attribute), owner[len(path) :].lstrip(".")
            self._notes.setdefault(
                f"{type(module).__name__}.{name} reads {'.'.join(filter(None, ('self', part, attribute)))} = {old}, as "
                f"in the dense model, where {' or '.join(map(str, left))} may be meant now; no example runs it: set it "
                "by hand, or give more_examples that run it",
                [],
            ).append(path)

    def _left(self, size: SizeAttribute) -> int:
        return size.renumbered(self.channel_map.traced.final).kept(self.keep)


def methods_of(cls: type) -> dict[str, FunctionType]:
    """Return the methods of a module's class by name, except those of torch."""
    found: dict[str, FunctionType] = {}
    for base in original_of(cls).__mro__:
        if base is nn.Module or base.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for name, method in vars(base).items():
            if isinstance(method, FunctionType) and method.__code__.co_argcount and name not in _NEVER:
                found.setdefault(name, method)
    return found


def _names_in(cls: type, name: str, method: FunctionType) -> set[str]:
    """Return all names that a method reads, and the methods of its class that it names."""
    methods, names, left, seen = methods_of(cls), set[str](), [method], {name}
    while left:
        new = _code_names(left.pop().__code__)
        names |= new
        left += [methods[other] for other in new & methods.keys() - seen]
        seen |= new
    return names


@lru_cache(maxsize=4096)
def _code_names(code: CodeType) -> frozenset[str]:
    return frozenset(name for one in codes_in(code) for name in one.co_names)


def _reads_as_size(code: CodeType, attribute: str, lines: set[int], *, ran: bool) -> bool:
    """Return whether a method reads an attribute as a size, on a line that ran, or on one that did not."""
    found = definition(code)
    return found is not None and any(
        isinstance(node, ast.Attribute) and node.attr == attribute and (node.lineno in lines) is ran
        for node in nodes_of_sizes(found[0])
    )


def _way_to_run(module: nn.Module, method: FunctionType) -> bool | None:
    """Return False for a method with forward's arguments, True for one without that changes the module; else None."""
    own, forward = (
        [(p.name, p.kind) for p in inspect.signature(function).parameters.values()][1:]
        for function in (method, type(module).forward)
    )
    if own == forward:
        return False
    found = definition(method.__code__)
    return True if not own and found is not None and _changes_its_module(found[0]) else None


def _changes_its_module(function: ast.FunctionDef) -> bool:
    """Return whether a method sets or deletes attributes, or writes to the tensors that they hold."""
    changes = (ast.Store, ast.Del)
    nodes = list(ast.walk(function))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    if any(isinstance(node.ctx, changes) or node.attr == "__delattr__" for node in attributes):
        return True
    called = [node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    written = [node.value for node in called if node.attr.endswith("_") and not node.attr.startswith("_")]
    written += [node.value for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, changes)]
    return any(isinstance(inner, ast.Attribute) for node in written for inner in ast.walk(node))


def _does_the_same(twin: nn.Module, name: str, call: ForwardCall, *, changes: bool) -> bool:
    """Return whether a method returns what forward did, or leaves the module so that forward does."""

    def run(*args: Any, **named: Any) -> Any:
        method = getattr(twin, name)
        if changes:
            method()
        return (twin if changes else method)(*args, **named)

    with evaluating(twin):
        return call.gives(run)
