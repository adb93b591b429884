"""Hashes of what the package computes, before and after a change of the code that must not change what it computes.

Some 65 models (hand-written nets and ordinary networks of the tests, torchvision's, decoders, detectors) go through
trace, plan, scores, pruning on data with repair, ONNX and the folder in plain Python; one small recipe runs whole, and
its page is hashed with every number of a time masked. One thread, fixed seeds. Hashes compare two versions of the code
on one machine with the same libraries; on another machine they are other hashes.

    python benchmarks/equality.py --write FILE [--only A,B]
    python benchmarks/equality.py --check FILE [--only A,B]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import prunekit as pk

TESTS = Path(__file__).parent.parent / "tests"
sys.path += [str(TESTS / "channels"), str(TESTS / "ordinary"), str(TESTS)]

SAMPLES = 32
HAND_WRITTEN, ORDINARY = 6, 5
"""Steps through the lists: every sixth of the tests' nets, every fifth of the ordinary networks."""
CRITERIA = ("l1", "l2", "lamp", "fpgm", "elimination", "wanda", "activation_rms", "taylor")
JOB = "job"
Inputs = Callable[[int], Any]
Subject = tuple[nn.Module, Inputs, dict[str, Any]]
"""A model, an example of as many samples as asked for, and further arguments of `prunekit.trace`."""


def digest(*values: Any) -> str:
    """Twelve letters for values: tensors and arrays by their bytes, others by their text."""
    hashed = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().contiguous()
            hashed.update(f"{value.dtype}{tuple(value.shape)}".encode())
            hashed.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
        elif isinstance(value, np.ndarray):
            hashed.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        else:
            hashed.update(value if isinstance(value, bytes) else str(value).encode())
    return hashed.hexdigest()[:12]


def names() -> list[str]:
    """Every model's name, as it is built in a process of its own."""
    from net_cases import CASES
    from network_registry import every_network

    ours = [f"net:{name}" for name in sorted(CASES)[::HAND_WRITTEN]]
    ordinary = [f"ordinary:{name}" for name in sorted(every_network())[::ORDINARY]]
    return [*ours, *ordinary, *(f"torchvision:{name}" for name in TORCHVISION), *LANGUAGE, *DETECTORS, JOB]


TORCHVISION = (
    "resnet18", "mobilenet_v3_small", "efficientnet_b0", "shufflenet_v2_x0_5", "squeezenet1_1", "densenet121",
    "regnet_y_400mf", "googlenet", "mnasnet0_5", "vgg11_bn",
)  # fmt: skip
LANGUAGE = ("language:llama", "language:bert")
DETECTORS = ("detector:ssdlite320_mobilenet_v3_large", "detector:yolov8n")


def built(name: str) -> Subject:
    """Build a model by name, with weights from one seed."""
    torch.manual_seed(0)
    kind, _, name = name.partition(":")
    if kind == "net":
        from net_cases import CASES

        model, example = CASES[name][0]()
        with torch.no_grad():
            for at, parameter in enumerate(model.parameters()):
                if parameter.is_floating_point():
                    random = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(at)) * 0.3 + 0.1
                    parameter.copy_(random)
        return model, lambda count: example, {}
    if kind == "ordinary":
        from network_registry import every_network

        network = every_network()[name]
        return network.build(), network.inputs, {} if network.outputs is None else {"outputs": network.outputs}
    if kind == "torchvision":
        import torchvision

        quiet = {"init_weights": True} if name in ("googlenet", "vgg11_bn") else {}
        model = torchvision.models.get_model(name, num_classes=10, **quiet)
        return model, lambda count: torch.rand(count, 3, 64, 64), {}
    if kind == "language":
        import tiny_language

        model = tiny_language.llama() if name == "llama" else tiny_language.bert()
        return model, lambda count: {"input_ids": torch.randint(5, 45, (count, 12))}, {"outputs": "logits"}
    if name == "yolov8n":
        from ultralytics import YOLO

        return YOLO("yolov8n.yaml").model.float(), lambda count: torch.rand(count, 3, 64, 64), {}
    import torchvision

    model = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=4).eval()
    return model, lambda count: torch.rand(count, 3, 96, 96), {}


