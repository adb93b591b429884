"""Every model of a zoo as users call it: traced, planned at half of the channels, compacted, trained, saved, exported.

A model passes when the masked model equals the compact one to 1e-9 in float64, in the trial at every operator; when the
compact model runs forward and backward in train and in eval mode, comes back from its folder and from `torch.save` bit
for bit, and does what its users do next (`generate`, `fuse`); and when no more of its inner weights is left at half of
the channels than 5 % beyond what halving every width by hand would leave (`least`, see `coverage_least.py`). What is
exact but keeps more is `partly`, with what stops the rest. What is beyond is counted weight by weight: where attention
loses heads and positions in them, and so more than half, that makes up for nothing else. Weights are random, and what
would be zero or one is randomized, so that nothing is equal by chance. One process a model, one thread; inputs have the
size the model was made for. ONNX is `yes` where ONNX Runtime agrees with eager to 1e-4; `--no-export` leaves it out.

    python benchmarks/coverage.py [--zoo torchvision|timm|hf|ultralytics|geometric|diffusers|packages] [--models A,B]
                                  [--size 96] [--limit SECONDS] [--no-export] [--json] [--keep]
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from common import RESULTS, keep, show
from coverage_check import check, failed, where_from
from zoo_cases import OWN, Zoo
from zoo_process import in_process as apart

from prunekit.jobs.run.run_folder import environment

EXPORTS = ("onnx_dense", "onnx_compact")

ZOOS = ("torchvision", "timm", "hf", "ultralytics", "geometric", "diffusers", "packages")
COLUMNS = {
    "model": "model",
    "verdict": "verdict",
    "max_relative_difference": "largest difference",
    "weights_left": "weights left",
    "least": "least",
    "beyond": "beyond it",
    "free_parameter_share": "parameters free",
    "macs_left": "MACs left",
    "seconds": "seconds",
    "pickles": "pickles",
    "generates": "generates",
    "fuses": "own fuse",
    "own_save": "own save",
    "own_average": "own average",
    "own_export": "own exporter",
    "onnx_dense": "ONNX, dense",
    "onnx_compact": "ONNX, compact",
    "reason": "what stops the rest",
}


def check_one(zoo: Zoo, name: str, side: int | None, *, export: bool = True) -> Iterator[dict[str, Any]]:
    """One model, in this process: its row in parts, each as soon as it is known."""
    torch.manual_seed(0)
    try:
        case = zoo.build(name, side)
    except Exception as error:  # a constructor of the zoo fails
        yield failed(f"not built: {where_from(error)}")
        return
    yield from check(case, export=export)


def in_process(zoo: Zoo, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One model in a process of its own, with a limit on its processor time, and on ten times that by the clock.

    Exports have the same limits once more: what is not done by then does not take the rest of the row along.
    """
    row, problem = apart(lambda: check_one(zoo, name, options.size, export=options.export), options.limit)
    return {"model": name, **(_judged(row, problem) if row else failed(problem))}


def _judged(row: dict[str, Any], problem: str) -> dict[str, Any]:
    """A row with its exports: where the dense model's works and the compact one's does not, that stops something."""
    if problem and row["verdict"] != "failed":
        row[next((column for column in EXPORTS if column not in row), "reason")] = problem
    dense, compact, own = (row.get(column, "yes") for column in (*EXPORTS, "own_export"))
    found = [f"ONNX: {compact}"] if dense.startswith("yes") and not compact.startswith("yes") else []
    found += [f"own exporter: {own}"] if not own.startswith(("yes", OWN)) else []
    if found and row["verdict"] != "failed":
        row |= {"passed": False, "verdict": "partly", "reason": "; ".join(filter(None, (row["reason"], *found)))}
    return row


def rows(zoo: Zoo, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows, each as soon as it is known."""
    for name in options.models or zoo.names():
        row = in_process(zoo, name, options)
        if options.json:
            print(json.dumps(row), flush=True)
        yield row


def as_markdown(found: Sequence[dict[str, Any]], zoo: str) -> str:
    """A table with a line for each model, failures first, and the columns that any of them has."""
    order = ("failed", "partly", "passed")
    used = {column: title for column, title in COLUMNS.items() if any(column in row for row in found)}
    lines = [f"# {zoo}: {_summary(found)}", "", "| " + " | ".join(used.values()) + " |", "|---" * len(used) + "|"]
    for row in sorted(found, key=lambda row: order.index(row["verdict"])):
        lines.append("| " + " | ".join(_cell(column, row.get(column)) for column in used) + " |")
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
    if options.models and (RESULTS / f"{name}.json").exists():
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
    parser.add_argument("--limit", type=float, default=300, help="seconds for a model, and for each of its exports")
    parser.add_argument("--no-export", dest="export", action="store_false", help="leave the columns of ONNX out")
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
