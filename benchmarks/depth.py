"""Blocks and widths under one budget of time, beside ways of dropping blocks alone, on CIFAR-10 with trained weights.

All are brought to the same measured speedup by the means of prunekit's budgets of time, and then refitted from the
same unlabeled images in the same way; nothing is trained. `blocks-and-widths` is `prune(..., depth=True)`, `widths`
the same with `depth=False`. `block-influence` drops whole blocks by one minus the cosine of a block's input and output
(Men et al. 2024, ShortGPT), the least first; `greedy` drops, again and again, the block without which the output of
the network as it is then changes least for the time that it saves, as layer-merging methods order their candidates.
Only rows of about the same `delivered` can be compared; as blocks are whole, the last two may be faster than asked
for. `delivered`, `ci95`, `stable` and `excess` are as in `latency_budget.py`, the other columns as in
`latency_frontier.py`. The test images are seen by `top1_repaired` alone.

    python benchmarks/depth.py --depth 56 --weights FILE --data FILE [--runtimes onnxruntime] [--asked 2,2.5,3]
        [--method A,B] [--images 1024] [--seed 0] [--batch 1] [--networks N] [--out FILE] [--json] [--keep]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, Rows, as_items, as_markdown, keep, show
from frontier_methods import Bench
from latency_frontier import KEYS, prepared, settings_of
from latency_networks import add_target, log, names, numbers, target_of, where
from oneshot_cifar10 import measured
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.channels.labels.branch import Branch
from prunekit.compaction.compact_model import compact
from prunekit.errors import PlanError, PrunekitError
from prunekit.measure.measurement_effort import Effort
from prunekit.models.names import DEPTHS
from prunekit.planning.plan import Plan
from prunekit.planning.solver import make_plan
from prunekit.pruning.latency_budget_search import TimedPlanSearch
from prunekit.pruning.plan_search import WEIGHTS_ALONE, CriterionInputs, Planned
from prunekit.repair.repair_model import repair
from prunekit.settings.calibration import RepairSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings

OURS = {"blocks-and-widths": True, "widths": False}
ALONE = ("block-influence", "greedy")
METHODS = (*OURS, *ALONE)
COLUMNS = (
    "method", "runtime", "batch", "threads", "asked", "delivered", "ci95", "blocks", "macs_ratio", "top1_repaired",
    "excess", "within", "stable", "attempts", "reason",
)  # fmt: skip
JUDGED = 256
"""Images on which the greedy search compares outputs."""


def without(bench: Bench, gone: list[Branch]) -> Plan:
    """The plan without some blocks, and with all widths."""
    chart = bench.timed.channel_map
    keep = np.ones(chart.n_labels, dtype=bool)
    for branch in gone:
        keep[branch.labels] = False
    return Plan(chart, chart.completed(keep))


def outputs(model: nn.Module, images: Tensor) -> Tensor:
    """Of the network, on some images."""
    with torch.no_grad():
        return torch.cat([model(some) for some in images.split(128)])


def by_influence(bench: Bench) -> list[Branch]:
    """All blocks, that with the least influence first."""
    model, images, found = bench.case.dense, bench.case.images, dict[str, list[Tensor]]()
    blocks = {branch.body: branch for branch in bench.timed.channel_map.branches.found if branch.body is not None}

    def hook(path: str) -> Any:
        def see(module: nn.Module, args: Any, output: Tensor) -> None:
            if args[0].shape == output.shape:
                found.setdefault(path, []).append(F.cosine_similarity(args[0].flatten(1), output.flatten(1)))

        return see

    handles = [model.get_submodule(path).register_forward_hook(hook(path)) for path in blocks]
    outputs(model, images)
    for handle in handles:
        handle.remove()
    return [blocks[path] for path in sorted(found, key=lambda path: 1 - float(torch.cat(found[path]).mean()))]


def by_greed(bench: Bench) -> list[Branch]:
    """All blocks, in the order in which a greedy search drops them."""
    images, wanted = bench.case.images[:JUDGED], outputs(bench.case.dense, bench.case.images[:JUDGED])
    table, chart = bench.timed.profiled.table, bench.timed.channel_map
    left, gone = list(chart.branches.found), list[Branch]()

    def price(branch: Branch) -> float:
        plan = without(bench, [*gone, branch])
        error = float((outputs(compact(bench.case.dense, plan), images) - wanted).square().mean())
        return error / (table.at(chart, without(bench, gone).keep) - table.at(chart, plan.keep))

    while left:
        best = min(left, key=price)
        left.remove(best)
        gone.append(best)
    return gone


@dataclass(frozen=True, eq=False, kw_only=True)
class SearchByMethod(TimedPlanSearch):
    """Makes plans by one of the methods."""

    bench: Bench
    order: list[Branch] | None

    def aimed(self, settings: PruneSettings, inputs: CriterionInputs = WEIGHTS_ALONE) -> Planned:
        """Plan as the method does, without a trial."""
        bench, chart = self.bench, self.bench.timed.channel_map
        if self.order is None:
            plan = make_plan(chart, bench.scores["elimination"], settings, latency=bench.timed.profiled.table)
        else:
            asked = settings.budget.given["speedup"]
            plans = (without(bench, self.order[:count]) for count in range(1, len(self.order) + 1))
            plan = next((one for one in plans if bench.speedup(one) >= asked), None)
            if plan is None:
                raise PlanError(f"{asked:.3g}x is not reached without all {len(self.order)} blocks")
        provenance = {"budgets": {}, **plan.provenance, "binding": "speedup"}
        return Planned(replace(plan, provenance=provenance), bench.scores["l2"], compact(self.model, plan), 0.0, ())


def row(bench: Bench, settings: PruneSettings, order: list[Branch] | None) -> dict[str, Any]:
    """One method at one speedup."""
    start, chart, case = time.perf_counter(), bench.timed.channel_map, bench.case
    try:
        search = bench.timed.search(settings).with_weights(case.dense)
        search = SearchByMethod(**vars(search), bench=bench, order=order)
        planned = search.find()
        found = search.deliver(planned, planned.compact)
    except PrunekitError as error:
        return {"refused": isinstance(error, PlanError), "reason": str(error)}
    final, plan = found.final, planned.plan
    masked, _ = repair(case.dense, plan, case.images, RepairSettings())
    return {
        "delivered": final.speedup,
        "ci95": [final.speedup_low, final.speedup_high],
        "blocks": len(chart.branches.found) - len(plan.gone),
        "gone": [branch.name for branch in plan.gone],
        "macs_ratio": chart.macs() / chart.macs(plan.keep),
        "top1_repaired": measured(compact(masked, plan), bench.test)["top1"],
        "excess": found.excess,
        "within": found.within,
        "stable": final.stable,
        "notes": found.shortfalls,
        "attempts": len(planned.attempts),
        "refused": False,
        "seconds": time.perf_counter() - start,
    }


def run(options: argparse.Namespace, rows: Rows) -> Iterator[dict[str, Any]]:
    """All rows, those that are in `rows` already first."""
    for runtime in options.runtimes:
        bench, orders = None, dict[str, list[Branch]]()
        target = asdict(target_of(runtime, options))
        common = {"model": f"resnet{options.depth}", **target, "images": options.images, "seed": options.seed}
        for asked in options.asked:
            for method in options.method:
                which = {**common, "asked": asked, "method": method}
                before = rows.get(**which)
                if before is not None:
                    yield before
                    continue
                log(f"{runtime} {asked:g}x: {method}")
                bench = bench or prepared(options, runtime)
                if method in ALONE and method not in orders:
                    orders[method] = by_influence(bench) if method == "block-influence" else by_greed(bench)
                wanted = replace(settings_of(runtime, options, asked), budget=BudgetSettings(speedup=asked))
                wanted = replace(wanted, depth=OURS.get(method, True))
                found = {**which, **row(bench, wanted, orders.get(method)), **bench.timed.facts}
                rows.add(found)
                yield found


def chosen(text: str) -> list[str]:
    """Methods by name."""
    unknown = [name for name in names(text) if name not in METHODS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no method {unknown[0]!r}; expected some of {', '.join(METHODS)}")
    return names(text)


def main() -> None:
    """Runs the methods and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, choices=sorted(DEPTHS.values()), required=True)
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE", help="a state dict of the dense model")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="an .npz")
    parser.add_argument("--runtimes", type=names, default="onnxruntime", metavar="A,B")
    parser.add_argument("--asked", type=numbers, default="2,2.5,3", metavar="A,B", help="speedups")
    parser.add_argument("--method", type=chosen, default=list(METHODS), metavar="A,B", help=", ".join(METHODS))
    parser.add_argument("--images", type=int, default=1024, help="to calibrate on")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of these")
    parser.add_argument("--networks", type=int, default=Effort.networks, help="that a profile measures, at least 10")
    parser.add_argument("--out", type=Path, metavar="FILE", help="rows, one a line; those in it are not run again")
    parser.add_argument("--json", action="store_true", help="one object a line, as soon as it is there")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/depth.json and .md")
    add_target(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        found = list(run(options, Rows(options.out, KEYS, as_json=options.json)))
    except PrunekitError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    if not options.json:
        show([{column: one.get(column) for column in COLUMNS} for one in found], as_json=False)
    if options.keep:
        environment = where()
        setting = {name: getattr(options, name) for name in ("images", "seed", "networks", "threads", "dtype")}
        print(keep("depth", found, setting, environment), file=sys.stderr)
        text = f"# resnet{options.depth} on CIFAR-10 at equal measured latency\n\n{as_markdown(found, COLUMNS)}\n"
        (RESULTS / "depth.md").write_text(text + as_items(setting | environment), encoding="utf-8")


if __name__ == "__main__":
    main()
