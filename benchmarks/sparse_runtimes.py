"""What zeros of single weights gain in the runtimes of a CPU: speed over the same network without zeros.

Each network is copied with some of its weights set to zero by a pattern (random positions; times do not depend on
values), and all copies of a runtime are timed alternately with the dense one: `speedup` is the median over the rounds
of dense over sparse time, `low` and `high` are the 10th and 90th percentile. The row `again` is a copy without zeros,
whose distance from 1 is the noise. `csr` is one linear layer whose weight is `to_sparse_csr()`, which torch gives to
MKL. `openvino int8` needs NNCF; `openvino int8, rate` sets `CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE` to 0.5, and is timed
over the same dense int8 network. One thread.

    python benchmarks/sparse_runtimes.py [--json] [--only PREFIX] [--rounds N] [--quick] [--keep]
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torchvision
from common import keep, ratio, shown_as_made
from torch import Tensor, nn

from prunekit.backends.files.onnx_program import export_onnx
from prunekit.backends.int8.openvino_quantizer import OpenvinoQuantizer
from prunekit.backends.onnx_runtime import input_names, open_session
from prunekit.backends.openvino import compiled_file
from prunekit.backends.session import Setting
from prunekit.compaction.zero_patterns import zero_patterns
from prunekit.measure.latency.timing import alternate
from prunekit.utils.availability import int8_note

RATE = "CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE"
SHARES = {"50 %": 0.5, "80 %": 0.8, "90 %": 0.9, "95 %": 0.95}
CSR_SHARES = {**SHARES, "98 %": 0.98, "99 %": 0.99}
FEEDS = 64
"""Vectors or images that NNCF takes ranges from: times do not depend on them."""
Runs = Mapping[str, Callable[[], object]]


def kept(weight: Tensor, pattern: str) -> Tensor:
    """Which entries of a weight (outputs, inputs, ...) a pattern keeps, at random."""
    scores = torch.rand(weight.shape)
    if pattern == "again":
        return torch.ones_like(scores, dtype=torch.bool)
    if pattern == "2:4":
        groups = scores.movedim(1, -1).unflatten(-1, (-1, 4))
        return (groups.argsort(-1).argsort(-1) >= 2).flatten(-2).movedim(-1, 1)
    if pattern == "16x16, 90 %":
        blocks = torch.rand(weight.shape[0] // 16, weight.shape[1] // 16, *weight.shape[2:]) >= 0.9
        return blocks.repeat_interleave(16, 0).repeat_interleave(16, 1)
    return scores >= SHARES[pattern]


def sparse(model: nn.Module, pattern: str) -> nn.Module:
    """A copy with zeros by a pattern in every layer but those with fewer than 16 inputs, as the first."""
    result = copy.deepcopy(model)
    for module in result.modules():
        if (
            isinstance(module, nn.Linear | nn.Conv2d)
            and module.weight.shape[1] % 16 == 0 == module.weight.shape[0] % 16
        ):
            module.weight.data *= kept(module.weight, pattern)
    return result


def perceptron(quick: bool) -> nn.Module:
    """Two large linear layers, as in a transformer."""
    width = 64 if quick else 1024
    return nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


def networks(quick: bool) -> dict[str, tuple[nn.Module, Tensor]]:
    """Networks with an input, by the name of the row."""
    layers = perceptron(quick)
    width = layers[0].in_features  # type: ignore[index]
    if quick:
        return {"perceptron, batch 1": (layers, torch.randn(1, width))}
    resnet = torchvision.models.resnet18(num_classes=16)
    return {
        "resnet18, 112 px, batch 1": (resnet, torch.randn(1, 3, 112, 112)),
        "perceptron, batch 1": (layers, torch.randn(1, width)),
        "perceptron, batch 64": (layers, torch.randn(64, width)),
    }


def eager(model: nn.Module, x: Tensor, _: Path) -> Callable[[], object]:
    """The model as it is."""
    return partial(model, x)


def exported(model: nn.Module, x: Tensor, folder: Path) -> Path:
    """The file of a model, which all runtimes share."""
    file = folder / "model.onnx"
    return file if file.exists() else export_onnx(model, x, file)


def quantized(model: nn.Module, x: Tensor, folder: Path) -> Path:
    """The file in int8 that NNCF makes of it."""
    file, known = exported(model, x, folder), sorted((folder / "int8").glob("*.xml"))
    if known:
        return known[0]
    (folder / "int8").mkdir()
    batches = [{input_names(open_session(file, 1))[0]: x.numpy()}]
    quantizer = OpenvinoQuantizer(file, folder / "int8", batches, min(len(x), FEEDS), correct_biases=False)
    return quantizer.quantize(quantizer.ways[0], frozenset(quantizer.layers))


def onnxruntime(model: nn.Module, x: Tensor, folder: Path) -> Callable[[], object]:
    """In ONNX Runtime, from a file."""
    session = open_session(exported(model, x, folder), 1)
    return partial(session.run, None, {session.get_inputs()[0].name: x.numpy()})


def openvino(model: nn.Module, x: Tensor, folder: Path, rate: float | None = None) -> Callable[[], object]:
    """In OpenVINO, from the same file."""
    return _compiled(exported(model, x, folder), x, "float32", rate)


def openvino_int8(model: nn.Module, x: Tensor, folder: Path, rate: float | None = None) -> Callable[[], object]:
    """In OpenVINO, quantized by NNCF."""
    return _compiled(quantized(model, x, folder), x, "int8", rate)


def _compiled(file: Path, x: Tensor, dtype: str, rate: float | None) -> Callable[[], object]:
    options = {} if rate is None else {RATE: rate}
    request = compiled_file(file, Setting("openvino", "cpu", len(x), 1, dtype), **options).create_infer_request()
    return partial(request.infer, [x.numpy()], share_inputs=True, share_outputs=True)


FORMS: dict[str, tuple[Callable[..., Callable[[], object]], float | None]] = {
    "eager": (eager, None),
    "onnxruntime": (onnxruntime, None),
    "openvino": (openvino, None),
    "openvino, rate": (openvino, 0.5),
    "openvino int8": (openvino_int8, None),
    "openvino int8, rate": (openvino_int8, 0.5),
}
PATTERNS = ("again", *SHARES, "2:4", "16x16, 90 %")


def _ms(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def compared(runs: Runs, rounds: int) -> Iterator[tuple[str, dict[str, float]]]:
    """The speedup of each run over the first."""
    names = list(runs)
    for run in runs.values():
        for _ in range(3):
            run()
    times = alternate([partial(_ms, run) for run in runs.values()], rounds)
    for index, name in enumerate(names[1:], 1):
        found = ratio(times[0].tolist(), times[index].tolist())
        yield name, {
            "speedup": found["ratio"], "low": found["low"], "high": found["high"],
            "sparse_ms": found["baseline_ms"], "dense_ms": found["median_ms"],
        }  # fmt: skip


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each network, runtime and pattern."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield from _csr(options)
    for network, (model, x) in networks(options.quick).items():
        copies = {"dense": model.eval(), **{pattern: sparse(model.eval(), pattern) for pattern in PATTERNS}}
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            for name in copies:
                Path(folder, name).mkdir()
            for runtime in FORMS:
                if _wanted(runtime, network, options.only):
                    yield from _timed(runtime, network, copies, x, Path(folder), options.rounds)


def _wanted(runtime: str, network: str, only: str) -> bool:
    """Whether to time it: int8 where there is NNCF, rates on fully connected layers, which they are for."""
    able = "int8" not in runtime or find_spec("nncf") is not None
    return able and f"{runtime}/{network}".startswith(only) and not (FORMS[runtime][1] and network.startswith("resnet"))


def _timed(
    runtime: str, network: str, copies: Mapping[str, nn.Module], x: Tensor, folder: Path, rounds: int
) -> Iterator[dict[str, Any]]:
    form, rate = FORMS[runtime]
    runs = {}
    for name, model in copies.items():
        given = {} if rate is None or name == "dense" else {"rate": rate}
        runs[name] = form(model, x, folder / name, **given)
    for pattern, found in compared(runs, rounds):
        yield {"name": f"{runtime}/{network}/{pattern}", "zeros": zero_patterns(copies[pattern]).share, **found}


def _csr(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of one linear layer whose weight is in CSR."""
    width = 64 if options.quick else 1024
    weight = torch.randn(4 * width, width)
    for batch in (1, 64):
        name = f"csr/linear {width}x{4 * width}, batch {batch}"
        if not name.startswith(options.only):
            continue
        x = torch.randn(batch, width)
        runs: dict[str, Callable[[], object]] = {"dense": partial(nn.functional.linear, x, weight)}
        for pattern, zeros in CSR_SHARES.items():
            packed = (weight * (torch.rand(weight.shape) >= zeros)).to_sparse_csr()
            runs[pattern] = partial(nn.functional.linear, x, packed)
        with torch.no_grad():
            for pattern, found in compared(runs, options.rounds):
                yield {"name": f"{name}/{pattern}", "zeros": CSR_SHARES[pattern], **found}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the rows, and keeps them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", metavar="PREFIX")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="narrow layers, to see that it runs")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args(arguments)
    found = shown_as_made(rows(options), options, parser, "row")
    if options.keep:
        keep("sparse_runtimes", found, {"rounds": options.rounds, "threads": 1, "cpu": int8_note()})


if __name__ == "__main__":
    main()
