"""The rewriter: sets sizes that a module's own Python fixes, in attributes such as `num_heads` and in expressions.

    class Attention:                               class Attention(Attention):  # made when a size is set
        def forward(self, x):                          def forward(self, x):
            B, N, C = x.shape                              B, N, C = x.shape
            return x.reshape(B, N, C // 4)    ->           return x.reshape(B, N, self._size_forward_2_31)

The method is compiled again from its own source with an attribute in place of the expression, in a subclass that the
compact module gets as its class; the number is in the instance. The name of a size says where the expression is and how
it reads, as in `forward+2.31: C // 4`.

1. Only numbers and names of places are ever stored: the code is always that of the class itself.
2. Two modules of one class may have different numbers, and share one subclass if the same places are set in both.
3. Such a subclass is pickled as its original class and the names of the places, and compiled again when it is loaded;
   prunekit and the original class have to be importable there.
4. Tracebacks name the lines of the class itself; `inspect.getsource`, and so TorchScript, reads the method as it runs.

`SizedMethod` gives the text of such a method for files that people read.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import copy
import copyreg
import functools
import hashlib
import linecache
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from prunekit.channels.labels.code_places import CodePlace
from prunekit.channels.tracing import call_sites
from prunekit.channels.tracing.channel_map import ChannelMap, Keep, SizeAttribute
from prunekit.errors import ArtifactError
from prunekit.hooks.model_copy import is_filled

Values = dict[str, dict[str, Any]]
"""Module path -> attribute, or name of an expression -> an integer, or a list or tuple of integers."""


def attribute_values(model: nn.Module, channel_map: ChannelMap, keep: Keep) -> Values:
    """Return the values under a plan of the sizes that its trial found; `model` is the dense one."""
    there = channel_map.without_gone(keep, {size.module: size for size in channel_map.sizes})
    return values_of(model, [size for size in channel_map.sizes if size.module in there], keep)


def values_of(model: nn.Module, sizes: Sequence[SizeAttribute], keep: Keep) -> Values:
    """Return the values of some sizes under a plan; `model` is the dense one."""
    values: Values = {}
    for size in sizes:
        own = values.setdefault(size.module, {})
        old = own.get(size.name, getattr(model.get_submodule(size.module), size.name, []))
        new, at = size.value(keep), size.position
        own[size.name] = new if at is None else _with_item(old, at, new)
    return values


def _with_item(old: Any, at: int, new: Any) -> Any:
    """Return a list, tuple or mapping with another value at a position; a list may get longer by it."""
    items = [*old.values()] if type(old) is dict else old
    items = [*items[:at], new, *items[at + 1 :]]
    return dict(zip(old, items, strict=True)) if type(old) is dict else type(old)(items)


def set_attributes(model: nn.Module, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Set attributes and expressions of a model's modules, in place."""
    modules = dict(model.named_modules())
    for path, named in values.items():
        expressions = {name: value for name, value in named.items() if CodePlace.named(name)}
        if expressions:
            set_expressions(modules[path], expressions)
        own = modules[path].__dict__
        for name, value in named.items():
            if name not in expressions:
                own[name] = _of_kind(f"{path}.{name}", own[name], value)
                if is_named_layer(modules[path]):
                    own[f"_{name}"] = tuple(own[name].items())


def is_named_layer(module: nn.Module) -> bool:
    """Return whether a module is a layer of einops, whose `axes_lengths` says how long axes of its pattern are."""
    return type(module).__module__.startswith("einops.layers.") and type(vars(module).get("axes_lengths")) is dict


def _of_kind(name: str, old: Any, value: Any) -> Any:
    if integers(old) is None:
        raise KeyError(name)
    if type(old) is dict and isinstance(value, dict) and old.keys() == value.keys():
        value = {key: value[key] for key in old}  # a file may have them in another order
    new = type(old)(value) if isinstance(value, (list, tuple)) and type(old) is not int else value
    before, after = integers(old) or [], integers(new) or []
    fits = type(new) is type(old) and len(before) == len(after)
    fits = fits and (type(old) is not dict or old.keys() == new.keys())
    if not fits or not all(b == a or 0 < b < a for a, b in zip(before, after, strict=True)):
        raise ValueError(f"{name}: {value!r} in place of {old!r}")
    return new


