"""Seconds per operator against the number of operators: a trace, and a whole prune, of deeper and deeper nets.

Two kinds of net, small tensors, so that what is timed is the engine and not the arithmetic: residual blocks that all
share one stream of channels (one group meets every operator), and a plain chain (as many groups as layers). Each size
is a process of its own, cold; the sizes are timed in turn, `--repeats` times. One thread, float32.

    python benchmarks/scaling.py [--json] [--sizes A,B] [--repeats N] [--keep]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

SIZES = (200, 500, 1000, 2000, 4000)
KINDS = ("residual", "chain")


def net(kind: str, operators: int) -> Any:
    """A net of about as many operators: three a layer in a chain, four where its result is added to the stream."""
    from torch import Tensor, nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.act = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.act(self.norm(self.conv(x)))
            return x + y if kind == "residual" else y

    blocks = [Block() for _ in range(operators // (4 if kind == "residual" else 3))]
    return nn.Sequential(nn.Conv2d(3, 16, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).eval()


def once(kind: str, operators: int) -> dict[str, float]:
    """One cold measurement, in this process."""
    import torch

    import prunekit
    from prunekit.channels.tracing.tracer import trace_model

    prune = prunekit.prune
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, example = net(kind, operators), (torch.randn(1, 3, 8, 8),)
    start = time.perf_counter()
    trace = trace_model(model, [example])
    traced = time.perf_counter() - start
    start = time.perf_counter()
    prune(model, example, channels=0.5)
    return {"operators": len(trace.runs[0].operators), "trace": traced, "prune": time.perf_counter() - start}


def main() -> None:
    """Runs all sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/scaling.json and scaling.png")
    parser.add_argument("--once", nargs=2, metavar=("KIND", "OPERATORS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(options.once[0], int(options.once[1]))))
        return
    from common import RESULTS, keep, show, spread

    cases = [(kind, int(size)) for kind in KINDS for size in options.sizes.split(",")]
    found: dict[tuple[str, int], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(options.repeats):
        for case in cases:
            found[case].append(_cold(*case))
    rows = []
    for (kind, _), runs in found.items():
        row: dict[str, Any] = {"net": kind, "operators": int(runs[0]["operators"])}
        for what in ("trace", "prune"):
            seconds = spread([run[what] for run in runs])
            row |= {
                f"{what}_seconds": seconds["median"],
                f"{what}_low": seconds["low"],
                f"{what}_high": seconds["high"],
            }
            row[f"{what}_ms_per_operator"] = 1e3 * seconds["median"] / row["operators"]
        rows.append(row)
    show(rows, as_json=options.json)
    if options.keep:
        print(keep("scaling", rows, {"threads": 1, "dtype": "float32", "cold": True}), file=sys.stderr)
        _draw(rows, RESULTS / "scaling.png")


def _cold(kind: str, operators: int) -> dict[str, float]:
    from common import cold

    done = cold(__file__, kind, str(operators))
    if done.returncode:
        raise SystemExit(f"{kind} net of {operators} operators failed:\n{done.stderr}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _draw(rows: list[dict[str, Any]], path: Any) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for kind in KINDS:
        mine = [row for row in rows if row["net"] == kind]
        for what, style in (("trace", "--"), ("prune", "-")):
            values = [row[f"{what}_ms_per_operator"] for row in mine]
            axes.plot([row["operators"] for row in mine], values, style, marker="o", label=f"{what}, {kind}")
    axes.set(xscale="log", xlabel="operators", ylabel="ms per operator", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
