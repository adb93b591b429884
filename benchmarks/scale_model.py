"""Time, memory, disk and network of pruning decoders of any size on paper, and the model's check by measured runs.

    python benchmarks/scale_model.py                    # 8B, 70B and 405B on 1, 8 and 64 devices
    python benchmarks/scale_model.py --check            # against the rows of benchmarks/results/shared_work.json
    python benchmarks/scale_model.py --constants        # of this machine, measured now, for the check

A decoder has L layers of width D, with K channels of keys and values, and an MLP of width F with gate, up and down. N
tokens are sampled, T of them at a time, by P processes. FLOPs of one layer, of which processes share what is marked /P:

    forward      2 N (2 D^2 + 2 D K + 3 D F) / P                      of the dense model for statistics
    Gram         N (3 D^2 + F^2) / P                                  half of the products, as they are symmetric
    gains        4 G (2 D^2 + 2 D K + 3 D F) / P                      backward passes of G = 32 T random sums
    prediction   3 (D/2)^3 / 3 + (F/2)^3 / 3 + 2 (F/2)^3 + 6 (D/2)^3  every second column by the others, in each process
    order        (F^3 + D^3) + 4 (F^3 + D^3) / 3, in float64 /P       inverse, and removals one after another
    repair       2 x forward; N (3 D^2 + F^2) s^2 / P of Gram matrices; 2 N (...) / P of correlations and errors;
                 factors of 3 ridges, (3 D^3 + F^3) s^3 in float64, in each process; s is the share that is kept

Rates are those of matrix products in float32 and float64, of Cholesky factors in float64, of sums over processes, and
of the disk. Everything else (Python, norms, copies) is `OVERHEAD` times the products, from the runs of one process.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from common import RESULTS, keep, show

SHARE = 0.8
PROBES = 32
LIMIT = 2**31
"""Bytes that a repair may take, which takes fewer positions where more would be needed."""


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder, and of the samples it is pruned by."""

    name: str
    layers: int
    width: int
    keys: int
    mlp: int
    vocabulary: int
    tied: bool = False
    windows: int = 128
    window: int = 2048

    @property
    def tokens(self) -> int:
        """All tokens of the samples."""
        return self.windows * self.window

    @property
    def block(self) -> float:
        """Parameters of one layer."""
        return 2 * self.width**2 + 2 * self.width * self.keys + 3 * self.width * self.mlp

    @property
    def parameters(self) -> float:
        """All parameters."""
        return self.layers * self.block + (2 - self.tied) * self.vocabulary * self.width


@dataclass(frozen=True)
class Device:
    """Rates of one process, operations and bytes in a second, and its bytes of memory."""

    name: str
    single: float  # FLOPs of products in float32, or of TF32 where its rounding is no matter
    double: float  # FLOPs of products in float64
    factor: float  # FLOPs of Cholesky factors in float64
    network: float  # bytes that a sum over processes passes
    disk: float
    memory: float
    overhead: float  # time of everything else over that of products


ACCELERATOR = Device("accelerator, 80 GB", 40e12, 50e12, 10e12, 40e9, 2e9, 80e9, 1.5)
"""On paper: 67 TFLOPs of float32 and of float64 by tensor cores at their best, 400 Gbit/s, one NVMe."""
MODELS = (
    Decoder("8B", 32, 4096, 1024, 14336, 128256),
    Decoder("70B", 80, 8192, 1024, 28672, 128256),
    Decoder("405B", 126, 16384, 1024, 53248, 128256),
)


def costs(model: Decoder, device: Device, processes: int, *, by_block: bool) -> dict[str, float]:
    """Return the seconds of each stage, and the bytes of one process.

    `by_block`: one block is in memory at a time, its weights are read from the disk, and hidden states lie there.
    """
    n, d, f, p, kept = model.tokens, model.width, model.mlp, processes, SHARE
    rows = min(n, 32768)  # positions whose products are summed
    forward = 2 * n * model.block / p
    grams = rows * (3 * d**2 + f**2) / p
    half = (3 * (d / 2) ** 3 + (f / 2) ** 3) / 3 + 2 * (f / 2) ** 3 + 6 * (d / 2) ** 3
    gains = 4 * PROBES * model.window * model.block / p
    seconds = {
        "statistics": (forward + grams + (0 if by_block else gains)) / device.single + half / device.factor,
        "order": ((f**3 + d**3) / device.factor + 4 / 3 * (f**3 + d**3) / device.double) / p,
        "repair": (2 * forward + (1 + by_block) * kept**2 * grams + 4 * rows * model.block * kept / p) / device.single
        + (3 * d**3 + f**3) * kept**3 / device.factor,
    }
    sums = 8 * (3 * d**2 + f**2) * (1 + kept**2) + 8 * model.block * kept
    seconds = {stage: model.layers * value * (1 + device.overhead) for stage, value in seconds.items()}
    seconds["network"] = 0.0 if p == 1 else model.layers * 2 * (p - 1) / p * sums / device.network
    weights, states = 2 * model.parameters * (2 + kept), 4 * n * d * model.layers * 3 / p
    seconds["disk"] = (weights + states) / device.disk if by_block else weights / device.disk
    fit = min(LIMIT, 8 * (5 * (f * kept) ** 2 + 9 * rows / p * max(d, f)) + 4 * rows / p * (f + 2 * d))
    own = 4 * model.block * 3 if by_block else 4 * model.parameters * 2
    grams_held = 8 * (3 * d**2 + f**2) * (1 if by_block else model.layers)
    memory = own + max(grams_held, fit, 16 * f**2)
    disk = 2 * model.parameters * (1 + kept) + (4 * n * d * 3 if by_block else 0)
    return {**seconds, "memory": memory, "disk_bytes": disk, "sent": model.layers * sums}