def integers(value: Any) -> list[int] | None:
    """Return the integers that a value consists of, such as those of a mapping; None if it is anything else."""
    value = [*value.values()] if type(value) is dict else value
    items = list(value) if type(value) in (list, tuple, torch.Size) else [value]
    return items if items and all(type(item) is int for item in items) else None


def set_expressions(module: nn.Module, sizes: dict[str, Any]) -> None:
    """Set explicit sizes in place of expressions in a module's Python, by giving it another class; in place.

    `sizes` are whole numbers, or lists of them, by the names of the places of the expressions.
    """
    places = {}
    for name, value in sizes.items():
        place = CodePlace.named(name)
        if place is None:
            raise KeyError(name)
        if not all(type(size) is int and size >= 0 for size in (value if isinstance(value, list) else [value])):
            raise ValueError(f"{name}: {value!r} is no size")
        places[place] = value
    known = places_of(type(module))
    if not places.keys() <= known:
        module.__class__ = _with_sizes(original_of(type(module)), known.union(places))
        for name, value in vars(module).items():
            if isinstance(value, MethodType) and value.__self__ is module:  # as in `self.forward = self.forward_fast`
                vars(module)[name] = getattr(module, value.__name__)
    for place, value in places.items():
        vars(module)[place.attribute] = value


def original_of(cls: type) -> type:
    """Return the class whose methods were compiled again with explicit sizes; the class itself if none were."""
    return cls.__bases__[0] if places_of(cls) else cls


def places_of(cls: type) -> frozenset[CodePlace]:
    """Return the places in a class's methods that have explicit sizes; none if no method was compiled again."""
    found: frozenset[CodePlace] = vars(cls).get("_prunekit_places", frozenset())
    return found


_KINDS: dict[type, type] = {}
DECORATORS = 8
"""How many decorators a method may have."""
ORDERED = "_prunekit_ordered"
"""The name of `prunekit.channels.tracing.call_sites.ordered` in a recompiled method."""


def _with_sizes(cls: type, places: frozenset[CodePlace]) -> type:
    sizeds: list[type] = type.__subclasses__(cls)  # a table would keep the classes alive
    if (known := next((sized for sized in sizeds if places_of(sized) == places), None)) is not None:
        return known
    methods: dict[str, Any] = {
        name: _compiled(cls, name, [place for place in places if place.function == name])
        for name in sorted({place.function for place in places})
    }
    told = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_prunekit_places": places}
    usual = all(getattr(cls, name) is getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))
    if not usual:  # else an instance is pickled by its class and state, and so restored by itself
        methods["__reduce_ex__"] = _reduce_as_sized
    made: type = _kind_of(type(cls))(cls.__name__, (cls,), {**methods, **told})
    return made


def _kind_of(metaclass: type) -> type:
    """Return a metaclass that tells pickle how to handle classes with explicit sizes, which are in no module."""
    if metaclass not in _KINDS:
        kind = type(metaclass.__name__, (metaclass,), {})
        copyreg.pickle(kind, _reduce_class)
        _KINDS[metaclass] = kind
    return _KINDS[metaclass]


def _reduce_class(cls: type) -> tuple[Callable[..., type], tuple[type, list[str]]] | str:
    places = places_of(cls)
    return (sized_class, (original_of(cls), sorted(map(str, places)))) if places else cls.__qualname__


def sized_class(cls: type, names: list[str]) -> type:
    """Return the class with explicit sizes in the places of these names; called when one is unpickled."""
    places = [CodePlace.named(name) for name in names]
    try:
        return _with_sizes(cls, frozenset(place for place in places if place is not None))
    except KeyError as error:
        raise ArtifactError(
            f"{cls.__module__}.{cls.__qualname__}: expected the Python that this model was pruned with, and there is "
            f"no {error} in it; load the model where the class is as it was then"
        ) from error


