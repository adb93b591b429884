"""What is kept at equal measured latency: plans by time, by MACs, and torch-pruning's, on CIFAR-10, trained weights.

All are brought to the same measured speedup by the same means, those of prunekit's budgets of time: predicted by the
table, measured, corrected, frozen, and measured last. What is turned differs: `time-*` the budget of time itself,
`macs-*` the budget of MACs of the best plan by MACs alone (scope `per_mac`), `tp-l2` the ratio of torch-pruning's
global L2 ranking. `*-elimination` orders channels by what their readers lose, as `prunekit.prune` does with images,
`*-l2` by norm. Only channels inside the blocks go, in all of them.

Every plan is then made a network in the same two ways, without training: `top1_repaired`, refitted from unlabeled
images as `prunekit.prune` does; and `top1_recalibrated`, BatchNorm's statistics taken anew. `kept_elimination` and
`kept_l2` are the shares of all importance of either kind that the plan keeps. `delivered`, `ci95`, `stable` and
`excess` are as in `latency_budget.py`; only rows of about the same `delivered` can be compared. Images are drawn from
the training images by `seed`; the test images are seen by the last figures alone.

With `--out` each row is written as soon as it is there, and rows in that file are not run again.

    python benchmarks/latency_frontier.py --depth 56 --weights FILE --data FILE [--runtimes onnxruntime] [--asked 1.5,2]
        [--method A,B] [--images 1024] [--seed 0] [--batch 1] [--networks N] [--out FILE] [--json] [--keep]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, Rows, as_items, as_markdown, keep, show
from frontier_methods import METHODS, Bench, chooser
from latency_networks import add_target, log, names, numbers, profiled, target_of, where
from oneshot_cifar10 import drawn, measured
from oneshot_methods import STREAM, Case, Method, Result, recalibrated

from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.compaction.compact_model import compact
from prunekit.data.local_files import read_npz
from prunekit.errors import DataError, PlanError, PrunekitError
from prunekit.measure.measurement_effort import Effort
from prunekit.models.names import DEPTHS
from prunekit.models.zoo import build_model
from prunekit.planning.candidates import Scores, free_parts
from prunekit.planning.plan import Plan
from prunekit.pruning.latency_budget_search import TimedPlanSearch
from prunekit.pruning.plan_search import WEIGHTS_ALONE, CriterionInputs, Planned, importance
from prunekit.pruning.sample_statistics import patch_statistics
from prunekit.repair.repair_model import repair
from prunekit.settings.calibration import RepairSettings
from prunekit.settings.inputs import ModelSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings

KEYS = ("model", "runtime", "device", "batch", "threads", "dtype", "memory_format", "images", "seed", "asked", "method")
COLUMNS = (
    "method", "runtime", "batch", "threads", "asked", "delivered", "ci95", "macs_ratio", "top1_repaired",
    "top1_recalibrated", "kept_elimination", "kept_l2", "excess", "within", "stable", "attempts", "reason",
)  # fmt: skip


def prepared(options: argparse.Namespace, runtime: str) -> Bench:
    """A network on a runtime."""
    build = ModelSettings(f"resnet{options.depth}", "cifar", weights=str(options.weights))
    archive, dense = read_npz(options.data), build_model(build, num_classes=10).eval()
    if archive.test is None:
        raise DataError(f"{options.data}: expected x_test and y_test")
    images, labels = drawn(archive.rest, options.images, options.seed)
    settings = settings_of(runtime, options, 2.0)
    timed = profiled(dense, images[:1], settings, options.networks)
    chart = timed.channel_map
    patches = patch_statistics(dense, images, chart, RepairSettings(), STREAM)
    scores = {
        name: importance(dense, chart, replace(settings, criterion=name), CriterionInputs(patches=patches))
        for name in ("elimination", "l2")
    }
    return Bench(Case(dense, build, images, labels, 1.0), timed, scores, archive.test)


def settings_of(runtime: str, options: argparse.Namespace, asked: float) -> PruneSettings:
    """A request as prunekit has it."""
    budget = BudgetSettings(speedup=asked)
    return PruneSettings(budget, scope="per_mac", ignore=STREAM, target=target_of(runtime, options))


@dataclass(frozen=True, eq=False, kw_only=True)
class SearchByMethod(TimedPlanSearch):
    """Makes plans by one of the methods."""

    bench: Bench
    method: str

    def aimed(self, settings: PruneSettings, inputs: CriterionInputs = WEIGHTS_ALONE) -> Planned:
        """Plan as the method does, without a trial."""
        found = chooser(self.method)(self.bench, settings)
        provenance = {"budgets": {}, **found.provenance, "binding": "speedup"}
        plan = replace(found, provenance=provenance)
        return Planned(plan, self.bench.scores["l2"], compact(self.model, plan), 0.0, ())


def row(bench: Bench, method: str, settings: PruneSettings) -> dict[str, Any]:
    """One method at one speedup."""
    start, chart = time.perf_counter(), bench.timed.channel_map
    try:
        search = bench.timed.search(settings).with_weights(bench.case.dense)
        search = SearchByMethod(**vars(search), bench=bench, method=method)
        planned = search.find()
        found = search.deliver(planned, planned.compact)
    except PrunekitError as error:
        return {"refused": isinstance(error, PlanError), "reason": str(error)}
    final, plan = found.final, planned.plan
    return {
        "delivered": final.speedup,
        "ci95": [final.speedup_low, final.speedup_high],
        "macs_ratio": chart.macs() / chart.macs(plan.keep),
        **accuracies(bench, plan),
        **{f"kept_{name}": kept(chart, scores, plan, settings) for name, scores in bench.scores.items()},
        "excess": found.excess,
        "within": found.within,
        "stable": final.stable,
        "notes": found.shortfalls,
        "attempts": len(planned.attempts),
        "refused": False,
        "seconds": time.perf_counter() - start,
    }


def accuracies(bench: Bench, plan: Plan) -> dict[str, float]:
    """Top-1 in percent, of the network as the plan leaves it, made good in two ways."""
    case = bench.case
    plain: Method = lambda _: Result(compact(case.dense, plan), plan)  # noqa: E731
    masked, _ = repair(case.dense, plan, case.images, RepairSettings())
    networks = {"repaired": compact(masked, plan), "recalibrated": recalibrated(case, plain).model}
    return {f"top1_{name}": measured(model, bench.test)["top1"] for name, model in networks.items()}


def kept(channel_map: ChannelMap, scores: Scores, plan: Plan, settings: PruneSettings) -> float:
    """Share of the importance of all channels that may go."""
    labels = np.concatenate([part.labels for part in free_parts(channel_map, scores, settings)])
    finite = labels[np.isfinite(scores[labels])]
    return float(scores[finite][plan.keep[finite]].sum() / scores[finite].sum())


def run(options: argparse.Namespace, rows: Rows) -> Iterator[dict[str, Any]]:
    """All rows, those that are in `rows` already first."""
    for runtime in options.runtimes:
        bench = None
        target = asdict(target_of(runtime, options))
        common = {"model": f"resnet{options.depth}", **target, "images": options.images, "seed": options.seed}
        for asked in options.asked:
            for method in options.method:
                which = {**common, "asked": asked, "method": method}
                before = rows.get(**which)
                if before is not None and ("delivered" in before or before["refused"]):
                    yield before
                    continue
                log(f"{runtime} {asked:g}x: {method}")
                bench = bench or prepared(options, runtime)
                found = {**which, **row(bench, method, settings_of(runtime, options, asked)), **bench.timed.facts}
                rows.add(found)
                yield found


def chosen(text: str) -> list[str]:
    """Methods, without torch-pruning's where it is not installed."""
    unknown = [name for name in names(text) if name not in names(METHODS)]
    if unknown:
        raise argparse.ArgumentTypeError(f"no method {unknown[0]!r}; expected some of {METHODS}")
    found = [name for name in names(text) if name != "tp-l2" or find_spec("torch_pruning")]
    if found != names(text):
        log("skipped: tp-l2: torch-pruning is not installed (pip install torch-pruning)")
    return found


def main() -> None:
    """Runs the methods and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, choices=sorted(DEPTHS.values()), required=True)
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE", help="a state dict of the dense model")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="an .npz")
    parser.add_argument("--runtimes", type=names, default="onnxruntime", metavar="A,B")
    parser.add_argument("--asked", type=numbers, default="1.5,2", metavar="A,B", help="speedups")
    parser.add_argument("--method", type=chosen, default=METHODS, metavar="A,B", help=f"of {METHODS}  [default: all]")
    parser.add_argument("--images", type=int, default=1024, help="to calibrate on")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of these")
    parser.add_argument("--networks", type=int, default=Effort.networks, help="that a profile measures, at least 10")
    parser.add_argument("--out", type=Path, metavar="FILE", help="rows, one a line; those in it are not run again")
    parser.add_argument("--json", action="store_true", help="one object a line, as soon as it is there")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/latency_frontier.json and .md")
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
        print(keep("latency_frontier", found, setting, environment), file=sys.stderr)
        text = f"# resnet{options.depth} on CIFAR-10 at equal measured latency\n\n{as_markdown(found, COLUMNS)}\n"
        (RESULTS / "latency_frontier.md").write_text(text + as_items(setting | environment), encoding="utf-8")


if __name__ == "__main__":
    main()
