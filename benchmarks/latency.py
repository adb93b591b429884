"""How much of a cut of MACs becomes speed: a network at the MACs of a uniform half of its channels.

Plans, all within the MACs that half of every group's channels leave: `uniform`, that half itself; `macs`, what MACs
alone lead to, filters by L2 norm (scope `per_mac`); `macs+time`, by MACs and time together: the highest speedup, as the
runtime's profile predicts, with which the plan still uses nearly all (98 %) of the MACs, so that it is no smaller a
network but a better cut one; and `fastest`, what widths alone can do: of the plans with nearly all of those MACs that
which a search finds to be predicted the fastest, whatever its filters are worth. `delivered` is the measured speedup
over the dense network, all alternated in one process of the runtime, `ci95` its interval, `macs_ratio` the dense MACs
over those left, `of_macs_ratio` the one over the other (1: all of the cut became speed). `asked` is the speedup that
was planned for, `predicted` what the table says of the plan. Where there is a CUDA device, it is measured too: fp16 and
bf16, channels-last, batches 1 and 256. Weights are random: time does not depend on them, but which filters go in `macs`
and `macs+time` does.

    python benchmarks/latency.py [--model resnet34] [--size 224] [--runtimes eager,onnxruntime,openvino] [--threads 1]
        [--networks N] [--repeats 61] [--device auto] [--out FILE] [--json] [--keep]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, Rows, as_items, as_markdown, keep, show
from latency_networks import Case, built, log, names, profiled, where

from prunekit.channels.labels import Labels
from prunekit.compaction import compact
from prunekit.errors import PlanError, PrunekitError
from prunekit.measure import measure_latency
from prunekit.planning import BudgetSettings, Plan, PruneSettings, free_parts
from prunekit.planning.budgets import budgets_of
from prunekit.planning.select import Part
from prunekit.planning.settings import TargetSettings
from prunekit.planning.solve import keep_of
from prunekit.workflow.bench import devices
from prunekit.workflow.profiling import NETWORKS, as_latency, layer_setting
from prunekit.workflow.pruning import Planned, plan_model

KEYS = ("model", "plan", "runtime", "device", "batch", "threads", "dtype", "memory_format", "size")
COLUMNS = (
    "model", "plan", "runtime", "device", "batch", "threads", "dtype", "asked", "predicted", "delivered", "ci95",
    "macs_ratio", "of_macs_ratio", "stable", "reason",
)  # fmt: skip
PLANS = ("uniform", "macs", "macs+time", "fastest")
USED = 0.98
"""Share of the MACs that a plan by time as well still uses."""
STEPS, FURTHEST = 16, 1.15
"""Speedups that are tried, up to so many times the MACs ratio."""
BY = (-16, -8, -4, -2, -1, 1, 2, 4, 8, 16)
"""Allowed counts that a step goes, where widths alone are sought; to the least and the most beside these."""


def targets(options: argparse.Namespace) -> Iterator[TargetSettings]:
    """What is measured on."""
    if options.device in ("auto", "cpu"):
        for runtime in options.runtimes:
            yield TargetSettings(runtime, "cpu", 1, options.threads)
    if options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available()):
        for runtime, dtype, batch in product(("eager", "compile", "cudagraphs"), ("fp16", "bf16"), (1, 256)):
            yield TargetSettings(runtime, "cuda", batch, 1, dtype, "channels_last")


def planned(case: Case, settings: PruneSettings) -> Planned:
    """A plan that passed its trial."""
    return plan_model(case.model, (case.example,), settings, channel_map=case.channel_map, latency=case.profiled.table)


def quickened(case: Case, settings: PruneSettings) -> tuple[Planned, float]:
    """The plan within the MACs of the settings that is predicted to be the fastest but still uses them; its speedup.

    Speedups are tried in steps, not halved: what a plan uses of the MACs is not monotone in them.
    """
    share = settings.budget.macs
    assert share is not None
    best = planned(case, settings)
    found = best, predicted(case, best.plan)
    for asked in np.geomspace(found[1], FURTHEST / share, STEPS + 1)[1:].tolist():
        try:
            made = planned(case, replace(settings, budget=BudgetSettings(macs=share, speedup=asked)))
        except PlanError:  # out of reach, as more would be
            break
        if left(case, made.plan) >= USED * share:
            found = made, asked
    return found


def fastest(case: Case, whole: Plan, settings: PruneSettings) -> Plan:
    """The plan with nearly all MACs of the settings that is predicted to be the fastest; `whole` if none is faster.

    Downhill from `whole`: of all steps of one group, and of two at a time, the one that leaves the least time, as long
    as one leaves less. In blocks of the target, and of twice as many, whose plans are fewer and reached sooner.
    """
    blocks = (settings.target.block, 2 * settings.target.block)
    made = [downhill(case, whole, replace(settings, round_to=block)) for block in blocks]
    return max((whole, *(plan for plan in made if plan)), key=lambda plan: predicted(case, plan))


def downhill(case: Case, whole: Plan, settings: PruneSettings) -> Plan | None:
    """Where steps from `whole` end; None where none leads to nearly all of the MACs."""
    share, chart = settings.budget.macs, whole.channel_map
    assert share is not None
    both = replace(settings, budget=BudgetSettings(macs=share, latency_ms=1.0))
    parts = free_parts(chart, np.zeros(chart.n_labels), both)
    cost = budgets_of(chart, parts, both, case.profiled.table).left
    counts = np.array([part.at_most(np.count_nonzero(whole.keep[part.labels])) for part in parts])
    least = np.inf
    while True:
        trials = np.concatenate([steps(parts, counts, number) for number in (1, 2)])
        macs, ms = cost(trials).T
        ms = np.where((USED * share <= macs) & (macs <= share), ms, np.inf)
        if ms.min() >= least:
            break
        least, counts = ms.min(), trials[ms.argmin()]
    if least == np.inf:
        return None
    return Plan(chart, keep_of(chart, parts, counts), {})


def steps(parts: list[Part], counts: Labels, number: int) -> Labels:
    """Counts (trials, parts) with a step of so many parts each."""
    reached = []
    for part, count in zip(parts, counts, strict=True):
        at, last = int(np.searchsorted(part.counts, count)), part.counts.size - 1
        others = sorted({0, last, *(at + by for by in BY)} - {at})
        reached.append([part.counts[other] for other in others if 0 <= other <= last])
    rows = []
    for some in combinations(range(len(parts)), number):
        for values in product(*(reached[index] for index in some)):
            rows.append(counts.copy())
            rows[-1][list(some)] = values
    return np.array(rows, dtype=np.int64).reshape(-1, len(parts))


def left(case: Case, plan: Plan) -> float:
    """Share of the MACs that a plan leaves."""
    return plan.channel_map.macs(plan.keep) / case.channel_map.macs()


def predicted(case: Case, plan: Plan) -> float:
    """Speedup of a plan by the table."""
    table = case.profiled.table
    return table.at(plan.channel_map) / table.at(plan.channel_map, plan.keep)


def measured(case: Case, target: TargetSettings, repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each plan, all alternated with the dense network."""
    whole = PruneSettings(BudgetSettings(channels=0.5), criterion="l2", scope="uniform", target=target)
    plans = {"uniform": planned(case, whole).plan}
    by_macs = replace(whole, budget=BudgetSettings(macs=left(case, plans["uniform"])), scope="per_mac")
    plans["macs"] = planned(case, by_macs).plan
    quick, asked = quickened(case, by_macs)
    plans["macs+time"] = quick.plan
    plans["fastest"] = fastest(case, plans["uniform"], by_macs)
    wanted = replace(as_latency(target), repeats=repeats)
    models = {"dense": case.model, **{name: compact(case.model, plan) for name, plan in plans.items()}}
    found = measure_latency(models, case.example.shape[1:], wanted, devices(target.device, wanted))
    if found.failures:
        yield from ({"plan": name, "reason": found.failures[0]["reason"]} for name in plans)
        return
    for row, (name, plan) in zip(found.speedup, plans.items(), strict=True):
        ratio = 1 / left(case, plan)
        yield {
            "plan": name,
            "asked": asked if name == "macs+time" else None,
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
            found = list(measured(cases[timed], target, options.repeats))
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
    parser.add_argument("--networks", type=int, default=NETWORKS, help="that a profile measures, at least 10")
    parser.add_argument("--repeats", type=int, default=61, help="rounds of a measurement")
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
