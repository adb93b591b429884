"""Mutants of the files that a stranger may have written, thousands of them, given to every reader of the package.

Each reader has sound files (`fuzz_readers.py`). One at a time is damaged: bytes cut, flipped, doubled or replaced;
values of other types, absent, renamed or deep; arrays of other shapes and dtypes; parts of archives changed and packed
again, and checksums made right again, which else would hide what lies behind them. The reader then reads all of them,
and uses what it read to the end. `loaded` counts the inputs that were taken, `refused` those that ended in an error of
prunekit's own with a message that can be printed; any other error, a crash, or more than `--limit` seconds is
`unclean`. The same seed gives the same inputs. A reader runs in a process of its own, on one thread.

    python benchmarks/fuzz.py [--readers A,B] [--inputs 600] [--seed 0] [--limit 20] [--json] [--keep]
"""

from __future__ import annotations

import argparse
import html
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from common import RESULTS, as_markdown, keep, show
from fuzz_readers import READERS, Sound
from mutants import changed_arrays, changed_json, changed_values, damaged_bytes
from ruamel.yaml import YAML
from safetensors.numpy import load, save

from prunekit.errors import PrunekitError

COLUMNS = ("reader", "inputs", "loaded", "refused", "unclean", "slowest_s")
SHOWN = 20
"""Faults of a reader that are kept."""


class EndlessError(BaseException):
    """A reader took too long; nothing that catches `Exception` takes it for an error of a file."""


def mutants_of(path: Path, count: int, seed: int) -> Iterator[bytes]:
    """Yields contents in the place of a sound file's."""
    sound = path.read_bytes()
    damaged = damaged_bytes(sound, count, seed)
    changed = _changed(path.suffix, sound, count, seed)
    for number in range(count):
        found = next(changed, None) if number % 3 else None
        yield next(damaged) if found is None else found


