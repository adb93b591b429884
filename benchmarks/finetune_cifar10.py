"""ResNet-56 on CIFAR-10, pruned to several reductions of its MACs and fine-tuned, with several seeds, and their curves.

Every row is `prunekit finetune recipes/resnet56-cifar10.yaml`, with the budget and the seed of the row, and whatever
KEY=VALUE says. `top1` is of the model folder on all 10,000 test images, `low` and `high` its 95 % Wilson interval,
which are seen once, at the end; `curve` is of validation images that were drawn from the training images, which the
published weights have seen. The dense model's control depends on the seed alone: with `--control` it is trained beside
the first reduction of each seed, else not at all.

Runs lie in RUNS/<reduction>-<seed>. One that is there and has the same recipe is read and not run again; one that was
stopped goes on. The full schedule is for a GPU: `device=cuda finetune.epochs=100`.

    python benchmarks/finetune_cifar10.py --weights FILE --data FILE --runs FOLDER [--reduction 2.0,2.57,3.0]
        [--seeds 0,1,2] [--control] [--json] [--keep] [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common import keep, reductions, show

from prunekit.errors import PrunekitError
from prunekit.jobs.finetune import finetune
from prunekit.jobs.run.resume import resolved
from prunekit.recipe.loading import load

RECIPE = Path(__file__).parent.parent / "recipes" / "resnet56-cifar10.yaml"
CURVE = ("epoch", "lr", "train_loss", "train_top1", "validation_loss", "validation_top1", "images_per_s", "seconds")


def overrides(options: argparse.Namespace, folder: Path, reduction: float, seed: int, *, control: bool) -> list[str]:
    """What a row's recipe has in place of what the file says."""
    return [
        f"data.root={options.data.resolve()}",
        f"model.weights={options.weights.resolve()}",
        f"prune.budget.macs={1 / reduction:.5f}",
        f"seed={seed}",
        f"control={str(control).lower()}",
        f"output={folder.resolve()}",
        *options.overrides,
    ]


def finished(folder: Path, changes: Sequence[str]) -> Path | None:
    """The newest run of the same recipe that has come to its end."""
    wanted = resolved(load(RECIPE, changes))
    for metrics in sorted(folder.glob("*/*/metrics.json"), reverse=True):
        kept = load(metrics.parent / "recipe.yaml")
        if replace(kept, output=wanted.output) == wanted:
            return metrics.parent
    return None


def row(options: argparse.Namespace, reduction: float, seed: int, *, control: bool) -> dict[str, Any]:
    """One run, made or found."""
    folder = options.runs / f"{reduction:g}-{seed}"
    changes = overrides(options, folder, reduction, seed, control=control)
    run = finished(folder, changes)
    if run is None:
        run = finetune(load(RECIPE, changes), log=partial(print, file=sys.stderr), resume="auto").folder
    return figures(run, reduction, seed)


def figures(run: Path, reduction: float, seed: int) -> dict[str, Any]:
    """What a run's folder says."""
    metrics, job = json.loads((run / "metrics.json").read_text("utf-8")), load(run / "recipe.yaml")
    accuracy, after = metrics["accuracy"], job.finetune
    with (run / "history.csv").open(encoding="utf-8") as file:
        curve = [{key: float(line[key]) for key in CURVE} for line in csv.DictReader(file) if line["run"] == "pruned"]
    return {
        "model": "resnet56",
        "reduction": reduction,
        "seed": seed,
        "top1": accuracy["pruned"]["top1"],
        "low": accuracy["pruned"]["low"],
        "high": accuracy["pruned"]["high"],
        "dense_top1": accuracy["dense"]["top1"],
        "control_top1": accuracy["control"]["top1"] if "control" in accuracy else None,
        "macs": metrics["pruned"]["macs"],
        "params": metrics["pruned"]["params"],
        "parity": metrics["parity"]["max_relative_difference"],
        "shortfalls": metrics["shortfalls"],
        "epochs": after.epochs,
        "lr": after.lr,
        "precision": after.precision,
        "threads": job.threads,
        "device": (metrics["environment"]["cuda"] or "cpu") if job.device == "auto" else job.device,
        "seconds": metrics["stages"]["fine-tune"],
        "torch": metrics["environment"]["torch"],
        "curve": curve,
    }


def means(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Mean and spread over the seeds of each reduction."""
    for reduction in dict.fromkeys(row["reduction"] for row in rows):
        found = [row["top1"] for row in rows if row["reduction"] == reduction]
        spread = statistics.stdev(found) if len(found) > 1 else None
        yield {"reduction": reduction, "top1_mean": statistics.fmean(found), "top1_std": spread, "seeds": len(found)}


def main() -> None:
    """Runs what is not there yet, and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE", help="a state dict of the dense model")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="an .npz")
    parser.add_argument("--runs", type=Path, required=True, metavar="FOLDER", help="where runs are, and go")
    parser.add_argument(
        "--reduction", type=reductions, default="2.0,2.57,3.0", metavar="A,B", help="dense MACs over left"
    )
    parser.add_argument("--seeds", default="0,1,2", metavar="A,B")
    parser.add_argument("--control", action="store_true", help="train the control of each seed as well")
    parser.add_argument("--json", action="store_true", help="one object a line, as soon as it is there")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/finetune_resnet56.json")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    rows = []
    try:
        for seed in map(int, options.seeds.split(",")):
            for reduction in options.reduction:
                first = options.control and reduction == options.reduction[0]
                rows.append(row(options, reduction, seed, control=first))
                if options.json:
                    print(json.dumps(rows[-1]), flush=True)
    except PrunekitError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    if not options.json:
        show([{key: value for key, value in row.items() if key != "curve"} for row in rows], as_json=False)
        print()
        show(means(rows), as_json=False)
    if options.keep:
        setting = {
            "recipe": RECIPE.name,
            "overrides": options.overrides,
            "curve": "validation images: seen in training",
        }
        print(keep("finetune_resnet56", [*rows, *means(rows)], setting), file=sys.stderr)


if __name__ == "__main__":
    main()
