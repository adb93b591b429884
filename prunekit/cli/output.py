"""The output of a command: results on stdout, as text or as one JSON object; logs and progress on stderr."""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TextIO

import click

from prunekit.distributed.launcher import leads
from prunekit.utils.display import Displayed, text_of
from prunekit.utils.files import require_writable, write_json
from prunekit.utils.progress import reporting

# For terminals and pipes whose encoding has no such characters.
PLAINER = str.maketrans({"−": "-", "×": "x", "–": "-", "…": "...", "→": "->"})


class Console:
    """The console of a command; among several processes only the first writes."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json  # whether the result is one JSON object on stdout
        # A program started without a stderr (`2>&-`) has None there.
        self._speaks = leads()
        self.progress = self._speaks and sys.stderr is not None and sys.stderr.isatty()
        self._stdout: TextIO = sys.stdout

    def log(self, message: str) -> None:
        """Write a line for people to stderr."""
        if self._speaks:
            click.echo(message, err=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Redirect to stderr what a model's own code prints, so that stdout has the result alone.

        Where stderr is no terminal, a line every ten seconds says how far the command is.
        """
        context = click.get_current_context(silent=True)
        name = str("prunekit" if context is None else context.info_name)
        with redirect_stdout(sys.stderr), nullcontext() if self.progress or not self._speaks else reporting(None, name):
            yield

    def result(self, payload: Mapping[str, Any], text: str) -> None:
        """Write the result to stdout: the object with `--json`, else the text."""
        if not self._speaks:
            return
        shown = json.dumps(plain(payload), allow_nan=False) if self.as_json else text.rstrip("\n")
        click.echo(writable(shown, getattr(self._stdout, "encoding", None) or "utf-8"), file=self._stdout)

    def show(self, found: Displayed, payload: Mapping[str, Any], name: str, folder: Path | None, **texts: Any) -> None:
        """Write an analysis: as JSON into a folder, if there is one, and to stdout as text or JSON.

        Texts come `before` and `after` that of the analysis; `most` and `all_in` are as for `text_of`.
        """
        save(payload, folder, f"{name}.json", self)
        before, after = texts.pop("before", ""), texts.pop("after", "")
        self.result(payload, "" if self.as_json else f"{before}{text_of(found, **texts)}{after}")


def writable(text: str, encoding: str) -> str:
    """Return the text in characters of an encoding, so that a long job does not fail over a minus sign."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(PLAINER).encode(encoding, "replace").decode(encoding)
    return text


def check_folder(folder: Path | None) -> None:
    """Raise UsageError, before hours of work, if files cannot be written to a folder, which may not exist yet."""
    if folder is None:
        return
    require_writable(folder, folder=True, option="--output")


def plain(value: Any) -> Any:
    """Return a value in JSON's types; numbers that are not finite become null."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, str | bool | int | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    # NumPy's scalars and arrays turn themselves into Python's.
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def save(payload: Mapping[str, Any], folder: Path | None, name: str, console: Console) -> None:
    """Write the result as JSON into a folder, if there is one."""
    if folder is not None:
        write_json(folder / name, plain(payload))
        console.log(f"wrote {folder / name}")