def _changed(suffix: str, sound: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Yields contents that a parser takes, with changed values; none for what has no parser here."""
    match suffix:
        case ".json":
            yield from changed_json(json.loads(sound), count, seed)
        case ".jsonl":
            rows = [json.loads(line) for line in sound.splitlines()]
            for values in changed_values(rows, count, seed):
                yield "\n".join(map(json.dumps, values if isinstance(values, list) else [values])).encode()
        case ".yaml":  # JSON is YAML
            yield from changed_json(YAML(typ="safe", pure=True).load(sound.decode()), count, seed)
        case ".npz":
            with np.load(io.BytesIO(sound)) as archive:
                arrays = dict(archive)
            for values in changed_arrays(arrays, count, seed):
                made = io.BytesIO()
                np.savez(made, **values)
                yield made.getvalue()
        case ".safetensors":
            for values in changed_arrays(load(sound), count, seed):
                try:
                    yield save({name: np.ascontiguousarray(array) for name, array in values.items()})
                except Exception:  # of dtypes that the format has not
                    continue
        case ".xml":
            yield from _with_attributes(sound, count, seed)
        case ".onnx":
            yield from _with_metadata(sound, count, seed)
        case ".pt" | ".th" | ".pt2" if zipfile.is_zipfile(io.BytesIO(sound)):
            yield from _repacked(sound, count, seed)


def _values(text: str) -> Any:
    """Returns the values of JSON; of another text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _with_attributes(sound: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Yields an OpenVINO file with a changed attribute, of those in which it says what it takes and gives above all."""
    written = sound.decode()
    found = [*re.finditer(r'value="([^"]*&quot;[^"]*)"', written)] * 4 + [*re.finditer(r'="([^"]*)"', written)]
    draw = random.Random(seed)
    for index in range(count):
        place = draw.choice(found)
        mutant = next(changed_json(_values(html.unescape(place[1])), 1, seed + index)).decode("utf-8", "replace")
        yield (written[: place.start(1)] + html.escape(mutant) + written[place.end(1) :]).encode()


def _with_metadata(sound: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Yields an ONNX file with changed metadata, by which it says what it takes and gives."""
    import onnx

    model = onnx.load_from_string(sound)
    for entry in model.metadata_props:
        told = entry.value
        for mutant in changed_json(_values(told), count // len(model.metadata_props) + 1, seed):
            entry.value = mutant.decode("utf-8", "replace")
            yield model.SerializeToString()
        entry.value = told


def _repacked(sound: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Yields an archive packed again with one member changed."""
    with zipfile.ZipFile(io.BytesIO(sound)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    names = sorted(members)
    made = {}
    for name, content in members.items():
        each = 2 * count // len(names) + 1
        made[name] = (
            changed_json(json.loads(content), each, seed)
            if name.endswith(".json")
            else damaged_bytes(content, each, seed)
        )
    draw = random.Random(seed)
    while True:
        name = draw.choice(names)
        content = next(made[name], None)
        if content is None:
            return
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for other, there in members.items():
                archive.writestr(other, content if other == name else there)
        yield packed.getvalue()


def try_reader(name: str, inputs: int, seed: int, limit: int, at: Path) -> dict[str, Any]:
    """Gives mutants to a reader, in this process, and returns its row; `at` gets the input that is being tried."""

    def endless(*_: Any) -> None:
        raise EndlessError

    signal.signal(signal.SIGALRM, endless)
    row: dict[str, Any] = {"reader": name, "inputs": 0, "loaded": 0, "refused": 0, "unclean": 0, "slowest_s": 0.0}
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        torch.manual_seed(0)
        sound = READERS[name](Path(place))
        known = {path: path.read_bytes() for path in Path(place).rglob("*") if path.is_file()}
        sound.sign()
        sound.read()
        start = time.perf_counter()
        for number, file in enumerate(sound.files):
            each = -(-inputs // len(sound.files))
            _restore(known)
            for index, mutant in enumerate(mutants_of(file, each, seed * 1000 + number)):
                at.write_text(json.dumps({**row, "faults": faults, "file": file.name, "index": index}))
                _restore(known)
                file.write_bytes(mutant)
                sound.sign()
                began = time.perf_counter()
                kind, said = outcome(sound, limit)
                row["inputs"] += 1
                row[kind] += 1
                row["slowest_s"] = max(row["slowest_s"], time.perf_counter() - began)
                if kind == "unclean" and len(faults) < SHOWN:
                    faults.append(f"{file.name} {index}: {said}")
    return {**row, "seconds": round(time.perf_counter() - start, 1), "faults": faults}


def _restore(known: dict[Path, bytes]) -> None:
    for path, content in known.items():
        if not path.is_file() or path.read_bytes() != content:
            path.write_bytes(content)


def outcome(sound: Sound, limit: int) -> tuple[str, str]:
    """Returns `loaded`, `refused` or `unclean`, and what was said."""
    signal.alarm(limit)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sound.read()
    except PrunekitError as error:
        said = str(error)
        broken = not said.strip() or "\0" in said or any("\ud800" <= sign <= "\udfff" for sign in said)
        return ("unclean", f"a message that cannot be printed: {ascii(said)[:200]}") if broken else ("refused", said)
    except EndlessError:
        return "unclean", f"it did not end within {limit} s"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        import traceback

        last = traceback.extract_tb(error.__traceback__)
        own = next((frame for frame in reversed(last) if "/prunekit/" in frame.filename), last[-1])
        return (
            "unclean",
            f"{type(error).__name__}: {ascii(str(error))[:160]} (at {Path(own.filename).name}:{own.lineno})",
        )
    finally:
        signal.alarm(0)
    return "loaded", ""


def in_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the row of a reader, from a process of its own, which a damaged file may crash."""
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder) / "at.json"
        given = ["--inputs", options.inputs, "--seed", options.seed, "--limit", options.limit]
        command = [sys.executable, __file__, "--only", name, "--at", at, *given]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return found
        row = json.loads(at.read_text()) if at.is_file() else dict.fromkeys(COLUMNS[1:], 0) | {"faults": []}
        last = (done.stderr.strip().splitlines() or [""])[-1]
        where = f"{row.pop('file', '?')} {row.pop('index', '?')}"
        fault = f"{where}: the process ended with {done.returncode}: {last[:200]}"
        return {**row, "reader": name, "unclean": row["unclean"] + 1, "faults": [*row["faults"], fault]}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", default="", help="names, or their beginnings; all without")
    parser.add_argument("--inputs", type=int, default=600, help="of each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=20, help="seconds of an input")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", action="store_true", help="write results/fuzz.json and .md; other readers' rows stay")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--at", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    torch.set_num_threads(1)
    if options.only:
        print(json.dumps(try_reader(options.only, options.inputs, options.seed, options.limit, options.at)))
        return
    asked = [name for name in options.readers.split(",") if name]
    names = [name for name in READERS if not asked or any(name.startswith(one) for one in asked)]
    rows = []
    for name in names:
        rows.append(in_process(name, options))
        show([{column: rows[-1].get(column) for column in COLUMNS}], as_json=options.json)
        for fault in rows[-1]["faults"]:
            print(f"  {fault}", file=sys.stderr)
        if options.keep:
            _kept(rows, options)


def _kept(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Writes the rows beside those of readers that were not tried now."""
    path = RESULTS / "fuzz.json"
    before = json.loads(path.read_text())["rows"] if path.is_file() else []
    made = {row["reader"]: row for row in [*before, *rows]}
    every = [made[name] for name in READERS if name in made]
    keep("fuzz", every, {"seed": options.seed, "limit_s": options.limit})
    total = {"reader": "all"} | {
        key: sum(row[key] for row in every) for key in ("inputs", "loaded", "refused", "unclean")
    }
    shown = [*every, total | {"slowest_s": max(row["slowest_s"] for row in every)}]
    table = as_markdown([{key: row[key] for key in COLUMNS} for row in shown], COLUMNS)
    head = "# Files of strangers\n\nWhat became of damaged files, reader by reader: see `benchmarks/fuzz.py`.\n\n"
    path.with_suffix(".md").write_text(head + table + "\n")


if __name__ == "__main__":
    main()
