"""Positions in YAML: the document of a recipe, with the line and column of every key, value and problem."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from prunekit.reading.yaml_files import compose, construct, place_of, reason_of
from prunekit.utils.files import json_values

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, order=True)
class Origin:
    """Place where something was written: line and column in a file, counted from 1, or an override."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True)
class Problem:
    """A problem of a recipe: where it is, its key, and what is wrong."""

    origin: Origin
    path: KeyPath
    text: str

    def __str__(self) -> str:
        key = ".".join(map(str, self.path))
        return f"{self.origin}: {key}: {self.text}" if key else f"{self.origin}: {self.text}"


@dataclass(frozen=True)
class Document:
    """Plain values, the origins of their keys and values, and the problems of the text."""

    values: Any
    keys: Mapping[KeyPath, Origin] = field(default_factory=dict)
    places: Mapping[KeyPath, Origin] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def place(self, path: KeyPath, *, key: bool = False) -> Origin:
        """Return the origin of the value (or the key) at `path`, or of the nearest enclosing value that was written."""
        if key and path in self.keys:
            return self.keys[path]
        while path not in self.places:
            path = path[:-1]
        return self.places[path]


def parse(text: str, origin: Origin) -> Document:
    """Read one YAML document."""
    try:
        root = compose(text)
        visitor = _OriginVisitor(origin)
        if root is None:
            return Document(None, places={(): origin})
        visitor.visit(root, ())
        values = None if visitor.problems else json_values(construct(text, duplicates=True))
    except YAMLError as error:
        place = place_of(error)
        at = Origin(origin.source, *place) if place is not None and origin.line else origin
        return Document(
            None, places={(): origin}, problems=(Problem(at, (), f"expected YAML, but {reason_of(error)}"),)
        )
    return Document(values, visitor.keys, visitor.places, tuple(visitor.problems))


class _OriginVisitor:
    """Collects the origin of every key and value of a node tree, and its duplicate keys."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.keys: dict[KeyPath, Origin] = {}
        self.places: dict[KeyPath, Origin] = {}
        self.problems: list[Problem] = []
        self._open: set[int] = set()

    def visit(self, node: Node, path: KeyPath) -> None:
        self.places.setdefault(path, self.at(node))
        if id(node) in self._open:
            self.problems.append(Problem(self.at(node), path, "expected plain values, got an alias to itself"))
            return
        self._open.add(id(node))
        if isinstance(node, MappingNode):
            self.visit_mapping(node, path)
        elif isinstance(node, SequenceNode):
            for index, item in enumerate(node.value):
                self.visit(item, (*path, index))
        self._open.discard(id(node))

    def visit_mapping(self, node: MappingNode, path: KeyPath) -> None:
        seen: dict[str, Origin] = {}
        for key, value in sorted(node.value, key=_is_merge):
            if _is_merge((key, value)):
                for merged in value.value if isinstance(value, SequenceNode) else [value]:
                    self.visit(merged, path)
                continue
            name = str(key.value)
            if name in seen:
                text = f"duplicate key, first given at {seen[name]}; keep one of them"
                self.problems.append(Problem(self.at(key), (*path, name), text))
                continue
            seen[name] = self.at(key)
            self.keys.setdefault((*path, name), self.at(key))
            # YAML places a value that is not there at the next token, often lines below its key.
            if value.value == "" and value.start_mark.index == value.end_mark.index:
                self.places.setdefault((*path, name), self.at(key))
            self.visit(value, (*path, name))

    def at(self, node: Node) -> Origin:
        if not self.origin.line:
            return self.origin
        return Origin(self.origin.source, node.start_mark.line + 1, node.start_mark.column + 1)


def _is_merge(pair: tuple[Node, Node]) -> bool:
    return bool(pair[0].tag == "tag:yaml.org,2002:merge")
