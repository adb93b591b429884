"""Numbers that a module's Python makes of a width, as in `scores / math.sqrt(k.shape[-1])`: the dense ones stay.

Unlike a size, such a number must be what it was. Only where values part are those looked for, in the expression that
ran there, that are others in the compact model; and only those are fixed that no larger batch changes.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import nn

from prunekit.channels.batches import twice
from prunekit.channels.comparing import Divergence, Key, watch
from prunekit.channels.doubled import DoubledWhileRunning, as_double, to_double
from prunekit.channels.map import SizeAttribute
from prunekit.channels.operators import Run
from prunekit.channels.places import Place, place_of
from prunekit.channels.sites import Site, definition, frame_here, operands_at
from prunekit.channels.syntax import number, value_of

Numbers = dict[tuple[str, Place], int]
"""Path of a module and a place in one of its methods -> the number there."""


class Scales:
    """Compares the numbers in a model's Python with those in the Python of a compact one."""

    def __init__(self, model: nn.Module, examples: list[tuple[Any, ...]]) -> None:
        self._model, self._examples = model, examples

    def at(self, divergence: Divergence, run: Run, compact: nn.Module) -> list[SizeAttribute]:
        """Numbers that other widths changed where values part, as sizes that no plan changes.

        In all modules of the class that computes with them.
        """
        example = as_double(self._examples[run.example])
        small = self._numbers(compact, example, run, divergence.key) if divergence.operator else {}
        dense = self._numbers(self._model, example, run) if small else {}
        changed = {key for key, value in small.items() if dense.get(key, value) != value}
        if not changed:
            return []
        larger = self._numbers(self._model, twice(example), run)
        classes = {type(self._model.get_submodule(path)) for path, _ in changed}
        places = {place for _, place in changed}
        return [
            SizeAttribute(path, str(place), None, np.zeros((value, 1), dtype=np.int64))
            for (path, place), value in dense.items()
            if place in places and type(self._model.get_submodule(path)) in classes
            if larger.get((path, place)) == value
        ]

    def _numbers(self, model: nn.Module, example: tuple[Any, ...], run: Run, at: Key | None = None) -> Numbers:
        """What a forward pass computes with, at one operator or at all of them, as far as the model runs."""
        with DoubledWhileRunning(model, to_double, borrowed=run.borrowed) as running:
            paths = {module: path for path, module in running.model.named_modules()}
            numbers: Numbers = {}

            def see(key: Key, *_: Any) -> None:
                found = frame_here(sys._getframe(3)) if at in (None, key) else None
                if found is not None:
                    frame, method, owner = found
                    for node in operands_at(Site(method, frame.f_code, frame.f_lasti)):
                        for place, value in _numbers_in(node, method, frame.f_locals):
                            numbers[paths[owner], place] = value

            watch(running.model, example, run, see)
        return numbers


def _numbers_in(node: ast.expr, method: CodeType, names: Mapping[str, Any]) -> Iterator[tuple[Place, int]]:
    """Whole numbers that an expression reads off variables and shapes; a variable's own expression where it is none."""
    for part in ast.walk(node):
        value = _value(part, names)
        if type(value) is int and isinstance(part, ast.expr) and (place := place_of(method, part)) is not None:
            yield place, value
        elif isinstance(value, float) and isinstance(part, ast.Name) and (found := definition(method)) is not None:
            given = value_of(part.id, found[0])
            yield from () if given is None else _numbers_in(given, method, names)


def _value(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """The value of a variable, or of one element of a tensor's shape; None for anything else."""
    match node:
        case ast.Name(name):
            return names.get(name)
        case ast.Subscript(ast.Attribute(ast.Name(name), "shape"), index):
            pass
        case ast.Call(ast.Attribute(ast.Name(name), "size"), [index]):
            pass
        case _:
            return None
    of, at = names.get(name), number(index)
    if isinstance(of, torch.Tensor) and at is not None and -of.dim() <= at < of.dim():
        return of.shape[at]
    return None
