"""Time and memory of pruning and repair without training, on a torchvision model with images of its usual size.

Weights and images are random: time and memory do not depend on them, and accuracy is not measured here. `stated_mib` is
what the repair says before it starts that it will take beside the model, two copies of it and the images; `peak_mib` is
the most that the process held resident meanwhile, beyond what it held before, those copies included. `cpu_seconds` are
those of all threads: on a busy machine they say more than `seconds`.

    python benchmarks/oneshot_speed.py [--model resnet50] [--size 224] [--images 256] [--macs 0.5]
        [--criterion elimination] [--memory-mib 2048] [--threads N] [--json] [--keep]
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from common import keep, show

import prunekit
from prunekit.compaction.compact_model import compact
from prunekit.measure.model_size import count_macs
from prunekit.measure.verification import verify
from prunekit.repair.repair_model import repair
from prunekit.settings.calibration import RepairSettings

PAGE = 4096
MIB = 2**20


def resident() -> int:
    """Bytes that this process holds in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


class Watched:
    """Runs steps one after another, each with its time and the most memory that it took beyond what was there."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}

    def run(self, name: str, step: Callable[[], Any]) -> Any:
        """Runs a step; its figures begin with its name."""
        done, before, peak = threading.Event(), resident(), [0]

        def watch() -> None:
            while not done.wait(0.02):
                peak[0] = max(peak[0], resident())

        thread = threading.Thread(target=watch)
        thread.start()
        start, cpu = time.perf_counter(), time.process_time()
        try:
            return step()
        finally:
            done.set()
            thread.join()
            self.figures[f"{name}_seconds"] = time.perf_counter() - start
            self.figures[f"{name}_cpu_seconds"] = time.process_time() - cpu
            self.figures[f"{name}_peak_mib"] = max(0, peak[0] - before) / MIB


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(options.model, weights=None).eval()
    images = torch.randn(options.images, 3, options.size, options.size)
    settings = RepairSettings(memory_bytes=options.memory_mib * MIB)
    watched, say = Watched(), lambda line: print(line, file=sys.stderr, flush=True)
    planned = watched.run(
        "plan",
        lambda: prunekit.prune(model, calibration=images, macs=options.macs, criterion=options.criterion, repair=False),
    )
    masked, report = watched.run("repair", lambda: repair(model, planned.plan, images, settings, log=say))
    small = watched.run("compact", lambda: compact(masked, planned.plan))
    watched.run("verify", lambda: verify(masked, small, planned.plan, [(images[:8],)]))
    seconds = sum(value for name, value in watched.figures.items() if name.endswith("_seconds") and "cpu" not in name)
    return {
        "model": options.model,
        "macs": count_macs(model, (images[:1],)),
        "macs_left": count_macs(small, (images[:1],)),
        "seconds": seconds,
        **watched.figures,
        "stated_mib": report.memory.bytes / MIB,
        "images_at_a_time": report.memory.batch,
        "refitted": sum(bool(layer.applied) for layer in report.layers),
        "layers": len(report.layers),
        "error_before": report.before,
        "error_after": report.after,
    }


def main() -> None:
    """Runs it once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", help="of torchvision")
    parser.add_argument("--size", type=int, default=224, help="pixels")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--macs", type=float, default=0.5, help="share that may be left")
    parser.add_argument("--criterion", default="elimination", help="of those that need no labels")
    parser.add_argument("--memory-mib", type=int, default=2048, help="what the repair may take")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/oneshot_speed.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    row = measured(options)
    show([row], as_json=options.json)
    if options.keep:
        setting = {
            name: getattr(options, name) for name in ("size", "images", "macs", "criterion", "memory_mib", "threads")
        }
        print(keep("oneshot_speed", [row], {**setting, "weights": "random", "dtype": "float32"}), file=sys.stderr)


if __name__ == "__main__":
    main()
