"""Registries: objects of one kind by name, to which users and other packages can add."""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from prunekit.errors import UsageError, nearest
from prunekit.utils.availability import package_folders
from prunekit.utils.user_code import is_reference, load_object, require_object

Item = TypeVar("Item")


@dataclass(frozen=True)
class Declaration:
    """A registration, read from the source without running it: its module and its literal arguments."""

    module: str  # full name of the module
    facts: Mapping[str, Any] = field(default_factory=dict)  # the literal keyword arguments of the registration


class Registry(Generic[Item]):
    """Objects of one kind by name.

    Built-in objects are registered in the modules of a package, in which a new file is found by itself. Other packages
    declare theirs as entry points of the group `prunekit.<plural>`. Users call the same function in their own code, or
    give `file.py:object` where recipes and commands take a name.

    Names are known without importing anything: the registering calls are read from the source, so their first
    argument, and all keyword arguments that `prunekit list` shows, must be literals.
    """

    def __init__(
        self,
        kind: str,  # of an object in messages, such as "criterion"
        plural: str,  # such as "criteria"
        package: str,  # where built-in objects are registered, such as "prunekit.criteria"
        registers: str,  # name of the function that registers an object; its first argument is the object's name
        # turns a reference `file.py:object`, and the object of the file, into an object of the kind; raises a
        # `UsageError` that says what was expected
        accept: Callable[[str, Any], Item],
        # name of a function that registers objects of several kinds; its argument with this kind's name is the name
        also: str = "",
    ) -> None:
        self.kind, self.plural, self.package, self.registers, self.accept = kind, plural, package, registers, accept
        self.also = also
        self._items: dict[str, Item] = {}
        self._homes: dict[str, tuple[str, str]] = {}

    def add(self, name: str, item: Item, defined: object = None) -> None:
        """Register an object.

        If the function or class `defined` that it was made of is run again (a notebook's cell, a file that was edited),
        it replaces its former self.
        """
        if ":" in name:
            raise ValueError(f"{self.kind} {name!r}: a name must not have a colon")
        home, declared = _home(defined), self.declared.get(name)
        elsewhere = declared is not None and declared.module not in sys.modules
        again = home is not None and self._homes.get(name) == home
        if (name in self._items and not again) or elsewhere:
            raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
        self._items[name] = item
        if home is not None:
            self._homes[name] = home

    @cached_property
    def declared(self) -> dict[str, Declaration]:
        """The built-in objects by name, in the order of their files and lines."""
        found: dict[str, Declaration] = {}
        top, *parts = self.package.split(".")  # finding the inner package itself would import those around it
        folders = [Path(at, *parts) for at in package_folders(top)]
        files = [path for folder in folders for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
        for path in files:
            module = f"{self.package}.{path.stem}"
            for function, name, facts in _registrations(path, (self.registers, self.also)):
                called = facts.get(self.kind, "") if function == self.also else name
                if called:
                    found[called] = Declaration(module, facts)
        return found

    @cached_property
    def installed(self) -> dict[str, EntryPoint]:
        """The objects of other installed packages by name."""
        return {point.name: point for point in entry_points(group=f"prunekit.{self.plural}")}

    @property
    def names(self) -> tuple[str, ...]:
        """All known names: those of built-in, registered and installed objects, in this order."""
        registered = [name for name in self._items if not is_reference(name)]
        return tuple(dict.fromkeys([*self.declared, *registered, *self.installed]))

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return the facts of each registration, for lists; for installed objects, their package. Imports none."""
        declared = {name: dict(declared.facts) for name, declared in self.declared.items()}
        here = {name: vars(getattr(item, "facts", item)) for name, item in self._items.items()}
        from_packages = {name: f"from {point.module}" for name, point in self.installed.items()}
        installed = {name: {"measures": package, "about": package} for name, package in from_packages.items()}
        known = installed | here | declared
        return {name: known[name] for name in self.names}

    @property
    def imported(self) -> tuple[Item, ...]:
        """The objects that have been imported so far."""
        return tuple(self._items.values())

    def problem(self, name: object) -> str | None:
        """Return what is wrong with a name or reference, as "expected ..., got ..."; None if nothing. Runs no code."""
        if isinstance(name, str) and name in self.names:
            return None
        if isinstance(name, str) and is_reference(name):
            try:
                require_object(name, UsageError)
            except UsageError as error:
                return str(error)
            return None
        near = nearest(name, self.names) if isinstance(name, str) else nearest("", self.names)
        return f"expected the name of a {self.kind}, or file.py:object, got {name!r}; {near}"

    def get(self, name: str) -> Item:
        """Return the object of a name; for `file.py:object` run the user's file."""
        if name in self._items:
            return self._items[name]
        if (problem := self.problem(name)) is not None:
            raise UsageError(f"{self.kind}: {problem}")
        if name in self.declared:
            import_module(self.declared[name].module)
        elif name in self.installed:
            self._items[name] = self.accept(name, self.installed[name].load())
        else:
            self.reload(name)
        if name not in self._items:  # its registration is in the source, and did not run
            raise UsageError(f"{self.kind} {name!r}: importing {self.declared[name].module} did not register it")
        return self._items[name]

    def reload(self, name: str) -> None:
        """Run the file of `file.py:object` as it is now; do nothing for a name.

        Each job does so once at its beginning; then `get` returns this object, so that an edit does not change a
        running job.
        """
        if is_reference(name):
            self._items[name] = self.accept(name, load_object(name, UsageError))

    def items(self) -> Iterator[tuple[str, Item]]:
        """Return every name with its object; imports those that have not been imported."""
        return ((name, self.get(name)) for name in self.names)


@dataclass(frozen=True)
class Registered:
    """Marks an annotation of text that names an object of a registry, or `file.py:object`."""

    registry: Registry[Any]


@dataclass(frozen=True)
class RegisteredKeys:
    """Marks an annotation of a mapping whose keys name objects of a registry; in recipes they are beside the fields."""

    registry: Registry[Any]  # of the keys
    annotation: Callable[[str], Any]  # returns the type of the value of a key

    def knows(self, key: object) -> bool:
        """Return whether a key is a name of the registry, or a reference `file.py:object`."""
        return key in self.registry.names or is_reference(key)


KeyPath = tuple[str | int, ...]


class MappingKey(str):
    """The end of a path that leads to a key of a mapping instead of its value."""


@cache
def field_hints(settings: Any) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields by name, with constraints; resolved once for each class."""
    hints = get_type_hints(settings, include_extras=True)
    return {field.name: hints[field.name] for field in fields(settings)}


def registered_names(hint: Any, value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any, Registry[Any]]]:
    """Yield the names of registered objects in settings: key path, name and registry.

    The path of a name that is a key of a mapping ends with a `MappingKey`.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        yield from ((path, value, part.registry) for part in parts[1:] if isinstance(part, Registered))
        for mark in (part for part in parts[1:] if isinstance(part, RegisteredKeys)):
            yield from (((*path, MappingKey(key)), key, mark.registry) for key in value)
        yield from registered_names(parts[0], value, path)
    elif origin in (UnionType, Union) and not (value is None and type(None) in parts):
        for part in parts:
            yield from registered_names(part, value, path)
    elif is_dataclass(hint):
        items = value if isinstance(value, Mapping) else vars(value) if isinstance(value, hint) else {}  # type: ignore[arg-type]
        hints = field_hints(hint)  # type: ignore[arg-type]  # a class is hashable
        for key, inner in hints.items():
            if key in items:
                yield from registered_names(inner, items[key], (*path, key))
            elif isinstance(value, Mapping) and any(isinstance(part, RegisteredKeys) for part in get_args(inner)):
                yield from registered_names(
                    inner, {key: one for key, one in items.items() if key not in hints and one is not None}, path
                )
    elif origin is tuple and isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from registered_names(parts[0], item, (*path, index))
    elif origin is dict and isinstance(value, Mapping):
        for key, item in value.items():
            yield from registered_names(parts[1], item, (*path, key))


def replaced_at(settings: Any, path: KeyPath, value: Any) -> Any:
    """Return settings with another value at a key path, or another key if it ends with a `MappingKey`."""
    if not path:
        return value
    key, *rest = path
    if isinstance(key, MappingKey):
        return {(value if name == key else name): item for name, item in settings.items()}
    if isinstance(settings, tuple):
        return tuple(replaced_at(item, tuple(rest), value) if i == key else item for i, item in enumerate(settings))
    if isinstance(settings, Mapping):
        return {**settings, key: replaced_at(settings[key], tuple(rest), value)}
    return replace(settings, **{str(key): replaced_at(getattr(settings, str(key)), tuple(rest), value)})


def _home(defined: object) -> tuple[str, str] | None:
    """Return the file of a function or class, or else its module, and its name there; None if it has none."""
    module = getattr(defined, "__module__", None)
    if module is None:
        return None
    return str(getattr(sys.modules.get(module), "__file__", None) or module), getattr(defined, "__qualname__", "")


def _registrations(path: Path, functions: tuple[str, str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each registering call in a file: the function, its first argument if that is text, and its keywords."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if called in functions:
            first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
            literals: dict[str, Any] = {}
            for keyword in node.keywords:
                with suppress(ValueError):
                    literals |= {} if keyword.arg is None else {keyword.arg: ast.literal_eval(keyword.value)}
            yield called, first if isinstance(first, str) else "", literals
