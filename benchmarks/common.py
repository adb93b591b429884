"""What the benchmarks share: one JSON object a line or a table, results with the hardware beside them."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"


def show(rows: Iterable[dict[str, Any]], *, as_json: bool) -> None:
    """Prints rows: one JSON object a line, or a table."""
    rows = list(rows)
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *[[_cell(row.get(column)) for column in columns] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def keep(
    name: str, rows: Sequence[dict[str, Any]], setting: dict[str, Any], where: dict[str, Any] | None = None
) -> Path:
    """Writes rows with their setting and environment, this one if not given, to `benchmarks/results/<name>.json`."""
    from prunekit.jobs.run.run_folder import environment
    from prunekit.utils.files import write_json

    path = RESULTS / f"{name}.json"
    write_json(path, {"setting": setting, "environment": where or environment(), "rows": list(rows)})
    return path


def rows_before(name: str, made: Iterable[dict[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of a file of results that were not made again, without their summary.

    Args:
        name: of the file.
        made: rows that take the place of earlier ones.
        keys: what tells a row from others; where a seed is among them, rows of a summary lack it.
    """
    path = RESULTS / f"{name}.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    again = {tuple(row[key] for key in keys) for row in made}
    return [row for row in before if {*keys} <= row.keys() and tuple(row[key] for key in keys) not in again]


def collected(rows: Iterable[dict[str, Any]], *, as_json: bool) -> list[dict[str, Any]]:
    """All rows, each printed as soon as it is there with `as_json`; an error of prunekit ends the script."""
    from prunekit.errors import PrunekitError

    found = []
    try:
        for row in rows:
            found.append(row)
            if as_json:
                print(json.dumps(row), flush=True)
    except PrunekitError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    return found


def shown_as_made(
    rows: Iterable[dict[str, Any]], options: argparse.Namespace, parser: argparse.ArgumentParser, what: str
) -> list[dict[str, Any]]:
    """All rows: with `--json` each is printed as soon as it is there, else a table of them at the end.

    Args:
        options: `json`, and `only`, by which rows were chosen.
        parser: ends the script where there is none.
        what: rows are called there.
    """
    found = []
    for row in rows:
        found.append(row)
        if options.json:
            print(json.dumps(row), flush=True)
    if not found:
        parser.error(f"--only {options.only}: no {what} begins so")
    if not options.json:
        show(found, as_json=False)
    return found


def cold(script: str, *arguments: str, limit: float | None = None) -> subprocess.CompletedProcess[str]:
    """One repetition of a script's `--once` in a process of its own, on one thread.

    Raises:
        subprocess.TimeoutExpired: it took longer than `limit` seconds.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", script, "--once", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=limit)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most of some repetitions."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratio(times_ms: Sequence[float], baseline_ms: Sequence[float]) -> dict[str, float]:
    """Of rounds that timed two things alternately: the one over the other, median and 10th to 90th percentile."""
    low, median, high = np.percentile(np.divide(times_ms, baseline_ms), (10, 50, 90))
    return {
        "ratio": float(median),
        "low": float(low),
        "high": float(high),
        "median_ms": statistics.median(times_ms),
        "baseline_ms": statistics.median(baseline_ms),
    }


def onnx_speedup(dense: Any, pruned: Any, example: Any) -> dict[str, Any]:
    """How many times faster ONNX Runtime runs the pruned model, at batch 1 on one thread, with its 95 % interval."""
    import torch

    import prunekit as pk
    from prunekit.backends.session import inputs_like
    from prunekit.measure.latency.comparison import measure_latency

    settings = pk.LatencySettings(batches=(1,), threads=(1,), repeats=60, runtimes=("onnxruntime",))
    models = {"dense": deepcopy(dense), "pruned": deepcopy(pruned)}
    found = measure_latency(models, inputs_like((example,), drawn=False), settings, [torch.device("cpu")])
    if not found.speedup:
        return {"not_timed": "; ".join(str(failure) for failure in found.failures)[:160]}
    row = found.speedup[0]
    return {"speedup": row["median"], "speedup_low": row["low"], "speedup_high": row["high"]}


def reductions(text: str) -> list[float]:
    """Numbers with commas between them, each above 1."""
    return _numbers(text, 1, math.inf, "numbers above 1")


def shares(text: str, example: str = "") -> list[float]:
    """Numbers with commas between them, each above 0 and below 1; an example is for the message."""
    return _numbers(text, 0, 1, f"numbers between 0 and 1{example and f', such as {example}'}")


def _numbers(text: str, above: float, below: float, expected: str) -> list[float]:
    """Numbers with commas between them, within bounds that are none of them."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(above < value < below for value in values):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")
    return values


def as_markdown(rows: Iterable[dict[str, Any]], columns: Sequence[str]) -> str:
    """Some columns of rows as a table."""
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(column)).replace("|", "\\|").replace("\n", " ") for column in columns] for row in rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def as_items(facts: dict[str, Any]) -> str:
    """Facts as a list."""
    return "".join(f"- {name}: {value}\n" for name, value in facts.items())


class Rows:
    """Rows in a file, one JSON object a line, each written as soon as it is there: a run goes on where it was.

    Args:
        path: of the file; None keeps them in memory alone.
        keys: a row of the same values for these takes the place of an earlier one.
        as_json: prints each new row.
    """

    def __init__(self, path: Path | None, keys: Sequence[str], *, as_json: bool) -> None:
        self.path, self.keys, self.as_json = path, keys, as_json
        self.found: dict[tuple[Any, ...], dict[str, Any]] = {}
        text = path.read_text(encoding="utf-8") if path is not None and path.exists() else ""
        for line in text.splitlines():
            self._take(json.loads(line))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.found.values())

    def get(self, **values: Any) -> dict[str, Any] | None:
        """The row of these values of the keys."""
        return self.found.get(tuple(values[key] for key in self.keys))

    def add(self, row: dict[str, Any]) -> None:
        """Keeps a row, and writes it."""
        self._take(row)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if self.as_json:
            print(json.dumps(row), flush=True)

    def _take(self, row: dict[str, Any]) -> None:
        self.found[tuple(row.get(key) for key in self.keys)] = row
