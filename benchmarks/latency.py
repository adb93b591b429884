"""How much of a cut of MACs becomes speed: a network at the MACs of a uniform half of its channels.

Plans, all within the MACs that half of every group's channels leave: `uniform`, that half itself; `macs`, what MACs
alone lead to, filters by L2 norm (scope `per_mac`); `macs+time`, by MACs and time together: the highest speedup, as
the runtime's profile predicts, with which the plan still uses nearly all (98 %) of the MACs, so that it is no smaller
a network but a better cut one; and `capacity`, the same by the scope of that name, which goes by widths alone.
`delivered` is the measured speedup over the dense network, all alternated in one process of the runtime, `ci95` its
interval, `macs_ratio` the dense MACs over those left, `of_macs_ratio` the one over the other (1: all of the cut became
speed). `asked` is the speedup that was planned for, `predicted` what the table says of the plan. Where there is a CUDA
device, it is measured too: fp16 and bf16, channels-last, batches 1 and 256. Weights are random: time does not depend
on them, but which filters go in `macs` and `macs+time` does.

    python benchmarks/latency.py [--model resnet34] [--size 224] [--runtimes eager,onnxruntime,openvino] [--threads 1]
        [--networks N] [--repeats 61] [--steps 16] [--device auto] [--out FILE] [--json] [--keep]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, Rows, as_items, as_markdown, keep, show
from latency_networks import Case, built, log, names, profiled, where

from prunekit.compaction.compact_model import compact
from prunekit.errors import PlanError, PrunekitError
from prunekit.measure.latency.comparison import devices, measure_latency
from prunekit.measure.measurement_effort import Effort
from prunekit.planning.plan import Plan
from prunekit.pruning.latency.profiled_networks import layer_setting
from prunekit.settings.deployment import Target
from prunekit.settings.pruning import BudgetSettings, PruneSettings

KEYS = ("model", "plan", "runtime", "device", "batch", "threads", "dtype", "memory_format", "size")
COLUMNS = (
    "model", "plan", "runtime", "device", "batch", "threads", "dtype", "asked", "predicted", "delivered", "ci95",
    "macs_ratio", "of_macs_ratio", "stable", "reason",
)  # fmt: skip
PLANS = ("uniform", "macs", "macs+time", "capacity")
USED = 0.98
"""Share of the MACs that a plan by time as well still uses."""
FURTHEST = 1.15
"""The highest speedup that is tried, as a multiple of the MACs ratio."""


def targets(options: argparse.Namespace) -> Iterator[Target]:
    """What is measured on."""
    if options.device in ("auto", "cpu"):
        for runtime in options.runtimes:
            yield Target(runtime, "cpu", 1, options.threads)
    if options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available()):
        for runtime, dtype, batch in product(("eager", "compile", "cudagraphs"), ("fp16", "bf16"), (1, 256)):
            yield Target(runtime, "cuda", batch, 1, dtype, "channels_last")


def planned(case: Case, settings: PruneSettings) -> Plan:
    """A plan that passed its trial."""
    return case.search(settings).aimed(settings).plan


def quickened(case: Case, settings: PruneSettings, base: Plan, steps: int) -> tuple[Plan, float | None]:
    """The plan within the MACs of the settings that is predicted to be the fastest but still uses them.

    Speedups are tried in steps, not halved: what a plan uses of the MACs is not monotone in them.

    Args:
        base: what is to be outdone.
        steps: how many speedups are tried.

    Returns:
        The plan with the speedup that was asked for; `base` and None if nothing faster uses the MACs.
    """
    share = settings.budget.macs
    assert share is not None
    found: tuple[Plan, float | None] = base, None
    for asked in np.geomspace(predicted(case, base), FURTHEST / share, steps + 1)[1:].tolist():
        try:
            made = planned(case, replace(settings, budget=BudgetSettings(macs=share, speedup=asked)).in_blocks)
        except PlanError:  # out of reach, as more would be
            break
        if left(case, made) >= USED * share:
            found = made, asked
    return found


def left(case: Case, plan: Plan) -> float:
    """Share of the MACs that a plan leaves."""
    return plan.channel_map.macs(plan.keep) / case.channel_map.macs()


def predicted(case: Case, plan: Plan) -> float:
    """Speedup of a plan by the table."""
    table = case.profiled.table
    return table.at(plan.channel_map) / table.at(plan.channel_map, plan.keep)


def measured(case: Case, target: Target, repeats: int, steps: int) -> Iterator[dict[str, Any]]:
    """A row for each plan, all alternated with the dense network."""
    whole = PruneSettings(BudgetSettings(channels=0.5), criterion="l2", scope="uniform", target=target)
    plans, asked = {"uniform": planned(case, whole)}, dict[str, float | None]()
    by_macs = replace(whole, budget=BudgetSettings(macs=left(case, plans["uniform"])), scope="per_mac")
    plans["macs"] = planned(case, by_macs)
    plans["macs+time"], asked["macs+time"] = quickened(case, by_macs, plans["macs"], steps)
    by_width = replace(by_macs, scope="capacity")
    plans["capacity"], asked["capacity"] = quickened(case, by_width, plans["uniform"], steps)
    wanted = replace(target.as_latency, repeats=repeats)
    models = {"dense": case.model, **{name: compact(case.model, plan) for name, plan in plans.items()}}
    found = measure_latency(models, case.example.shape[1:], wanted, devices(target.device, wanted))
    if found.failures:
        yield from ({"plan": name, "reason": found.failures[0]["reason"]} for name in plans)
        return
    for row, (name, plan) in zip(found.speedup, plans.items(), strict=True):
        ratio = 1 / left(case, plan)
        yield {
            "plan": name,
            "asked": asked.get(name),
            "predicted": predicted(case, plan),
            "delivered": row["median"],
            "ci95": [row["low"], row["high"]],
            "macs_ratio": ratio,
            "of_macs_ratio": row["median"] / ratio,
            "of_macs_ratio_ci95": [row["low"] / ratio, row["high"] / ratio],
            "stable": row["stable"],
            "doubts": row["doubts"],
            "macs": plan.channel_map.macs(plan.keep),
            **case.facts,
        }


def run(options: argparse.Namespace, rows: Rows) -> Iterator[dict[str, Any]]:
    """All rows, those that are in `rows` already first."""
    model, _ = built(options.model, options.size, None)
    example = torch.randn(1, 3, options.size, options.size, generator=torch.Generator().manual_seed(0))
    cases: dict[Any, Case] = {}
    for target in targets(options):
        common = {"model": options.model, **asdict(target), "size": options.size}
        before = [rows.get(plan=name, **common) for name in PLANS]
        if all(row is not None and "delivered" in row for row in before):
            yield from (row for row in before if row is not None)
            continue
        log(f"{target}")
        try:
            timed = layer_setting(target)[0]
            if timed not in cases:
                cases[timed] = profiled(model, example, PruneSettings(target=target), options.networks)
            found = list(measured(cases[timed], target, options.repeats, options.steps))
        except PrunekitError as error:
            found = [{"plan": name, "reason": str(error)} for name in PLANS]
        for row in found:
            rows.add({**common, **row})
            yield {**common, **row}


def main() -> None:
    """Measures and prints a row for each plan on each target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet34", help="of torchvision")
    parser.add_argument("--size", type=int, default=224, help="pixels")
    parser.add_argument(
        "--runtimes", type=names, default="eager,onnxruntime,openvino", metavar="A,B", help="on the CPU"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--networks", type=int, default=Effort.networks, help="that a profile measures, at least 10")
    parser.add_argument("--repeats", type=int, default=61, help="rounds of a measurement")
    parser.add_argument("--steps", type=int, default=16, help="speedups that are tried for a plan by time")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, metavar="FILE", help="rows, one a line; those in it are not run again")
    parser.add_argument("--json", action="store_true", help="one object a line, as soon as it is there")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/latency.json and .md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = list(run(options, Rows(options.out, KEYS, as_json=options.json)))
    if not options.json:
        show([{column: row.get(column) for column in COLUMNS} for row in found], as_json=False)
    if options.keep:
        environment = where()
        setting = {name: getattr(options, name) for name in ("size", "networks", "repeats", "threads")}
        print(keep("latency", found, {**setting, "weights": "random"}, environment), file=sys.stderr)
        text = f"# {options.model}: speed from a cut of MACs\n\n{as_markdown(found, COLUMNS)}\n"
        (RESULTS / "latency.md").write_text(text + as_items(setting | environment), encoding="utf-8")


if __name__ == "__main__":
    main()
