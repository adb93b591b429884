"""Every model of a zoo: traced, planned at half of the channels, compacted, trained a step, saved and loaded again.

A model passes when the masked model equals the compact one to 1e-9 in float64, in the trial at every operator; when the
compact model runs forward and backward in train and in eval mode, and comes back from its folder bit for bit; when at
least 95 % of its parameters lie on a free axis and at most 32 % of its MACs are left at a uniform share of 0.5. What is
exact but reaches less is `partly`. Weights are random, and what would be zero or one is randomized, so that nothing is
equal by chance. One process a model, one thread; inputs have the size the model was made for.

    python benchmarks/coverage.py [--zoo torchvision|timm|hf] [--models A,B] [--size 96] [--limit SECONDS] [--json]
                                  [--keep]
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import math
import multiprocessing
import resource
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from common import RESULTS, keep, show
from coverage_check import check, failed, where_from
from zoo_cases import Zoo

from prunekit.jobs.run.run_folder import environment

FORK = multiprocessing.get_context("fork")
"""A child has all modules already: importing them takes longer than most models do."""

ZOOS = ("torchvision", "timm", "hf")
COLUMNS = {
    "model": "model",
    "verdict": "verdict",
    "max_relative_difference": "largest difference",
    "free_parameter_share": "parameters free",
    "free_macs_share": "MACs free",
    "macs_left": "MACs left",
    "seconds": "seconds",
    "reason": "reason",
}


def check_one(zoo: Zoo, name: str, side: int | None) -> dict[str, Any]:
    """One model, in this process."""
    torch.manual_seed(0)
    try:
        case = zoo.build(name, side)
    except Exception as error:  # a constructor of the zoo fails
        return failed(f"not built: {where_from(error)}")
    return check(case)


def in_process(zoo: Zoo, name: str, side: int | None, limit: float) -> dict[str, Any]:
    """One model in a process of its own, with a limit on its processor time, and on ten times that by the clock."""
    receiver, sender = FORK.Pipe(duplex=False)

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit) + 5))
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        sender.send(check_one(zoo, name, side))

    process = FORK.Process(target=run)
    process.start()
    sender.close()
    try:
        row: dict[str, Any] = (
            receiver.recv() if receiver.poll(10 * limit) else failed(f"not done after {10 * limit:g} s")
        )
    except EOFError:  # the process has ended without a row
        process.join()
        late = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        row = failed(f"not done after {limit:g} s" if late else f"ended with exit status {process.exitcode}")
    process.kill()
    process.join()
    return {"model": name, **row}


def rows(zoo: Zoo, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows, each as soon as it is known."""
    for name in options.models or zoo.names():
        row = in_process(zoo, name, options.size, options.limit)
        if options.json:
            print(json.dumps(row), flush=True)
        yield row


def as_markdown(found: Sequence[dict[str, Any]], zoo: str) -> str:
    """A table with a line for each model, failures first."""
    order = ("failed", "partly", "passed")
    lines = [f"# {zoo}: {_summary(found)}", "", "| " + " | ".join(COLUMNS.values()) + " |", "|---" * len(COLUMNS) + "|"]
    for row in sorted(found, key=lambda row: order.index(row["verdict"])):
        lines.append("| " + " | ".join(_cell(column, row.get(column)) for column in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column == "max_relative_difference":
        return f"{value:.1e}"
    if isinstance(value, float) and column != "seconds":
        return f"{value:.1%}"
    return str(value).replace("|", "\\|")


def _summary(found: Sequence[dict[str, Any]]) -> str:
    counts = {verdict: sum(row["verdict"] == verdict for row in found) for verdict in ("passed", "partly", "failed")}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + f" of {len(found)}"


def _alike(name: str, zoo: Zoo) -> str:
    close = difflib.get_close_matches(name, zoo.names())
    return f"; did you mean {', '.join(close)}?" if close else ""


def _keep(found: list[dict[str, Any]], zoo: Zoo, options: argparse.Namespace) -> None:
    """Writes all rows of a zoo, or those of some models in place of their earlier ones."""
    name = f"coverage_{options.zoo}"
    size = options.size or zoo.SIZE
    setting: dict[str, Any] = {"zoo": options.zoo, "size": size, "batch": 1, "threads": 1, "share": 0.5}
    kept = None
    if options.models:
        kept = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        now = environment()
        other = {key: value for key, value in now.items() if kept["environment"].get(key) != value}
        new = {row["model"]: {**row, **({"environment": other} if other else {})} for row in found}
        found = [*(new.pop(row["model"], row) for row in kept["rows"]), *new.values()]
        setting = kept["setting"]
    print(keep(name, found, setting, kept and kept["environment"]), file=sys.stderr)
    (RESULTS / f"{name}.md").write_text(as_markdown(found, options.zoo), encoding="utf-8")


def main() -> None:
    """Checks the models and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", choices=ZOOS, default="torchvision")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument(
        "--models", type=lambda given: given.split(","), help="comma-separated; all of the zoo when not given"
    )
    parser.add_argument(
        "--size", type=int, help="side of the images, for models that take any; their own when not given"
    )
    parser.add_argument("--limit", type=float, default=300, help="seconds for a model")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="write benchmarks/results/coverage_ZOO.json and .md; with --models only their rows change",
    )
    options = parser.parse_args()
    zoo: Any = importlib.import_module(f"zoo_{options.zoo}")
    for name in options.models or ():
        if not zoo.knows(name):
            parser.error(f"--models: {options.zoo} has no model {name!r}{_alike(name, zoo)}")
    found = list(rows(zoo, options))
    if not options.json:
        show(found, as_json=False)
    print(_summary(found), file=sys.stderr)
    if options.keep:
        _keep(found, zoo, options)


if __name__ == "__main__":
    main()
