"""Exports by `prunekit.export`, dense and pruned: which format holds a model, how far it differs, size and time.

By default the figures of models of usual sizes with random weights, dense and at half of their MACs, in every format
that is installed: the largest relative difference of the file's outputs from eager at two batch sizes, megabytes, and
how much faster than eager the file is at batch 1 and 8, timed alternately on one thread with what the times support.

With `--zoo` whether models of a zoo export to ONNX, dense and pruned to half of their channels, for any batch, else for
one; `yes` where ONNX Runtime agrees with eager to 1e-4. The dense model is tried where the pruned one does not.

    python benchmarks/export.py [--models A,B] [--formats A,B] [--json] [--keep]
    python benchmarks/export.py --zoo torchvision|timm|hf|ultralytics [--models A,B] [--size 96] [--limit SECONDS]
                                [--json] [--keep]
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, as_markdown, keep, show
from coverage_check import where_from
from uses import check_one, passed
from zoo_cases import OWN, Case, images, randomize
from zoo_process import in_process

import prunekit
from prunekit.backends.backend import FORMATS
from prunekit.utils.inputs import as_example, select_samples

SAMPLES = 8
BATCHES = (1, 8)
COLUMNS = ("model", "which", "format", "difference", "mb", "batch", "eager_ms", "ms", "faster", "low", "high", "reason")


def _torchvision(name: str) -> Callable[[], Case]:
    return lambda: importlib.import_module("zoo_torchvision").build(name, None)


def _timm(name: str) -> Callable[[], Case]:
    return lambda: importlib.import_module("zoo_timm").build(name, None)


def _bert() -> Case:
    """BERT of its published size, for two classes."""
    import transformers

    words = 128

    def tokens(batch: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(1000, 20_000, (batch, words))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return Case(transformers.BertForSequenceClassification(transformers.BertConfig()).eval(), tokens, ("logits",))


def _yolo() -> Case:
    """A detector in its usual size; predictions are read of it."""
    zoo = importlib.import_module("zoo_ultralytics")
    case = zoo.build("yolo11n", None)
    return Case(case.model, images(320), case.outputs)


MODELS: dict[str, Callable[[], Case]] = {
    "resnet34": _torchvision("resnet34"),
    "mobilenet_v3_small": _torchvision("mobilenet_v3_small"),
    "vit_b_16": _torchvision("vit_b_16"),
    "swin_t": _torchvision("swin_t"),
    "mobilevit_s": _timm("mobilevit_s"),
    "bert_base": _bert,
    "yolo11n": _yolo,
}


def figures_of(name: str, formats: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a model, in parts as `in_process` takes them."""
    torch.manual_seed(0)
    case = MODELS[name]()
    randomize(case.model)
    example = as_example(case.model, case.inputs(SAMPLES))
    one = select_samples(example, slice(0, 1))
    pruned = prunekit.prune(case.model, one, macs=0.5, **case.wanted)
    for which, model in (("dense", case.model.eval()), ("pruned", pruned)):
        for kind in formats:
            yield {f"{which} {kind}": list(_measured(model, example, kind))}


def _measured(model: Any, example: tuple[Any, ...], kind: str) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"model{FORMATS.get(kind).suffix}"
        try:
            found = prunekit.export(model, example, to=kind, path=path, timed=BATCHES, log=_silent)
        except Exception as error:  # a format that cannot hold the model: a row of the table
            yield {"reason": where_from(error)[:300]}
            return
    row = {"difference": found.max_relative_difference, "mb": found.size_bytes / 1e6}
    for timed in found.latency_rows() or [{}]:
        times = {key: timed.get(key) for key in ("batch", "eager_ms", "ms", "low", "high")}
        yield {**row, **times, "faster": timed.get("median"), "reason": "; ".join(found.notes)}


def _silent(line: str) -> None:
    """Exports report their steps, which are no rows of a table."""


def figures(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of all models, each as soon as it is known."""
    usable = [kind for kind in FORMATS.names if not FORMATS.get(kind).unusable()]
    formats = options.formats or usable
    for name in options.models or MODELS:
        found, problem = in_process(lambda name=name: figures_of(name, formats), options.limit)
        for key, rows in found.items():
            which, _, kind = key.partition(" ")
            for row in rows:
                yield _shown({"model": name, "which": which, "format": kind, **row}, options)
        if problem:
            yield _shown({"model": name, "reason": problem}, options)


def zoo_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Whether models of a zoo export to ONNX, each as soon as it is known."""
    zoo: Any = importlib.import_module(f"zoo_{options.zoo}")
    options.uses, options.times = ["ONNX"], False
    names = options.models or (_classifiers() if options.zoo == "torchvision" else zoo.names())
    for name in names:
        found, problem = in_process(lambda name=name: check_one(zoo, name, options), options.limit)
        row = {"model": name, "onnx": found.get("ONNX", found.get("problem", problem)), "passed": False}
        row["passed"] = passed({"onnx": row["onnx"]})
        yield _shown(row, options)


def _classifiers() -> list[str]:
    import torchvision

    return list(torchvision.models.list_models(module=torchvision.models))


def _shown(row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    if options.json:
        print(json.dumps(row), flush=True)
    return row


def _summary(found: Sequence[dict[str, Any]]) -> str:
    """How many export where the dense model does."""
    own = sum(row["onnx"].startswith(OWN) for row in found)
    yes = sum(row["onnx"].startswith("yes") and row["passed"] for row in found)
    share = f" ({yes / (len(found) - own):.1%})" if len(found) > own else ""
    return f"{yes} of {len(found) - own}{share} export to ONNX where the dense model does; {own} dense ones do not"


def _keep(found: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Writes rows, in place of earlier ones of the same models."""
    name = f"export_{options.zoo}" if options.zoo else "export"
    if (RESULTS / f"{name}.json").exists():
        new = {row["model"] for row in found}
        kept = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
        found = [*(row for row in kept if row["model"] not in new), *found]
    if options.zoo:
        setting: dict[str, Any] = {"zoo": options.zoo, "share": 0.5, "size": options.size or "the model's own"}
        text = f"# {options.zoo}: {_summary(found)}\n\n" + as_markdown(
            sorted(found, key=lambda row: row["passed"]), ("model", "onnx")
        )
    else:
        setting = {"macs": 0.5, "threads": 1, "samples": SAMPLES}
        text = "# Exports, dense and at half of the MACs\n\n" + as_markdown(found, COLUMNS)
    print(keep(name, found, setting), file=sys.stderr)
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")


def main() -> None:
    """Exports the models and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", choices=("torchvision", "timm", "hf", "ultralytics"))
    parser.add_argument("--models", type=lambda given: given.split(","), help="comma-separated; all when not given")
    parser.add_argument("--formats", type=lambda given: given.split(","), help="comma-separated; all when not given")
    parser.add_argument("--size", type=int, help="side of images in a zoo, for models that take any")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each export")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--keep", action="store_true", help="write the rows to benchmarks/results/export*.json and .md")
    options = parser.parse_args()
    for name in options.models or () if not options.zoo else ():
        if name not in MODELS:
            parser.error(f"--models: expected some of {', '.join(MODELS)}, got {name}")
    found = list(zoo_rows(options) if options.zoo else figures(options))
    if not options.json:
        show(found, as_json=False)
    if options.zoo:
        print(_summary(found), file=sys.stderr)
    if options.keep:
        _keep(found, options)


if __name__ == "__main__":
    main()
