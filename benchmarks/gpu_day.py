"""Checks every claim of prunekit about CUDA, in half an hour, and writes one table: for whoever has a GPU.

    python benchmarks/gpu_day.py                        # exits 2 and says so where there is none
    python benchmarks/gpu_day.py --device cpu --quick   # the logic alone; what needs a GPU is skipped

Writes `gpu_day.json` and `gpu_day.md` to `--output` (default: benchmarks/results). Exits 1 if a claim does not hold. A
check that does not begin within `--minutes` is skipped.
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, spread

ROOT = Path(__file__).parent.parent
Figures = dict[str, Any]


class Skipped(Exception):
    """A check cannot be made here; says why."""


@dataclass(frozen=True)
class Setup:
    """Where checks run, and whether they only show that they do."""

    device: str
    quick: bool

    def require_cuda(self) -> None:
        if self.device == "cpu":
            raise Skipped("needs a CUDA device")


CHECKS: dict[str, tuple[str, Callable[[Setup], Figures]]] = {}


def check(claim: str) -> Callable[[Callable[[Setup], Figures]], Callable[[Setup], Figures]]:
    """Registers a function that raises AssertionError where a claim does not hold, and returns its figures."""

    def register(function: Callable[[Setup], Figures]) -> Callable[[Setup], Figures]:
        CHECKS[function.__name__] = claim, function
        return function

    return register


def resnet(setup: Setup) -> tuple[Any, Any, Any]:
    import torch
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10).to(setup.device)
    batch, size = (4, 32) if setup.quick else (64, 224)
    x = torch.randn(batch, 3, size, size, device=setup.device)
    return model, x, torch.arange(batch, device=setup.device) % 10


@contextmanager
def no_waiting(setup: Setup) -> Iterator[None]:
    """Raises where anything waits for the device."""
    import torch

    if setup.device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@check("every test marked `gpu` passes")
def marked_tests(setup: Setup) -> Figures:
    setup.require_cuda()
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    assert done.returncode == 0, done.stdout[-1500:]
    return {"pytest": last}


@check("plan, masks and compact model are computed on the device; masked and compact model agree")
def agreement(setup: Setup) -> Figures:
    import prunekit as pk

    model, x, _ = resnet(setup)
    model.eval()
    plan, on_cpu = pk.plan(model, x[:2], macs=0.5), pk.plan(copy.deepcopy(model).cpu(), x[:2].cpu(), macs=0.5)
    small = pk.compact(model, plan)
    found = pk.verify(model, small, plan, x[:2]).max_relative_difference
    same = float((plan.keep == on_cpu.keep).mean())
    assert {tensor.device.type for tensor in small.state_dict().values()} == {setup.device.partition(":")[0]}
    assert found < 1e-9, found
    assert same > 0.99, f"{same:.2%} of the plan is that of the CPU"
    return {"largest_relative_difference": found, "plan_as_on_cpu": same}


@check("masks, gradient masks and clamps never make the CPU wait in a training step")
def hooks_never_wait(setup: Setup) -> Figures:
    import torch

    import prunekit as pk

    model, x, y = resnet(setup)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    plan = pk.plan(model, x[:2], macs=0.5)
    with (
        pk.masked(model, plan, optimizer),
        pk.clamp_weight_grad(model, optimizer, {"*": 0.1}, by="norm"),
        pk.clamp_activation_grad(model, {"*": 0.1}),
    ):
        step(model, x, y, optimizer)
        with no_waiting(setup):
            for _ in range(3):
                step(model, x, y, optimizer)
    return {"steps": 3}


def step(model: Any, x: Any, y: Any, optimizer: Any) -> None:
    from torch.nn.functional import cross_entropy

    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


@check("masks cost little in a training step")
def masked_steps(setup: Setup) -> Figures:
    import torch

    import prunekit as pk

    model, x, y = resnet(setup)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    plan = pk.plan(model, x[:2], macs=0.5)
    plain = seconds_of(lambda: step(model, x, y, optimizer), setup)
    with pk.masked(model, plan, optimizer):
        masked = seconds_of(lambda: step(model, x, y, optimizer), setup)
    return {"plain_ms": 1e3 * plain, "masked_ms": 1e3 * masked, "ratio": masked / plain}


def seconds_of(work: Callable[[], object], setup: Setup) -> float:
    """Median time of some calls."""
    import torch

    wait = torch.cuda.synchronize if setup.device != "cpu" else lambda: None
    times = []
    for number in range(2 if setup.quick else 30):
        wait()
        start = time.perf_counter()
        work()
        wait()
        if number or setup.quick:
            times.append(time.perf_counter() - start)
    return spread(times)["median"]


@check("a pruned model is faster: eager, compiled, CUDA graphs")
def speed(setup: Setup) -> Figures:
    import prunekit as pk

    model, x, _ = resnet(setup)
    model.eval()
    small = pk.prune(model, x[:2], macs=0.5, round_to=8).model
    names = ("eager",) if setup.device == "cpu" else ("eager", "compile", "cudagraphs")
    settings = pk.LatencySettings(
        batches=(1,) if setup.quick else (1, 64), threads=(1,), repeats=5 if setup.quick else 50, runtimes=names,
        dtypes=("fp32",) if setup.device == "cpu" else ("fp32", "fp16"),
    )  # fmt: skip
    found = pk.bench({"dense": model.cpu(), "pruned": small.cpu()}, x[:1].cpu(), settings=settings, device=setup.device)
    rows = found.rows()
    assert rows, "nothing was timed"
    return {"rows": [{key: row[key] for key in row if key in KEPT} for row in rows]}


KEPT = ("model", "runtime", "dtype", "batch", "median_ms", "low_ms", "high_ms", "stable")


@check("repair on the device fits what it fits on the CPU")
def repair(setup: Setup) -> Figures:
    import prunekit as pk

    model, x, _ = resnet(setup)
    model.eval()
    count = 8 if setup.quick else 64
    images = x.repeat(-(-count // len(x)), 1, 1, 1)[:count, :, :32, :32]
    start = time.perf_counter()
    found = pk.prune(model, calibration=images, macs=0.7, criterion="l2")
    seconds = time.perf_counter() - start
    assert found.repair is not None
    assert found.repair.after <= found.repair.before
    return {"seconds": seconds, "error_before": found.repair.before, "error_after": found.repair.after}


@check("training runs on the device, in float32 and half precision, with masks exact after it")
def training(setup: Setup) -> Figures:
    found: Figures = {}
    for precision in ("fp32", "bf16") if setup.device == "cpu" else ("fp32", "bf16", "fp16"):
        found |= {
            f"{precision}_{key}": value for key, value in recipe(setup, f"finetune.precision={precision}").items()
        }
        if setup.quick:
            break
    return found


def recipe(setup: Setup, *changes: str, launcher: tuple[str, ...] = (sys.executable,)) -> Figures:
    """A short run of the command line, on digits."""
    text = (
        "name: gpu_day\nmodel: {name: resnet8, zoo: cifar}\ndata: {source: digits, image_size: 8, batch: 256}\n"
        "baseline: {epochs: 1}\nprune: {budget: {macs: 0.5}}\nfinetune: {epochs: 1}\ncontrol: false\n"
        "calibration: {images: 64}\nlatency: {batches: [1], repeats: 5}\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.yaml").write_text(text, encoding="utf-8")
        command = [*launcher, "-m", "prunekit", "finetune", "job.yaml", f"device={setup.device}", *changes]
        alone = {**os.environ, "PRUNEKIT_CACHE": str(Path(folder) / "cache")}  # the baseline is trained each time
        start = time.perf_counter()
        done = subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode in (0, 1), done.stderr[-1500:]  # 1: a tiny model may run no faster
        assert list(Path(folder).glob("runs/*/*/metrics.json")), done.stderr[-1500:]
    return {"seconds": time.perf_counter() - start}


@check("several processes train together over NCCL")
def processes(setup: Setup) -> Figures:
    import torch

    setup.require_cuda()
    count = torch.cuda.device_count()
    launcher = (sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}")
    return {"gpus": count, **recipe(Setup("cuda", setup.quick), launcher=launcher)}


@check("2:4 linear layers compute the same on sparse tensor cores, and are timed")
def sparse_tensor_cores(setup: Setup) -> Figures:
    import torch
    from torch import nn

    import prunekit as pk

    setup.require_cuda()
    if torch.cuda.get_device_capability() < (8, 0):
        raise Skipped("needs compute capability 8.0")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096)).half().to(setup.device).eval()
    x = torch.randn(1024, 4096, device=setup.device, dtype=torch.half)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            least = layer.weight.abs().unflatten(1, (-1, 4)).argsort(-1)[..., :2]
            layer.weight.copy_(layer.weight.unflatten(1, (-1, 4)).scatter(-1, least, 0).flatten(1))
        packed = pk.semi_structured(model, x)
        difference = float((model(x) - packed.model(x)).abs().max() / model(x).abs().max())
        dense, sparse = (seconds_of(lambda each=each: each(x), setup) for each in (model, packed.model))
    assert len(packed.packed) == 2, packed
    assert difference < 0.02, difference
    return {"backend": packed.backend, "difference": difference, "speedup": dense / sparse}


@check("TensorRT builds, computes the same, and uses 2:4 weights")
def tensorrt(setup: Setup) -> Figures:
    import importlib.util

    import prunekit as pk

    setup.require_cuda()
    if importlib.util.find_spec("tensorrt") is None:
        raise Skipped("needs the extra `tensorrt`")
    model, x, _ = resnet(setup)
    sparse = pk.prune(model.eval(), calibration=x[:16], pattern="2:4").model
    with tempfile.TemporaryDirectory() as folder:
        made = pk.export(sparse.cpu(), x[:2].cpu(), to="tensorrt", path=Path(folder) / "net.engine")
        return {"agreement": str(made.agreement)}


def rows(setup: Setup, minutes: float, only: str) -> Iterator[dict[str, Any]]:
    """A row for each check, as it is made."""
    end = time.monotonic() + 60 * minutes
    for name, (claim, function) in CHECKS.items():
        if not name.startswith(only):
            continue
        start, row = time.monotonic(), {"check": name, "claim": claim}
        try:
            if start > end:
                raise Skipped(f"the {minutes:g} minutes were over")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row |= {"result": "holds", "figures": function(setup)}
        except Skipped as why:
            row |= {"result": "skipped", "why": str(why)}
        except Exception as error:
            row |= {
                "result": "fails",
                "why": f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc()[-3000:],
            }
        yield row | {"seconds": round(time.monotonic() - start, 1)}


def table(made: list[dict[str, Any]], where: dict[str, Any]) -> str:
    """The rows in Markdown."""
    lines = ["| claim | result | figures | s |", "|---|---|---|---|"]
    for row in made:
        figures = {key: value for key, value in row.get("figures", {}).items() if not isinstance(value, list)}
        cells = [
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
        ]
        said = "; ".join(cells) or " ".join(row.get("why", "").split())[:200].replace("|", "/")
        lines.append(f"| {row['claim']} | {row['result']} | {said} | {row['seconds']} |")
    timed = [line for row in made for line in row.get("figures", {}).get("rows", [])]
    if timed:
        lines += ["", f"| {' | '.join(timed[0])} |", "|" + "---|" * len(timed[0])]
        lines += [
            f"| {' | '.join(f'{v:.4g}' if isinstance(v, float) else str(v) for v in row.values())} |" for row in timed
        ]
    about = [f"- {key}: {where[key]}" for key in ("cuda", "cpu", "torch", "python", "prunekit") if where.get(key)]
    return "\n".join(["# Claims about CUDA", "", *about, "", *lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:n, or cpu, which checks this script alone")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: figures mean nothing")
    parser.add_argument("--minutes", type=float, default=30, help="no check begins after them")
    parser.add_argument("--only", default="", help="checks whose name begins so")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the table")
    options = parser.parse_args()
    import torch

    if options.device != "cpu" and not torch.cuda.is_available():
        print(
            "gpu_day: there is no CUDA device here; run it where there is one, or --device cpu --quick", file=sys.stderr
        )
        return 2
    from prunekit.jobs.run.run_folder import environment
    from prunekit.utils.files import write_json

    made = []
    for row in rows(Setup(options.device, options.quick), options.minutes, options.only):
        made.append(row)
        print(
            f"{row['result']:8} {row['seconds']:7.1f} s  {row['claim']}{': ' + row['why'] if 'why' in row else ''}",
            flush=True,
        )
    options.output.mkdir(parents=True, exist_ok=True)
    setting = {"device": options.device, "quick": options.quick, "minutes": options.minutes}
    where = environment()
    write_json(options.output / "gpu_day.json", {"setting": setting, "environment": where, "rows": made})
    (options.output / "gpu_day.md").write_text(table(made, where), encoding="utf-8")
    return int(any(row["result"] == "fails" for row in made))


if __name__ == "__main__":
    sys.exit(main())
