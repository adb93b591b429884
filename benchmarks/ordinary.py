"""Ordinary networks through the whole journey: pruned by example and by data, trained, saved, loaded, exported.

The networks of tutorials, courses and papers' small repositories, written as people write them, stand in
`tests/ordinary`. Each is pruned on an example and on 32 samples to 0.6 of its MACs (`macs=0.6`; of parameters where it
has no MACs), trained for six steps under `Pruner` and for two more as the compact model, saved, loaded into what the
author's code builds, and exported to ONNX, which is compared with it. A cell is `ok` or the error, with `dense too:`
where torch does not export the dense network either. `locked` is how much more of its inner weights is left at half of
the channels than halving every width by hand would leave, as a share of that (see `coverage.py`), with what stops the
rest. Weights are random; one process a network, one thread.

    python benchmarks/ordinary.py [--only A,B] [--limit SECONDS] [--json] [--keep]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, keep, show
from coverage_check import where_from
from coverage_least import least_left
from coverage_reasons import Stops
from zoo_cases import OWN, randomize
from zoo_process import in_process

import prunekit as pk

sys.path.append(str(Path(__file__).parent.parent / "tests" / "ordinary"))

from journey import SAMPLES, STEPS, Journey, NotReachedError, travel
from network_registry import Network, every_network

LONGEST = 240
"""Letters of an error in a cell."""
NOT_REACHED = "not reached"
NEGLIGIBLE = 0.05
"""Share of locked weights below which no reason is told."""


def check(network: Network) -> Iterator[dict[str, Any]]:
    """The row of a network in parts, each as soon as it is known."""
    with tempfile.TemporaryDirectory() as folder:
        journey = Journey(network, Path(folder))
        for step, result in travel(journey):
            told = said(result, folder)
            if step == "ONNX" and told not in ("ok", NOT_REACHED):
                try:
                    journey.exported(journey.model)
                except Exception:  # then it is the model's own
                    told = f"{OWN}: {told}"
            yield {step: told}
    yield locked(network)


def said(result: Any, folder: str) -> str:
    """A cell: what became of a step."""
    if isinstance(result, NotReachedError):
        return NOT_REACHED
    told = where_from(result).replace(folder + "/", "") if isinstance(result, Exception) else "ok"
    return told if len(told) <= LONGEST else told[: LONGEST - 3] + "..."


def locked(network: Network) -> dict[str, Any]:
    """How much of its inner weights stays that halving every width by hand would not leave, and what stops it."""
    torch.manual_seed(0)
    model, example = Journey.built(network).eval(), network.inputs(2)
    randomize(model)
    try:
        plan = pk.prune(model, example, channels=0.5, outputs=network.outputs).plan
        least = least_left(deepcopy(model), example, network.outputs)
    except Exception as error:  # whatever the network's code does, or nothing is free
        return {"locked": None, "reason": where_from(error)[:LONGEST]}
    left = {name: plan.channel_map.parameters_kept(plan.keep, [name]) for name in least.widths}
    beyond = sum(max(0, left[name] - least.widths[name]) for name in left) / max(least.left, 1)
    reasons = Stops(plan.channel_map, plan.keep, least).sentences() if beyond > NEGLIGIBLE else []
    return {"locked": round(beyond, 4), "reason": "; ".join(reasons)}


def rows(networks: Sequence[Network], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each network; what ends or hangs is told in the first step that has no cell."""
    for network in networks:
        found, problem = in_process(lambda network=network: check(network), options.limit)
        if problem:
            found[next((step for step in STEPS if step not in found), "reason")] = problem
        row = {"network": network.name, "kind": network.kind, **found}
        if options.json:
            print(json.dumps(row), flush=True)
        yield row


def gone_through(row: dict[str, Any]) -> bool:
    """Whether every step is ok, or not to be had of the dense network either."""
    return all(_passed(row.get(step)) for step in STEPS)


def _passed(cell: str | None) -> bool:
    return cell is not None and (cell == "ok" or cell.startswith(OWN))


def as_markdown(found: Sequence[dict[str, Any]]) -> str:
    """How many networks pass each step, and a line for each network, those that do not pass all first."""
    columns = ["network", "kind", *STEPS, "locked", "reason"]
    lines = [f"# Ordinary networks: {sum(map(gone_through, found))} of {len(found)} go through the whole journey", ""]
    lines += ["| step | ok | dense too | not |", "|---|---|---|---|"]
    for step in STEPS:
        fine, passed = (sum(test(row.get(step)) for row in found) for test in ("ok".__eq__, _passed))
        lines.append(f"| {step} | {fine} | {passed - fine} | {len(found) - passed} |")
    lines += ["", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in sorted(found, key=lambda row: (gone_through(row), row["kind"], row["network"])):
        lines.append("| " + " | ".join(_cell(row.get(column)) for column in columns) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1%}"
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _keep(found: list[dict[str, Any]]) -> None:
    """Writes rows in place of earlier ones of the same networks."""
    path = RESULTS / "ordinary.json"
    before = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    known = every_network()
    every = {row["network"]: row for row in (*before, *found) if row["network"] in known}
    print(keep("ordinary", list(every.values()), {"samples": SAMPLES, "threads": 1}), file=sys.stderr)
    (RESULTS / "ordinary.md").write_text(as_markdown(list(every.values())), encoding="utf-8")


def main() -> None:
    """Takes the networks through the journey and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda given: given.split(","), help="names of networks, comma-separated")
    parser.add_argument("--limit", type=float, default=120, help="seconds for each step of a network")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/ordinary.json and .md")
    options = parser.parse_args()
    known = every_network()
    for name in options.only or ():
        if name not in known:
            parser.error(f"--only: no network {name!r}; expected some of {', '.join(known)}")
    found = list(rows([known[name] for name in options.only or known], options))
    if not options.json:
        show(found, as_json=False)
    print(f"{sum(map(gone_through, found))} of {len(found)} go through all of it", file=sys.stderr)
    if options.keep:
        _keep(found)


if __name__ == "__main__":
    main()
