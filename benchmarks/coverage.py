"""Every CNN of torchvision: traced, planned at half of the channels, tried in float64, compacted. One process a model.

A model passes when masked == compact to 1e-9 at every operator, at least 95 % of its parameters lie on a free axis and
at most 32 % of its MACs are left at a uniform share of 0.5. BatchNorm statistics, affines and biases are randomised, so
that nothing is trivially zero. One image at the size the model was made for, one thread, float32 weights.

    python benchmarks/coverage.py [--json] [--models A,B] [--limit SECONDS] [--keep]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

FAMILIES = (
    "alexnet", "vgg", "resnet", "resnext", "wide_resnet", "densenet", "googlenet", "inception", "squeezenet",
    "mobilenet", "mnasnet", "shufflenet", "efficientnet", "regnet",
)  # fmt: skip
SIZES = {"inception_v3": 299, "efficientnet_v2_s": 384, "efficientnet_v2_m": 480, "efficientnet_v2_l": 480} | {
    f"efficientnet_b{i}": size for i, size in enumerate((224, 240, 288, 300, 380, 456, 528, 600))
}


def models() -> list[str]:
    """Names of torchvision's CNN classifiers."""
    import torchvision

    names = torchvision.models.list_models(module=torchvision.models)
    return [name for name in names if any(name.startswith(family) for family in FAMILIES)]


def check(name: str) -> dict[str, Any]:
    """One model, in this process."""
    import torch
    import torchvision
    from torch.nn.modules.batchnorm import _BatchNorm

    import prunekit

    torch.set_num_threads(1)
    torch.manual_seed(0)
    quiet = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = torchvision.models.get_model(name, weights=None, **quiet)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.weight.uniform_(0.5, 1.5)
                module.running_mean.normal_(0, 0.5)
                module.running_var.uniform_(0.5, 2)
            if isinstance(getattr(module, "bias", None), torch.nn.Parameter):
                module.bias.normal_(0, 0.5)
    size = SIZES.get(name, 224)
    start = time.perf_counter()
    pruned = prunekit.prune(model, (torch.randn(1, 3, size, size),), channels=0.5)
    seconds = time.perf_counter() - start
    chart = pruned.plan.channel_map
    free = chart.free_share([name for name, _ in model.named_parameters()])
    left = chart.macs(pruned.plan.keep) / chart.macs()
    exact = pruned.max_relative_difference <= 1e-9
    reasons = [] if exact else ["masked and compact differ"]
    if free < 0.95:
        reasons.append(f"{free:.1%} of the parameters are on a free axis")
    if left > 0.32:
        dense, kept = chart.layer_macs(), chart.layer_macs(pruned.plan.keep)
        most = sorted(dense, key=lambda path: dense[path] / 4 - kept[path])[:3]
        reasons.append("more than a quarter stays in " + ", ".join(f"{p} ({kept[p] / dense[p]:.0%})" for p in most))
    added = [lock for lock in chart.locks if lock.reason.startswith("the trial")]
    reasons += [f"{lock.module}: {lock.reason}" for lock in added[:3]]
    return {
        "model": name,
        "passed": exact and free >= 0.95 and left <= 0.32,
        "max_relative_difference": pruned.max_relative_difference,
        "free_parameter_share": round(free, 5),
        "macs_left": round(left, 4),
        "seconds": round(seconds, 2),
        "reason": "; ".join(reasons),
    }


def in_process(name: str, limit: float) -> dict[str, Any]:
    """One model in a process of its own, with a time limit."""
    command = [sys.executable, "-W", "ignore", __file__, "--once", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"model": name, "passed": False, "reason": f"not done after {limit:.0f} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"model": name, "passed": False, "reason": last}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    """Checks the models and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--models", help="comma-separated; all CNNs when not given")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a model")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/coverage.json")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(check(options.once)))
        return
    from common import keep, show

    rows = [in_process(name, options.limit) for name in (options.models.split(",") if options.models else models())]
    show(rows, as_json=options.json)
    print(f"{sum(row['passed'] for row in rows)} of {len(rows)} passed", file=sys.stderr)
    if options.keep:
        setting = {"batch": 1, "threads": 1, "dtype": "float64 trial of float32 weights", "share": 0.5}
        print(keep("coverage", rows, setting), file=sys.stderr)


if __name__ == "__main__":
    main()
