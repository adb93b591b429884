"""Memory that is counted against memory that a process takes: dense models, and pruned to half of what is counted.

Random weights, one thread, float32. The process's memory is the growth of what is resident up to the peak of a forward
pass, as `prunekit bench` measures it: workspaces of kernels, packed weights and what allocators keep are in it.

    python benchmarks/memory.py [--json] [--models A,B] [--size N] [--batch N] [--runtimes A,B] [--keep]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from common import Rows, keep, show

MODELS = ("resnet34", "mobilenet_v2", "densenet121", "vit_b_16")


def rows(name: str, size: int, batch: int, runtimes: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """A row for each runtime of the dense and of the pruned model: megabytes (10^6 bytes)."""
    import torch
    import torchvision

    import prunekit
    from prunekit.measure.latency.comparison import measure_latency
    from prunekit.measure.model_size import count_memory
    from prunekit.settings.deployment import LatencySettings, Target

    torch.manual_seed(0)
    dense, example = torchvision.models.get_model(name, weights=None).eval(), (torch.zeros(1, 3, size, size),)
    half = count_memory(dense, example, batch) / 2e6
    pruned = prunekit.prune(dense, example, memory_mb=half, target=Target(batch=batch)).model
    models = {"dense": dense, "pruned": pruned}
    settings = LatencySettings((batch,), (1,), 5, runtimes, explain=False)  # type: ignore[arg-type]
    measured = measure_latency(models, (3, size, size), settings, [torch.device("cpu")])
    for row in measured.rows:
        taken, counted = row["peak_memory_bytes"], count_memory(models[row["model"]], example, batch) / 1e6
        yield {
            "name": name,
            "model": row["model"],
            "runtime": row["runtime"],
            "batch": batch,
            "counted_mb": counted,
            "asked_mb": None if row["model"] == "dense" else half,
            "process_mb": None if taken is None else taken / 1e6,
            "more": None if taken is None else taken / 1e6 / counted - 1,
        }


def main() -> None:
    """Counts and measures all models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object a line, as soon as it is there")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--runtimes", default="eager,onnxruntime,openvino")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/memory.json")
    options = parser.parse_args()
    runtimes = tuple(options.runtimes.split(","))
    found = Rows(None, ("name", "model", "runtime"), as_json=options.json)
    for name in options.models.split(","):
        for row in rows(name, options.size, options.batch, runtimes):
            found.add(row)
    if not options.json:
        show(found, as_json=False)
    if options.keep:
        keep("memory", list(found), {"size": options.size, "batch": options.batch, "threads": 1, "dtype": "float32"})


if __name__ == "__main__":
    main()