def facts(name: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what is computed of a model and its hash, each as soon as it is known."""
    if name == JOB:
        yield from job_facts(folder)
        return
    kind = name.partition(":")[0]
    model, inputs, wanted = built(name)
    model.eval()
    torch.manual_seed(1)
    example, data = inputs(2), inputs(SAMPLES)
    found: dict[str, Any] = {}

    def step(what: str, compute: Callable[[], Any]) -> tuple[str, str]:
        torch.manual_seed(2)
        try:
            found[what] = compute()
            shown = SHOWN[what](found[what])
            return what, digest(*shown)
        except Exception as error:
            text = re.sub(r"/\S+|0x[0-9a-f]+", "", str(error))
            return what, f"{type(error).__name__} {digest(text)}"

    yield step("map", lambda: pk.trace(model, example, **wanted))
    yield step("plan", lambda: pk.plan(model, example, macs=0.6, **wanted))
    yield step("uneven plan", lambda: pk.plan(model, example, params=0.5, criterion="l1", scope="global", **wanted))
    if name in SCORED:
        yield step("scores", lambda: scores(model, found["map"], inputs))
    yield step("prune", lambda: pk.prune(model, example, macs=0.6, **wanted))
    if kind != "net" and not name.endswith(UNREPAIRED):  # a net's example has few samples
        yield step("repair", lambda: pk.prune(model, example, calibration=data, macs=0.6, **wanted))
    if name in EXPORTED and "prune" in found:
        small = found["prune"].model
        yield step("onnx", lambda: exported(small, example, folder / "small.onnx"))
        yield step("standalone", lambda: exported(small, example, folder / "standalone"))


SCORED = ("torchvision:squeezenet1_1",)
UNREPAIRED = ("densenet121", "googlenet", "vgg11_bn", "regnet_y_400mf", "efficientnet_b0", "yolov8n")
"""Models whose repair takes a minute each."""
EXPORTED = ("torchvision:resnet18", "torchvision:mobilenet_v3_small", "torchvision:squeezenet1_1")


def scores(model: nn.Module, channel_map: Any, inputs: Inputs) -> list[Any]:
    """Scores of every label by each criterion."""
    from prunekit.criteria.scoring import score

    images, labels = inputs(SAMPLES), torch.arange(SAMPLES) % 10
    stats = pk.calibrate(model, [images])
    gradients = pk.collect_gradients(model, [(images, labels)], nn.functional.cross_entropy)
    patches = pk.collect(model, images).patches
    given = {"stats": stats, "gradients": gradients, "patches": patches}
    return [score(criterion, model, channel_map, **given) for criterion in CRITERIA]


def exported(model: nn.Module, example: Any, path: Path) -> bytes:
    """Bytes of an exported model, or of all files of a folder."""
    to = "onnx" if path.suffix else "standalone"
    pk.export(model, example, to=to, path=path, timed=())
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return b"".join(each.relative_to(path.parent).as_posix().encode() + stable(each) for each in files)


def stable(path: Path) -> bytes:
    """Bytes of a file; of text without times and versions."""
    content = path.read_bytes()
    if path.suffix in (".json", ".md", ".py", ".txt"):
        return masked(content.decode()).encode()
    return content


def masked(text: str) -> str:
    """Text with every number that has a point, and every date, masked: times are among them."""
    text = re.sub(r"\d{4}-\d\d-\d\d[T _-]\d\d[:\d.+-]*", "DATE", text)
    text = re.sub(r"/[\w./-]*(?:tmp|work)[\w./-]*", "PATH", text)
    return re.sub(r"\d+\.\d+(?:e-?\d+)?", "NUMBER", text)


def shown_map(channel_map: Any) -> list[Any]:
    labels = [
        (name, *(("-",) if axis is None else (axis.tobytes(),)))
        for name, axes in channel_map.labels.items()
        for axis in axes
    ]
    groups = [(group.name, group.labels.tobytes(), group.slots) for group in channel_map.groups]
    locks = [(lock.reason, lock.module, lock.operator, lock.channels) for lock in channel_map.locks]
    return [labels, groups, locks, channel_map.macs(), str(channel_map)]


def shown_plan(plan: Any) -> list[Any]:
    provenance = {key: value for key, value in plan.provenance.items() if "version" not in key and "second" not in key}
    return [plan.keep, plan.widths(), provenance, str(plan)]


def shown_model(result: Any) -> list[Any]:
    state = result.model.state_dict()
    return [*shown_plan(result.plan), *(part for name in state for part in (name, state[name]))]


SHOWN: dict[str, Callable[[Any], list[Any]]] = {
    "map": shown_map,
    "plan": shown_plan,
    "uneven plan": shown_plan,
    "scores": list,
    "prune": shown_model,
    "repair": shown_model,
    "onnx": lambda content: [content],
    "standalone": lambda content: [content],
}


RECIPE = """\
name: equality
threads: 1
model: {name: resnet18}
data: {source: digits, image_size: 32, batch: 32, split_seed: 7}
baseline: {epochs: 1, lr: 0.05}
prune: {budget: {macs: 0.5}, criterion: l2, scope: uniform, round_to: 8}
finetune: {epochs: 1, lr: 0.02}
latency: {batches: [1], threads: [1]}
"""


def job_facts(folder: Path) -> Iterator[tuple[str, str]]:
    """Run one recipe from baseline to report."""
    (folder / "equality.yaml").write_text(RECIPE)
    result = pk.finetune(folder / "equality.yaml", {"output": str(folder / "runs")}, log=lambda line: None)
    run = Path(result.folder)
    for file in ("plan/plan.json", "plan/plan.safetensors", "model/model.safetensors", "layers.csv"):
        if (run / file).is_file():
            yield file, digest(stable(run / file))
    metrics = json.loads((run / "metrics.json").read_text())
    yield "accuracy", digest(metrics["accuracy"], metrics["sparsity"], metrics["plan"])
    files = {re.sub(r"\d{5,}.*", "", path.relative_to(run).as_posix()) for path in run.rglob("*") if path.is_file()}
    yield "files", digest(sorted(files))
    headings = re.findall(r"<(?:h\d|th)\b[^>]*>(.*?)</", (run / "report.html").read_text(), flags=re.DOTALL)
    yield "headings", digest([heading for heading in headings if not re.search(r"\d", heading)])
    yield "page", page(folder / "made-up" / "run")


def page(folder: Path) -> str:
    """Hash the page of a run whose figures are made up, times too."""
    from synthetic_run import write_run

    write_run(folder)
    subprocess.run([sys.executable, "-m", "prunekit", "report", str(folder)], check=True, capture_output=True)
    return digest(re.sub(re.escape(str(folder)), "RUN", (folder / "report.html").read_text()))


def of_model(name: str) -> dict[str, str]:
    """All hashes of a model, in a process with one thread."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PRUNEKIT_CACHE"] = folder
        try:
            return dict(facts(name, Path(folder)))
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"[:300]}


def main() -> int:
    """Write or check the hashes of all models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--check", type=Path)
    parser.add_argument("--only", help="names, or beginnings of names, by commas")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    only = tuple(given.only.split(",")) if given.only else ("",)
    chosen = [name for name in names() if name.startswith(only) or name.partition(":")[2].startswith(only)]
    before = json.loads(given.check.read_text()) if given.check else {}
    found, differ = {}, 0
    with get_context("spawn").Pool(given.processes, maxtasksperchild=8) as pool:
        for name, row in zip(chosen, pool.imap(of_model, chosen), strict=True):
            found[name] = row
            others = [
                what for what in {**row, **before.get(name, {})} if before.get(name, {}).get(what) != row.get(what)
            ]
            said = " ".join(f"{what}={value}" for what, value in row.items()) if not given.check else "same"
            if given.check and others:
                differ += 1
                said = "DIFFERS: " + ", ".join(f"{w}: {before.get(name, {}).get(w)} -> {row.get(w)}" for w in others)
            print(f"{name}  {said}", flush=True)
    if given.write:
        given.write.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} models" + (f", {differ} differ" if given.check else ""))
    return 1 if differ else 0


if __name__ == "__main__":
    raise SystemExit(main())
