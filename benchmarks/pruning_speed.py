"""Seconds to prune a model: prunekit (traces, plan, trial, compact) beside torch-pruning, alternated in one run.

Every repetition is a process of its own, so that each is cold: imports and the model's construction are not timed, the
first and only call is. Input 1x3x224x224, float32, one thread; prunekit keeps half of the channels of every group and
proves masked == compact in float64 on the way, torch-pruning prunes half of every group and proves nothing. What fails
or takes longer than the limit has no seconds but a reason, and is not repeated.

    python benchmarks/pruning_speed.py [--json] [--models A,B] [--repeats N] [--limit SECONDS] [--keep]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Any

MODELS = ("resnet34", "densenet121", "mobilenet_v3_small", "densenet201", "vit_b_16", "swin_t", "maxvit_t")


def prunekit_seconds(name: str) -> float:
    """One cold call of `prunekit.prune`."""
    import torch
    import torchvision

    import prunekit

    prune = prunekit.prune  # imported here, as a script that uses it would have done at its top
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, example = getattr(torchvision.models, name)(weights=None).eval(), torch.randn(1, 3, 224, 224)
    start = time.perf_counter()
    prune(model, (example,), channels=0.5)
    return time.perf_counter() - start


def torch_pruning_seconds(name: str) -> float:
    """One cold call of torch-pruning's magnitude pruner on the same model."""
    import torch
    import torch_pruning
    import torchvision

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, example = getattr(torchvision.models, name)(weights=None).eval(), torch.randn(1, 3, 224, 224)
    classes = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1:]
    start = time.perf_counter()
    pruner = torch_pruning.pruner.BasePruner(
        model,
        example,
        importance=torch_pruning.importance.MagnitudeImportance(p=2),
        pruning_ratio=0.5,
        ignored_layers=classes,
    )
    pruner.step()
    return time.perf_counter() - start


TOOLS = {"prunekit": prunekit_seconds, "torch-pruning": torch_pruning_seconds}


def seconds_of(tool: str, model: str, limit: float) -> float | str:
    """Seconds of one repetition in a process of its own, or why there are none."""
    from common import cold

    try:
        done = cold(__file__, tool, model, limit=limit)
    except subprocess.TimeoutExpired:
        return f"over {limit:g} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["failed"])[-1]
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=60, metavar="SECONDS", help="of one repetition, with imports")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/pruning_speed.json")
    parser.add_argument("--once", nargs=2, metavar=("TOOL", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(TOOLS[options.once[0]](options.once[1])))
        return
    from common import keep, show, spread

    tools = [tool for tool in TOOLS if tool == "prunekit" or find_spec("torch_pruning")]
    if len(tools) == 1:
        print("torch-pruning is not installed (pip install torch-pruning): prunekit alone is timed", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for model in options.models.split(","):
        seconds: dict[str, list[float]] = {tool: [] for tool in tools}
        reasons: dict[str, str] = {}
        for repeat in range(options.repeats):
            for tool in tools if repeat % 2 == 0 else reversed(tools):
                if tool not in reasons:
                    measured = seconds_of(tool, model, options.limit)
                    if isinstance(measured, str):
                        reasons[tool] = measured
                    else:
                        seconds[tool].append(measured)
        for tool in tools:
            found = {"median": None, "low": None, "high": None} if tool in reasons else spread(seconds[tool])
            rows.append({"model": model, "tool": tool, "seconds": found["median"], "low": found["low"],
                         "high": found["high"], "repeats": options.repeats, "reason": reasons.get(tool)})  # fmt: skip
    show(rows, as_json=options.json)
    if options.keep:
        setting = {"input": [1, 3, 224, 224], "dtype": "float32", "threads": 1, "kept": 0.5, "cold": True}
        print(keep("pruning_speed", rows, setting), file=sys.stderr)


if __name__ == "__main__":
    main()
