"""The place in a model's own code that an exporter failed at: the module's path, the file, the line and its text."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

LIBRARY = str(Path(torch.__file__).parent)
OWN = tuple(str(Path(__file__).parents[2] / room) for room in ("backends", "utils"))
LAYERS = str(Path(LIBRARY, "nn", "modules"))
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')
LONGEST = 200
"""Characters of a message of an exporter that are shown."""


def failure(error: BaseException, model: nn.Module) -> str:
    """Return why an exporter failed, and where in the model: `ValueError: ... at layer1.0 (net.py:12: x.item())`."""
    where = place_of_error(error, model)
    return reason(error) + (f" at {where}" if where else "")


def reason(error: BaseException) -> str:
    """Return the first line of the original error, which exporters wrap in advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = f"{type(error).__name__}: {re.sub(r' +[(]unhinted: .*', '', lines[0])}"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def place_of_error(error: BaseException, model: nn.Module) -> str:
    """Return the innermost place in a model's code that an error was raised from; empty if none is known."""
    paths = {id(module): path for path, module in model.named_modules()}
    chain = list(_chain(error))
    for one in chain:
        for frame, _ in reversed(list(_frames(one))):
            node = frame.f_locals.get("node", frame.f_locals.get("n"))
            if isinstance(node, torch.fx.Node) and (found := place_of_node(node)):
                return found
    return next(filter(None, (_innermost(_frames(one), paths) for one in chain)), "")


def place_of_caller(model: nn.Module) -> str:
    """Return the innermost place in a model's code that runs now, further out in the stack; empty if none does."""
    frames: list[tuple[FrameType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _innermost(reversed(frames), {id(module): path for path, module in model.named_modules()})


def _innermost(frames: Iterable[tuple[FrameType, int]], paths: Mapping[int, str]) -> str:
    path, place = None, ""
    for frame, line in frames:
        arguments = frame.f_code.co_varnames[:1]  # self, whatever it is called
        path = paths.get(id(frame.f_locals.get(*arguments)) if arguments else 0, path)
        if path is not None and not is_of_torch(frame.f_code.co_filename):
            place = _place(path, frame.f_code.co_filename, line)
    return place


def place_of_node(node: torch.fx.Node) -> str:
    """Return the place in a model's code that a node of an exported program comes from; empty if it is unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values()]
    lines = list(FRAME.finditer(node.meta.get("stack_trace") or ""))
    own = [found for found in lines if not is_of_torch(found["file"])] or lines
    if not own:
        return ""
    return _place(paths[-1] if paths else "", own[-1]["file"], int(own[-1]["line"]))


def place_of_line(location: Any) -> str:
    """Return the place of a line that `torch.export` recorded a condition on shapes for; empty if it is unknown."""
    frame = getattr(location, "framework_loc", None)
    frame = getattr(location, "maybe_user_loc", None) or frame
    if frame is None or not hasattr(frame, "filename"):
        return "" if frame is None else str(frame)
    return _place("", frame.filename, frame.lineno)


def _place(path: str, file: str, line: int) -> str:
    text = linecache.getline(file, line).strip()
    shown = f"{Path(file).name}:{line}" + (f": {text}" if text else "")
    return f"{path} ({shown})" if path else shown


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the original error first, then those that wrap it."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or current.__context__
    return reversed(found)


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames that an error passed through, the outermost first, each with its line."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def is_of_torch(file: str) -> bool:
    """Return whether a file is of torch's machinery or of the export, and not of a model or one of torch's layers."""
    if file == "<string>":  # code that torch made
        return True
    if file.startswith(LAYERS):
        return file == f"{LAYERS}{os.sep}module.py"
    return file.startswith((LIBRARY, *OWN))
