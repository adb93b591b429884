"""YAML from a file or an argument: bounded by what its aliases stand for, its depth and its numbers, with positions."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, Event, ScalarEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from prunekit.errors import DataError, PrunekitError
from prunekit.reading.text_files import MOST_BITS, MOST_LEVELS, read_text, shown

MOST_BYTES = 2**20
"""The largest file: recipes and descriptions of data, which people write."""
MOST_NODES = 2**17
"""Values, with each alias counted as all that it stands for: a few aliases of aliases stand for billions."""


class _BoundedConstructor(SafeConstructor):
    """Python values of nodes; where a value is wrong, its place is in the error, of whatever kind that was."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (YAMLError, RecursionError):
            raise
        except Exception as error:  # KeyError of a bool, ValueError of dates and digits, binascii.Error, TypeError
            reason = f"it is no {node.tag.rpartition(':')[2]}"
            raise ConstructorError(None, None, reason, node.start_mark) from error
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            reason = f"a whole number has {value.bit_length():,} bits, more than {MOST_BITS}"
            raise ConstructorError(None, None, reason, node.start_mark)
        if isinstance(value, str) and any("\ud800" <= sign <= "\udfff" for sign in value):
            raise ConstructorError(None, None, "text is not Unicode: half of a surrogate pair", node.start_mark)
        if isinstance(value, (bytes, set)):
            raise ConstructorError(None, None, f"expected plain values, got {node.tag}", node.start_mark)
        return value

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        for key, _ in node.value if isinstance(node, MappingNode) else ():
            if not isinstance(key, ScalarNode):
                raise ConstructorError(None, None, "a key is a list or a mapping", key.start_mark)
        return super().construct_mapping(node, deep)


def compose(text: str) -> Node | None:
    """Return the nodes of one YAML document, with the place of each; None if it is empty.

    A node may contain itself, by an alias to a node that the alias lies in.
    """
    _require_bounded(text, loops=True)
    with _anchors_named_again():
        found: Node | None = YAML(typ="safe", pure=True).compose(text)
    return found


def construct(text: str, *, duplicates: bool = False) -> Any:
    """Return the values of one YAML document: lists, mappings, text, numbers, booleans, None and dates."""
    loader = YAML(typ="safe", pure=True)
    loader.Constructor = _BoundedConstructor
    loader.allow_duplicate_keys = duplicates
    try:
        with _anchors_named_again():
            return loader.load(text)
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise YAMLError(f"{type(error).__name__}: {error}") from error


@contextmanager
def _anchors_named_again() -> Iterator[None]:
    """Accept an anchor that is defined twice, as YAML does, without ruamel's warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReusedAnchorWarning)
        yield


def read_yaml(path: Path, expected: str = "YAML", raises: type[PrunekitError] = DataError) -> Any:
    """Return the values of a YAML file."""
    return parse_yaml(read_text(path, expected, raises, most=MOST_BYTES), shown(path), expected, raises)


def parse_yaml(text: str, where: str, expected: str = "YAML", raises: type[PrunekitError] = DataError) -> Any:
    """Return the values of YAML that a stranger may have written."""
    try:
        _require_bounded(text, loops=False)
        return construct(text)
    except YAMLError as error:
        place, reason = place_of(error), reason_of(error)
        at = f"{where}:{place[0]}:{place[1]}" if place else where
        raise raises(f"{at}: expected {expected}, but: {reason}") from error


def place_of(error: YAMLError) -> tuple[int, int] | None:
    """Return the line and the column of a problem, from 1."""
    mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
    return None if mark is None else (mark.line + 1, mark.column + 1)


def reason_of(error: YAMLError) -> str:
    """Return what is wrong, in one line."""
    if isinstance(error, MarkedYAMLError):
        return "; ".join(str(part) for part in (error.context, error.problem) if part)
    return (str(error).splitlines() or [type(error).__name__])[0]


def _require_bounded(text: str, *, loops: bool) -> None:
    """Raise at a document that is too deep, stands for too many values, or has loops where they are not allowed."""
    if len(text) > MOST_BYTES:
        raise YAMLError(f"it has {len(text):,} characters, more than {MOST_BYTES:,}")
    open_: list[tuple[str | None, int]] = []  # anchors, and the count of values before them
    sizes: dict[str, int | None] = {}
    count = 0
    for event in YAML(typ="safe", pure=True).parse(text):
        if isinstance(event, CollectionEndEvent):
            anchor, before = open_.pop()
            if anchor is not None:
                sizes[anchor] = count - before
        elif isinstance(event, AliasEvent):
            size = sizes.get(event.anchor, 1)
            if size is None and not loops:
                raise _problem(event, "expected plain values, got an alias to itself")
            count += size or 1
        elif isinstance(event, (ScalarEvent, CollectionStartEvent)):
            inner = isinstance(event, CollectionStartEvent)
            if inner:
                open_.append((event.anchor, count))
            count += 1
            if event.anchor is not None:
                sizes[event.anchor] = None if inner else 1
        if len(open_) > MOST_LEVELS:
            raise _problem(event, f"lists and mappings lie in each other more than {MOST_LEVELS} deep")
        if count > MOST_NODES:
            raise _problem(event, f"it stands for more than {MOST_NODES:,} values, with all that its aliases stand for")


def _problem(event: Event, text: str) -> YAMLError:
    return MarkedYAMLError(None, None, text, event.start_mark)
