"""The main job with three seeds: top-1 of dense, control and pruned, MACs, size and speedup on this machine.

Each seed runs `prunekit finetune recipes/resnet34.yaml` from scratch, baseline included, in a process of its own. The
split of the data is the same for all; its test images are seen by the final measurement alone.

    python benchmarks/main_job.py [--json] [--recipe FILE] [--seeds 0,1,2] [--keep] [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parent.parent / "recipes" / "resnet34.yaml"


def run(recipe: Path, seed: int, overrides: list[str]) -> dict[str, Any]:
    """One seed, with an output folder and a cache of its own, so that nothing is reused."""
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, "-m", "prunekit", "finetune", str(recipe), "--seed", str(seed), "--output", output]
        alone = {**os.environ, "PRUNEKIT_CACHE": str(Path(output) / "cache")}
        start = time.perf_counter()
        done = subprocess.run(
            [*command, "--json", *overrides], env=alone, stdout=subprocess.PIPE, text=True, check=False
        )
        seconds = time.perf_counter() - start
    if not done.stdout:
        raise SystemExit(f"seed {seed}: prunekit finetune ended with {done.returncode}")
    metrics = json.loads(done.stdout)
    row = {
        "seed": seed,
        **{f"{name}_top1": metrics[name]["top1"] for name in ("dense", "control", "pruned")},
        "n_test": metrics["pruned"]["n_test"],
        "macs_left": metrics["pruned"]["macs"] / metrics["dense"]["macs"],
        "params_left": metrics["pruned"]["params"] / metrics["dense"]["params"],
        "parity": metrics["parity"]["max_relative_difference"],
        "seconds": seconds,
    }
    for speed in metrics["speedup"]:
        name = f"speedup_{speed['device']}_b{speed['batch']}_t{speed['threads']}"
        row |= {name: speed["median"], f"{name}_low": speed["low"], f"{name}_high": speed["high"]}
    return row


def main() -> None:
    """Runs the seeds and prints a row for each, and their mean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/main_job.json")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    from common import keep, show

    rows = [run(options.recipe, int(seed), options.overrides) for seed in options.seeds.split(",")]
    mean = {key: statistics.fmean(row[key] for row in rows) for key in rows[0] if key != "seed"}
    rows.append({"seed": "mean", **mean})
    show(rows, as_json=options.json)
    print(f"pruned - control: {mean['pruned_top1'] - mean['control_top1']:+.2f} points", file=sys.stderr)
    if options.keep:
        print(keep("main_job", rows, {"recipe": options.recipe.name, "overrides": options.overrides}), file=sys.stderr)


if __name__ == "__main__":
    main()