def _reduce_as_sized(module: nn.Module, protocol: Any) -> Any:
    """Return the result of a class's own `__reduce_ex__`, with the sized class and its sizes."""
    cls = type(module)
    original: Any = original_of(_sized_in(cls))
    made = original.__reduce_ex__(module, protocol)
    if isinstance(made, str):
        return made
    names = {place.attribute for place in places_of(_sized_in(cls))}
    sizes = {name: value for name, value in vars(module).items() if name in names}
    return (_as_sized, (cls, sizes, *made[:2]), *made[2:])


def _sized_in(cls: type) -> type:
    return next(base for base in cls.__mro__ if places_of(base))


def _as_sized(cls: type, sizes: dict[str, Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    made = function(*arguments)
    if isinstance(made, original_of(_sized_in(cls))):
        made.__class__ = cls
        vars(made).update(sizes)
    return made


def _compiled(cls: type, name: str, places: list[CodePlace], *, kept: bool = True) -> FunctionType:
    """Return a method compiled from its own source, with attributes in place of expressions; `kept` keeps its text."""
    method = call_sites.method_of(cls, name)
    found = method and call_sites.definition(method[1].__code__)
    if not method or not found:
        raise KeyError(name)
    base, old = method
    code = old.__code__
    exchange = ExpressionReplacer(found[0], found[1], places)
    node = exchange.visit(copy.deepcopy(found[0]))
    if exchange.left:
        raise KeyError(str(exchange.left[0]))
    node.decorator_list = []
    # the class is there for names that Python mangles; a global of its name, as in super(Net, self), stays a global
    known = "pass" if base.__name__ in code.co_freevars else f"global {base.__name__}"
    around = ast.parse(f"def _({', '.join([*code.co_freevars, ORDERED])}):\n {known}\n class {base.__name__}: pass")
    around.body[0].body[1].body = [node]  # type: ignore[attr-defined]
    flags = code.co_flags & __future__.annotations.compiler_flag
    whole = compile(ast.fix_missing_locations(around), code.co_filename, "exec", flags, dont_inherit=True)
    made = next((one for one in call_sites.codes_in(whole) if one.co_name == name), None)
    if made is None:
        raise KeyError(name)
    cells = dict(zip(code.co_freevars, old.__closure__ or (), strict=True))
    cells[ORDERED] = CellType(call_sites.ordered)
    closure = tuple(cells[variable] for variable in made.co_freevars)
    new = _function(old, made, closure)
    if kept:  # `inspect` looks for the source where the function is that this one seems to wrap
        written = made.replace(co_filename=_written(base, exchange, node, code.co_filename))
        new.__wrapped__ = _function(new, written, closure)  # type: ignore[attr-defined]
    decorated = _redecorated(vars(base)[name], old, new)
    if decorated is None:  # a decorator that keeps the method elsewhere than in a variable of its own
        raise KeyError(name)
    return decorated


def _function(like: FunctionType, code: CodeType, closure: tuple[CellType, ...]) -> FunctionType:
    """Return a function with the name, defaults and globals of another one, and code and variables of its own."""
    made = FunctionType(code, like.__globals__, like.__name__, like.__defaults__, closure)
    made.__kwdefaults__, made.__qualname__ = like.__kwdefaults__, like.__qualname__
    return made


def _written(base: type, exchange: ExpressionReplacer, node: ast.FunctionDef, file: str) -> str:
    """Return the name of a file that exists in `linecache` alone: the method as it runs, in its own lines."""
    lines, indent = exchange.source.splitlines(keepends=True)[: node.end_lineno], " " * node.col_offset
    for span, new in sorted(exchange.edits, reverse=True):
        lines = _with_text(lines, span, new + f"\\\n{indent}" * (span[2] - span[0]))
    own = "".join(lines[node.lineno - 1 :])
    plain = ast.unparse(ast.fix_missing_locations(node))
    text = "\n" * (node.lineno - 1) + (own if _same(own, plain) else textwrap.indent(plain, indent))
    lines = text.splitlines(keepends=True)
    name = hashlib.sha256(f"{base.__qualname__} {text}".encode()).hexdigest()[:12]
    found = f"{file}{call_sites.SIZED_FILE}{name}"
    linecache.cache[found] = (len(text), None, lines, found)
    return found


def _redecorated(
    outer: FunctionType, old: FunctionType, new: FunctionType, depth: int = DECORATORS
) -> FunctionType | None:
    """Return a decorated method with a new function inside its decorators; None if the old one is not found there."""
    if outer is old or not depth:
        return new if depth else None
    cells, found = list(outer.__closure__ or ()), False
    for index, cell in enumerate(cells):
        inner = cell.cell_contents if is_filled(cell) else None
        changed = _redecorated(inner, old, new, depth - 1) if isinstance(inner, FunctionType) else None
        if changed is not None:
            cells[index], found = CellType(changed), True
    if not found:
        return None
    return functools.update_wrapper(_function(outer, outer.__code__, tuple(cells)), new)  # type: ignore[return-value]


@call_sites.weak_cache
def can_state(cls: type, place: CodePlace) -> bool:
    """Return whether a class's method can be compiled with something in place of an expression."""
    try:
        _compiled(original_of(cls), place.function, [place], kept=False)
    except (KeyError, SyntaxError, OSError):
        return False
    return True


class ExpressionReplacer(ast.NodeTransformer):
    """Puts an attribute of the first argument in place of some expressions."""

    def __init__(self, node: ast.FunctionDef, source: str, places: list[CodePlace]) -> None:
        self.owner = [*node.args.posonlyargs, *node.args.args][0].arg
        self.first, self.source = node.lineno, source
        self.left = list(places)
        self.edits: list[tuple[call_sites.Span, str]] = []  # spans in the source, and what is there instead
        self._inside = False

    def visit(self, node: ast.AST) -> Any:
        """Return a node with its expressions replaced; the outermost ones become edits."""
        change = self.change(node) if isinstance(node, ast.expr) else None
        if change is None or not isinstance(node, ast.expr):
            return self.generic_visit(node)
        outermost, self._inside = not self._inside, True
        new = change(node)
        if outermost:
            self._inside = False
            self.edits.append((call_sites.span_of(node), ast.unparse(new)))
        return new

    def change(self, node: ast.expr) -> Callable[[Any], ast.expr] | None:
        """Return the function that makes the new expression of an old one; None if that stays."""
        place = self._place(node)
        return None if place is None else functools.partial(self._replaced, place)

    def _replaced(self, place: CodePlace, node: ast.expr) -> ast.expr:
        self.left.remove(place)
        size = ast.Attribute(ast.Name(self.owner, ast.Load()), place.attribute, ast.Load())
        if place.axis is not None:  # the attribute is an order: `ordered(x, axis, order)`
            self.generic_visit(node)
            source = node if place.whole else _source_of(node)
            return ast.Call(ast.Name(ORDERED, ast.Load()), [source, ast.Constant(place.axis), size], [])
        if call_sites.is_unscaled_attention(node):  # the attribute is the width of a head
            self.generic_visit(node)
            scale = ast.keyword("scale", ast.BinOp(size, ast.Pow(), ast.Constant(-0.5)))
            return ast.Call(node.func, node.args, [*node.keywords, scale])
        if call_sites.is_chunk(node):
            self.generic_visit(node)
            return _in_parts(node, size)
        return size

    def _place(self, node: ast.expr) -> CodePlace | None:
        for place in self.left:
            there = (node.lineno - self.first, node.col_offset) == (place.line, place.column)
            if there and ast.get_source_segment(self.source, node) == place.text:
                return place
        return None


def _source_of(node: ast.expr) -> ast.expr:
    """Return the tensor that an expression rearranges."""
    picked = call_sites.picked_from(node)
    return call_sites.rearranged_by(node) if picked is None and isinstance(node, ast.Call) else picked or node


def _in_parts(node: ast.Call, sizes: ast.expr) -> ast.Call:
    """Return a split into parts of given sizes, in place of `x.chunk(3, 1)` or `torch.chunk(x, 3, 1)`."""
    assert isinstance(node.func, ast.Attribute)
    source, rest = (node.args[0], node.args[2:]) if call_sites.is_of_torch(node) else (node.func.value, node.args[1:])
    named = [item for item in node.keywords if item.arg == "dim"]
    return ast.Call(ast.Attribute(source, "split", ast.Load()), [sizes, *rest], named)


@dataclass(frozen=True)
class SizedMethod:
    """A method that was compiled again with attributes in place of expressions."""

    base: type  # the class that defines the method
    function: FunctionType  # as that class has it, without decorators
    places: tuple[CodePlace, ...]  # of the expressions, in the order of the source

    def text(self, base: str, names: Mapping[str, str]) -> str:
        """Return the source of the method as it runs in a subclass: decorators, comments and all, from column 0."""
        node, source = self.definition()
        exchange = _TextReplacer(self, base, names)
        made = exchange.visit(copy.deepcopy(node))
        lines = source.splitlines(keepends=True)
        behind = len(lines) - (node.end_lineno or 0)
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        for span, new in sorted(exchange.edits, reverse=True):
            lines = _with_text(lines, span, new)
        text = textwrap.dedent("".join(lines[first - 1 : len(lines) - behind])).rstrip() + "\n"
        plain = ast.unparse(ast.fix_missing_locations(made)) + "\n"
        return text if _same(text, plain) else plain

    def globals(self) -> dict[str, Any]:
        """Return by name the globals of the method's module that it reads."""
        node, _ = self.definition()
        code = self.function.__code__
        read = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        known = {name: value for name, value in self.function.__globals__.items() if not hasattr(builtins, name)}
        return {name: known[name] for name in sorted(read - {*code.co_varnames, *code.co_cellvars}) if name in known}

    def enclosing(self) -> list[str]:
        """Return the variables of functions around the class that the method reads, which no other file has."""
        return sorted({*self.function.__code__.co_freevars} - {"__class__"})

    def definition(self) -> tuple[ast.FunctionDef, str]:
        """Return the syntax tree of the method as it was written, and the text of its file."""
        found = call_sites.definition(self.function.__code__)
        assert found is not None  # it was compiled from there
        return found


def sized_methods(cls: type) -> list[SizedMethod]:
    """Return the methods of a class that were compiled again with explicit sizes."""
    original, methods = original_of(cls), []
    for name in sorted({place.function for place in places_of(cls)}):
        found = call_sites.method_of(original, name)
        assert found is not None  # as above
        places = sorted((p for p in places_of(cls) if p.function == name), key=lambda p: (p.line, p.column))
        methods.append(SizedMethod(*found, tuple(places)))
    return methods


class _TextReplacer(ExpressionReplacer):
    """Replaces also what only runs in the class itself, so that a method's text can stand in another class."""

    def __init__(self, method: SizedMethod, base: str, names: Mapping[str, str]) -> None:
        super().__init__(*method.definition(), [*method.places])
        # the expression for the class that defines the method, its name, and new names of globals
        self.base, self.class_name, self.names = base, method.base.__name__.lstrip("_"), names

    def change(self, node: ast.expr) -> Callable[[Any], ast.expr] | None:
        """Return the function that makes the new expression of an old one; None if that stays."""
        match node:
            case _ if (stated := super().change(node)) is not None:
                return stated
            case ast.Call(ast.Name("super"), [], []):
                owner = ast.Name(self.owner, ast.Load())
                return lambda _: ast.Call(ast.Name("super", ast.Load()), [self._class(), owner], [])
            case ast.Name("__class__"):
                return lambda _: self._class()
            case ast.Name(name) if name in self.names:
                return lambda _: ast.Name(self.names[name], node.ctx)
            case ast.Attribute(_, name) if name.startswith("__") and not name.endswith("__"):  # Python mangles it
                return self._unmangled
        return None

    def _class(self) -> ast.expr:
        return ast.parse(self.base, mode="eval").body

    def _unmangled(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        return ast.Attribute(node.value, f"_{self.class_name}{node.attr}", node.ctx)


def _with_text(lines: list[str], span: call_sites.Span, new: str) -> list[str]:
    """Return lines with other text in a span, whose columns count bytes of UTF-8."""
    first, start, last, end = span
    before = lines[first - 1].encode()[:start].decode()
    after = lines[last - 1].encode()[end:].decode()
    return [*lines[: first - 1], before + new + after, *lines[last:]]


def _same(text: str, other: str) -> bool:
    """Return whether two texts are the same Python, whatever they are indented by."""
    try:
        return ast.dump(ast.parse(textwrap.dedent(text))) == ast.dump(ast.parse(other))
    except SyntaxError:
        return False
