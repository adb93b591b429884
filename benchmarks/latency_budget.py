"""Speedups asked for and delivered: each network profiled once on each runtime, then planned, measured and corrected.

A row is one request. `asked` and `delivered` are speedups over the dense network; `delivered` is of the network that
is handed over, compacted by the frozen plan, measured last in fresh processes alternated with the dense one, and
`ci95` holds the intervals of all of these: the more there are, the wider. `macs_ratio` is the dense MACs over those
left; `excess` the time taken over the time asked for; `within` whether that is within 3 %; `notes` what prunekit
itself says of a figure that is slower than asked for, off, or unstable; `attempts` how many plans were measured on the
way, `attempts_excess` the excess of each. A request that cannot be met is a row with `refused` and a `reason`; one
that failed has a reason alone, and is tried again. `profile_error` is the median relative error of the table on
networks that it was not fitted to, `profile_seconds` what the profile took in the run that made it, of whose
`profile_networks` so many as `profile_cached` were measured before; `plan_seconds` is the longest that scoring,
planning and the trial of one plan took, `seconds` the whole request, and `versions` what it was measured with.

Filters go by L2 norm, in the order of what they cost (scope `per_mac`, which with a budget of time is the time that
they take). Weights are random unless `--weights` is a folder with `MODEL.pth`: time does not depend on them, but which
filters go, and so where time is saved, does; and the importance of random filters is nearly equal.

With `--out` each row is written as soon as it is there, and rows in that file are not run again, so that a run which
was interrupted goes on where it was; a profile's networks are kept in prunekit's own cache (`PRUNEKIT_CACHE`).

    python benchmarks/latency_budget.py [--models A,B] [--runtimes A,B] [--asked 1.5,2,3] [--out FILE] [--networks N]
        [--size 224] [--device cpu] [--batch 1] [--threads 1] [--dtype fp32] [--memory-format contiguous]
        [--weights FOLDER] [--json] [--keep]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Rows, as_items, as_markdown, keep, show
from latency_networks import Case, add_target, built, log, names, numbers, profiled, target_of, where

from prunekit.deploy.deployment_transform import flush_subnormals
from prunekit.errors import PlanError, PrunekitError
from prunekit.measure.measurement_effort import Effort
from prunekit.pruning.latency_budget_search import TimedPlanSearch
from prunekit.pruning.plan_search import WEIGHTS_ALONE, CriterionInputs, Planned
from prunekit.settings.pruning import BudgetSettings, PruneSettings

MODELS = "resnet34,resnet50,mobilenet_v2,efficientnet_b0,vit_b_16"
KEYS = ("model", "runtime", "device", "batch", "threads", "dtype", "memory_format", "size", "weights", "asked")
COLUMNS = (
    "model", "runtime", "batch", "threads", "dtype", "asked", "delivered", "ci95", "macs_ratio", "excess", "within",
    "stable", "attempts", "profile_error", "plan_seconds", "seconds", "versions", "reason",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Clocked(TimedPlanSearch):
    """Notes the seconds that each plan takes to make."""

    took: list[float] = field(default_factory=list)

    def aimed(self, settings: PruneSettings, inputs: CriterionInputs = WEIGHTS_ALONE) -> Planned:
        """Plan as always."""
        start = time.perf_counter()
        found = super().aimed(settings, inputs)
        self.took.append(time.perf_counter() - start)
        return found


def request(case: Case, settings: PruneSettings) -> dict[str, Any]:
    """One request: what was delivered, or why not."""
    start, search = time.perf_counter(), Clocked(**vars(case.search(settings)))
    try:
        planned = search.find()
        handed_over = flush_subnormals(planned.compact, (case.example,)).model
        found = search.deliver(planned, handed_over)
    except PrunekitError as error:
        return {"refused": isinstance(error, PlanError), "reason": str(error), "seconds": time.perf_counter() - start}
    final, keep_of = found.final, planned.plan.keep
    return {
        "delivered": final.speedup,
        "ci95": [final.speedup_low, final.speedup_high],
        "macs_ratio": case.channel_map.macs() / case.channel_map.macs(keep_of),
        "stable": final.stable,
        "excess": found.excess,
        "within": found.within,
        "delivered_ms": final.ms,
        "notes": found.shortfalls,
        "attempts": len(planned.attempts),
        "attempts_excess": [attempt.excess for attempt in planned.attempts],
        "predicted_ms": [attempt.predicted_ms for attempt in planned.attempts],
        "refused": False,
        "plan_seconds": max(search.took),
        "seconds": time.perf_counter() - start,
    }


def settings_for(target: Any, asked: float) -> PruneSettings:
    """A request as prunekit has it."""
    return PruneSettings(BudgetSettings(speedup=asked), criterion="l2", scope="per_mac", target=target)


def run(options: argparse.Namespace, rows: Rows) -> Iterator[dict[str, Any]]:
    """The rows of this run, those of `rows` first where they are there already."""
    for name in options.models:
        model, weights = built(name, options.size, options.weights)
        example = torch.randn(1, 3, options.size, options.size, generator=torch.Generator().manual_seed(0))
        for runtime in options.runtimes:
            target, case = target_of(runtime, options), None
            for asked in options.asked:
                common = {"model": name, **asdict(target), "size": options.size, "weights": weights, "asked": asked}
                before = rows.get(**common)
                if before is not None and ("delivered" in before or before["refused"]):
                    yield before
                    continue
                log(f"{name} {runtime}: {asked:g}x")
                settings = settings_for(target, asked)
                try:
                    case = case or profiled(model, example, settings, options.networks)
                    row = {**common, **request(case, settings), **case.facts}
                except PrunekitError as error:  # of the profile: the runtime cannot have the network
                    row = {**common, "refused": False, "reason": f"profile: {error}"}
                rows.add(row)
                yield row


def verdict(rows: list[dict[str, Any]]) -> str:
    """How many requests were met, refused, failed, slower, and slower without a word."""
    met = [row for row in rows if "delivered" in row]
    slower = [row for row in met if row["excess"] > 1]
    off = [row for row in met if abs(row["excess"] - 1) > 0.03]
    return (
        f"{len(rows)} requests: {len(met)} delivered, of them {len(met) - len(off)} within 3 %, {len(slower)} slower "
        f"than asked for, {sum(not row['notes'] for row in slower)} of those unsaid, "
        f"{sum(not row['stable'] for row in met)} unstable; {sum(row['refused'] for row in rows)} refused, "
        f"{sum('delivered' not in row and not row['refused'] for row in rows)} failed"
    )


def main() -> None:
    """Makes the requests and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=names, default=MODELS, metavar="A,B", help=f"of torchvision  [{MODELS}]")
    parser.add_argument("--runtimes", type=names, default="eager,onnxruntime", metavar="A,B")
    parser.add_argument("--asked", type=numbers, default="1.5,2,3", metavar="A,B", help="speedups")
    parser.add_argument("--networks", type=int, default=Effort.networks, help="that a profile measures, at least 10")
    parser.add_argument("--size", type=int, default=224, help="pixels")
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="with MODEL.pth; else random")
    parser.add_argument("--out", type=Path, metavar="FILE", help="rows, one a line; those in it are not run again")
    parser.add_argument("--json", action="store_true", help="one object a line, as soon as it is there")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/latency_budget.json and .md")
    add_target(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = list(run(options, Rows(options.out, KEYS, as_json=options.json)))
    if not options.json:
        show([{column: row.get(column) for column in COLUMNS} for row in found], as_json=False)
    log(verdict(found))
    if options.keep:
        environment = where()
        setting = {
            "size": options.size, "criterion": "l2", "scope": "per_mac", "networks": options.networks,
            "batch": options.batch, "threads": options.threads, "dtype": options.dtype, "device": options.device,
        }  # fmt: skip
        print(keep("latency_budget", found, setting, environment), file=sys.stderr)
        text = f"# {verdict(found)}\n\n{as_markdown(found, COLUMNS)}\n{as_items(setting | environment)}"
        (RESULTS / "latency_budget.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
