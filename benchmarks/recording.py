"""A terminal's recording as an animated SVG: a command's real output, at its real pace, faster by one factor.

    python benchmarks/recording.py record main_job.cast -- prunekit finetune recipes/resnet34.yaml
    python benchmarks/recording.py draw main_job.cast benchmarks/results/main_job.svg --columns 126 --rows 30

`record` runs the command in a terminal of 80 columns and writes what it prints, with the second of each piece, as an
asciicast (version 2). `draw` makes a picture of it that needs no JavaScript: every line appears by a CSS animation when
it appeared in the terminal, the last picture stays for some seconds, and it is the only one for readers who want no
motion. A clock shows the real time, without what is cut from long pauses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import select
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

COLUMNS, ROWS = 80, 24
CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)|\x1b.?")
WIDTH, LINE, PAD, BAR = 8.4, 19.0, 16.0, 34.0
"""Of a character and a line in pixels, of the margin, and of the bar with the title and the clock."""
PAUSE = 2.0
"""Seconds of a pause without output; of longer ones no more is kept: other programs may have had the machine."""
SLOT = 0.2
"""Seconds of the picture in which a line changes once at most."""
STYLE = """
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
text { white-space: pre; fill: #d8dee9; }
.title { fill: #9aa5b8; font-size: 13px; } .prompt { fill: #5eead4; } .off { visibility: hidden; }
@media (prefers-reduced-motion: reduce) { * { animation: none !important; } }
"""


def record(command: list[str], path: Path) -> int:
    """Runs a command in a terminal of its own and writes what it prints; returns its exit status."""
    import fcntl
    import pty
    import struct
    import termios

    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm", COLUMNS=str(COLUMNS), LINES=str(ROWS))
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    start = time.perf_counter()
    head = {"version": 2, "width": COLUMNS, "height": ROWS, "command": shlex.join(command)}
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(head) + "\n")
        while True:
            select.select([terminal], [], [])
            try:
                data = os.read(terminal, 65536)
            except OSError:  # Linux says so when the command has ended
                data = b""
            if not data:
                break
            piece = [round(time.perf_counter() - start, 3), "o", data.decode("utf-8", "replace")]
            file.write(json.dumps(piece, ensure_ascii=False) + "\n")
            file.flush()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@dataclass
class Terminal:
    """What a terminal shows: lines without an end below, and when each of them changed.

    Attributes:
        columns: characters of a line, after which it goes on in the next.
        lines: the lines, from the first.
        changes: second, number of the line, and its new text.
    """

    columns: int = COLUMNS
    lines: list[str] = field(default_factory=lambda: [""])
    changes: list[tuple[float, int, str]] = field(default_factory=list)
    row: int = 0
    column: int = 0

    def write(self, second: float, text: str) -> None:
        """Takes what a program printed at a second."""
        before = list(self.lines)
        for match in CONTROL.finditer(text):
            numbers, command, move, plain = match.groups()
            if plain:
                self._put(plain)
            elif move == "\r":
                self.column = 0
            elif move == "\n":
                self._down()
            elif command == "A":
                self.row = max(0, self.row - int(numbers or 1))
            elif command == "K":
                self.lines[self.row] = self.lines[self.row][: self.column]
        for number, line in enumerate(self.lines):
            if number >= len(before) or line != before[number]:
                self.changes.append((second, number, line.rstrip()))

    def _put(self, text: str) -> None:
        for letter in text:
            if self.column == self.columns:
                self._down()
                self.column = 0
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
            self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")


@dataclass(frozen=True)
class Shown:
    """A text and the seconds of the picture between which it is there; `until` None: to the end."""

    row: int
    text: str
    since: float
    until: float | None


def shown(changes: list[tuple[float, int, str]], factor: float) -> Iterator[Shown]:
    """Yields the texts of each line; of several in one slot the last."""
    by_row: dict[int, dict[float, str]] = {}
    for second, row, text in changes:
        slot = round(SLOT * -(-second / factor // SLOT), 3)  # the next slot, so that nothing is there too early
        by_row.setdefault(row, {})[slot] = text
    for row, texts in sorted(by_row.items()):
        times = [
            time for index, time in enumerate(texts) if not index or texts[time] != list(texts.values())[index - 1]
        ]
        for since, until in zip(times, [*times[1:], None], strict=True):
            if texts[since]:
                yield Shown(row, texts[since], since, until)


def draw(cast: Path, seconds: float, hold: float, columns: int = COLUMNS, rows: int = ROWS) -> str:
    """Returns the animated picture of a recording.

    Args:
        cast: the file that `record` wrote.
        seconds: how long the picture takes for the whole command.
        hold: how long its last state stays.
        columns, rows: of the terminal that is drawn; bars of progress are as wide as where they were recorded.
    """
    head, *pieces = map(json.loads, cast.read_text(encoding="utf-8").splitlines())
    terminal = Terminal(columns)
    terminal.write(0.0, f"$ {head['command']}\r\n")
    before = took = 0.0
    cut = any(end[0] - start[0] > PAUSE for start, end in itertools.pairwise([[0.0], *pieces]))
    for second, _, text in pieces:
        took, before = took + min(second - before, PAUSE), second
        terminal.write(took, text)
    factor, whole = took / seconds, seconds + hold
    texts = list(shown(terminal.changes, factor))
    last = max(one.row for one in texts if one.until is None)
    clock = [Shown(-1, _clock(factor * at), float(at), at + 1.0) for at in range(int(seconds))] + [
        Shown(-1, _clock(took), float(int(seconds)), None)
    ]
    frames = Keyframes(whole)
    lines = [_text(one, PAD, BAR + LINE * (one.row + 1), frames) for one in texts]
    right = PAD + WIDTH * (columns - 5)
    clocks = [_text(one, right, 22.0, frames, "title") for one in clock]
    up = frames.scroll(_bottoms(texts), last, rows)
    width, height = 2 * PAD + WIDTH * columns, BAR + LINE * rows + PAD
    pace = f"{factor:.0f}x{f', pauses cut at {PAUSE:g} s' if cut else ''}"
    title = f"{head['command']}, {factor:.0f} times as fast as it ran"
    label = escape(
        f"Recording of a terminal: {title}. It ends with: " + " / ".join(terminal.lines[last - 8 : last + 1])
    )
    top = f'<rect width="{width:g}" height="{BAR:g}" rx="8" fill="#222b3a"/>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img"',
            f'aria-label="{label}">',
            f"<style>{STYLE}{frames.css()}</style>",
            f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#151b26"/>',
            f'<clipPath id="screen"><rect y="{BAR:g}" width="{width:g}" height="{height - BAR - 4:g}"/></clipPath>',
            f'<g clip-path="url(#screen)"><g{up}>',
            *lines,
            f'</g></g>{top}<text x="{PAD:g}" y="22" class="title">{pace}</text>',
            *clocks,
            "</svg>\n",
        ]
    )


def _clock(second: float) -> str:
    return f"{int(second) // 60}:{int(second) % 60:02}".rjust(5)


def _bottoms(texts: list[Shown]) -> dict[float, int]:
    """Returns the lowest line that was there from each second on."""
    found: dict[float, int] = {}
    for one in sorted(texts, key=lambda one: one.since):
        found[one.since] = max(one.row, max(found.values(), default=0))
    return found


def _text(one: Shown, x: float, y: float, frames: Keyframes, kind: str = "") -> str:
    length = f' textLength="{WIDTH * len(one.text):.1f}"'
    inner = escape(one.text, quote=False)
    if one.text.startswith("$ "):
        inner = f'<tspan class="prompt">$</tspan>{inner[1:]}'
    return f'<text x="{x:g}" y="{y:g}"{length}{frames.of(one, kind)} xml:space="preserve">{inner}</text>'


class Keyframes:
    """CSS animations of texts that come and go, and of lines that move up; without motion the last state is shown.

    Args:
        whole: seconds of the picture.
    """

    def __init__(self, whole: float) -> None:
        self.whole = whole
        self._made: dict[tuple[float, float | None], str] = {}
        self._scroll = ""

    def of(self, one: Shown, kind: str = "") -> str:
        """Returns the attributes of a text; kind: its class."""
        classes = [kind] if kind else []
        style = ""
        if one.since or one.until is not None:
            name = self._made.setdefault((one.since, one.until), f"t{len(self._made)}")
            style = f' style="animation-name:{name}"'
            classes += ["a", *(["off"] if one.until is not None else [])]
        return (f' class="{" ".join(classes)}"' if classes else "") + style

    def scroll(self, bottoms: dict[float, int], last: int, rows: int) -> str:
        """Returns the attributes of all lines, which move up when there are more than the terminal has."""
        steps = {at: max(0, bottom + 1 - rows) for at, bottom in bottoms.items()}
        end = max(0, last + 1 - rows)
        if not end and not any(steps.values()):
            return ""
        moves = "".join(f"{self._share(at)}{{transform:translateY({-LINE * up:g}px)}}" for at, up in steps.items())
        self._scroll = f"@keyframes up{{{moves}}}\n"
        return f' class="a" style="animation-name:up;transform:translateY({-LINE * end:g}px)"'

    def css(self) -> str:
        """Returns the style sheet."""
        rules = [f".a{{animation:{self.whole:g}s step-end infinite}}"]
        for (since, until), name in self._made.items():
            states = [(0.0, "hidden")] * bool(since) + [(since, "visible")]
            states += [] if until is None else [(until, "hidden")]
            inner = "".join(f"{self._share(at)}{{visibility:{state}}}" for at, state in states)
            rules.append(f"@keyframes {name}{{{inner}}}")
        return "\n".join(rules) + "\n" + self._scroll

    def _share(self, at: float) -> str:
        return f"{100 * at / self.whole:.4g}%"


def main() -> None:
    """Records a command, or draws a recording."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "draw"))
    parser.add_argument("cast", type=Path)
    parser.add_argument("--seconds", type=float, default=18.0, help="of the picture, for the whole command")
    parser.add_argument("--hold", type=float, default=8.0, help="seconds that the last state stays")
    parser.add_argument("--columns", type=int, default=COLUMNS, help="of the picture's terminal")
    parser.add_argument("--rows", type=int, default=ROWS, help="of the picture's terminal")
    parser.add_argument("rest", nargs="+", metavar="PICTURE | -- COMMAND")
    options = parser.parse_args()
    if options.what == "record":
        sys.exit(record(options.rest, options.cast))
    size = options.columns, options.rows
    Path(options.rest[0]).write_text(draw(options.cast, options.seconds, options.hold, *size), encoding="utf-8")


if __name__ == "__main__":
    main()