def on_paper(device: Device) -> list[dict[str, Any]]:
    """Return a row for each model and number of devices, the way that fits into memory."""
    found = []
    for model in MODELS:
        for processes in (1, 8, 64):
            whole = costs(model, device, processes, by_block=False)
            by_block = whole["memory"] > device.memory
            cost = costs(model, device, processes, by_block=True) if by_block else whole
            times = {stage: cost[stage] for stage in ("statistics", "order", "repair", "network", "disk")}
            found.append(
                {
                    "model": model.name, "devices": processes, "way": "by block" if by_block else "whole",
                    **{f"{stage} min": seconds / 60 for stage, seconds in times.items()},
                    "all min": sum(times.values()) / 60, "binds": max(times, key=times.__getitem__),
                    "memory GB": cost["memory"] / 1e9, "disk GB": cost["disk_bytes"] / 1e9,
                    "sent GB": cost["sent"] / 1e9 if processes > 1 else 0.0,
                }
            )  # fmt: skip
    return found


def constants() -> Device:
    """Measure this machine, one thread."""
    import torch

    torch.set_num_threads(1)

    def rate(flops: float, call: Any) -> float:
        times = []
        for _ in range(4):
            start = time.process_time()
            call()
            times.append(time.process_time() - start)
        return flops / min(times)

    single, double = torch.randn(1536, 1536), torch.randn(1536, 1536, dtype=torch.float64)
    positive, size = double @ double.T + 1536 * torch.eye(1536, dtype=torch.float64), 1536.0
    whole = torch.randn(2**24)
    return Device(
        "this machine, one thread",
        rate(2 * size**3, lambda: single @ single),
        rate(2 * size**3, lambda: double @ double),
        rate(size**3 / 3, lambda: torch.linalg.cholesky(positive)),
        rate(3 * whole.nbytes, lambda: whole.add_(1)) / 4,  # gloo copies what it sums through memory
        1e9,
        16e9,
        0.0,
    )


def checked() -> list[dict[str, Any]]:
    """Return measured processor seconds beside those of the model, whose overhead the runs of one process give."""
    kept = json.loads((RESULTS / "shared_work.json").read_text())["rows"]
    machine = Device(**json.loads((RESULTS / "scale_model.json").read_text())["setting"]["machine"])
    rows = [row for row in kept if "x" in row["network"]]
    ratios = {}
    for stage in ("statistics", "order", "repair"):
        pairs = [(row["processor"][stage], _predicted(row, machine)[stage]) for row in rows if row["processes"] == 1]
        ratios[stage] = sum(measured for measured, _ in pairs) / sum(predicted for _, predicted in pairs)
    found = []
    for row in rows:
        predicted = _predicted(row, machine)
        both = {
            stage: (row["processor"][stage], ratios[stage] * predicted[stage] + predicted["network"] / 3)
            for stage in ratios
        }
        all_of = [sum(values) for values in zip(*both.values(), strict=True)]
        found.append(
            {
                "decoder": row["network"], "processes": row["processes"],
                **{f"{stage} s": measured for stage, (measured, _) in both.items()},
                **{f"{stage} predicted": value for stage, (_, value) in both.items()},
                "all s": all_of[0], "all predicted": all_of[1], "ratio": all_of[1] / all_of[0],
            }
        )  # fmt: skip
    return found


def _predicted(row: dict[str, Any], machine: Device) -> dict[str, float]:
    layers, width = map(int, row["network"].split("x"))
    model = Decoder("", layers, width, width, width * 7 // 2, 8192, True, row.get("windows", 32), 128)
    return costs(model, machine, row["processes"], by_block=False)


def main() -> None:
    """Show what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--constants", action="store_true")
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args()
    if options.constants:
        machine = asdict(constants())
        show([machine], as_json=options.json)
        rows = on_paper(ACCELERATOR)
        keep("scale_model", rows, {"machine": machine, "accelerator": asdict(ACCELERATOR), "share": SHARE})
        return
    show(checked() if options.check else on_paper(ACCELERATOR), as_json=options.json)


if __name__ == "__main__":
    main()
