"""What is done with models in PyTorch, on compact models: whatever the dense one can do, the compact one can.

Each model of a zoo is pruned to half of its channels, saved as a folder and loaded again. Then it is copied, pickled,
saved, traced, scripted, compiled, exported and run in parallel, and each time has to compute the same as before (see
`uses_of_model.py`). A cell is `yes`, with what is missing where the dense model misses it too; `dense too:` where the
dense model fails in it or does no better; else what the compact model does not do and the dense one does. Weights are
random; one process a model, one thread.

    python benchmarks/uses.py [--zoo torchvision|timm|hf|ultralytics|geometric|diffusers] [--models A,B] [--uses A,B]
                              [--size 96] [--limit SECONDS] [--json] [--keep]
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, keep, show
from coverage_check import said, where_from
from uses_of_model import FOR_BOTH, USES, Sample, Use, sample_of
from zoo_cases import OWN, Case, Zoo, randomize
from zoo_process import in_process

import prunekit
from prunekit.utils.inputs import as_example

ZOOS = ("torchvision", "timm", "hf", "ultralytics", "geometric", "diffusers")
CHECKS = ("fuses", "generates", "own_save", "own_average")
"""Columns of what the models' own packages do with them."""
LONGEST = 200
"""Letters of a cell."""
FAMILIES = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3",
    "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18",
    "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11", "vgg11_bn",
    "vit_b_32", "wide_resnet50_2", "deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large",
    "fasterrcnn_mobilenet_v3_large_320_fpn", "fcos_resnet50_fpn", "keypointrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn", "retinanet_resnet50_fpn", "ssd300_vgg16", "ssdlite320_mobilenet_v3_large", "mc3_18",
    "mvit_v2_s", "r2plus1d_18", "s3d", "swin3d_t", "raft_small",
)  # fmt: skip
"""Of every family of torchvision the smallest model."""


def check_one(zoo: Zoo, name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One model, in this process: its row in parts, each as soon as it is known."""
    torch.manual_seed(0)
    try:
        case = zoo.build(name, options.size)
        randomize(case.model)
        case.model.eval()
        pruned = prunekit.prune(case.model, as_example(case.model, case.inputs(1)), channels=0.5, **case.wanted)
        with tempfile.TemporaryDirectory() as folder:
            prunekit.save(pruned, Path(folder) / "model")
            loaded = prunekit.load(Path(folder) / "model", case.model)
        compact = {"": pruned.model.eval(), "loaded: ": loaded.eval()}
        sample = sample_of(case.model, case.inputs, case.outputs)
    except Exception as error:  # the zoo or the engine failed: a row of the table, not the end of it
        yield {"problem": f"not pruned: {where_from(error)}"}
        return
    yield {}
    uses = {column: use for column, use in USES.items() if column in options.uses}
    for column, use in uses.items():
        start = time.perf_counter()
        yield {column: _cell(case, compact, sample, use, both=column in FOR_BOTH)}
        if options.times:
            print(f"{name} {column} {time.perf_counter() - start:.1f}", file=sys.stderr)
    for column, check in case.checks.items():
        if column in options.uses:
            yield {column: said(lambda check=check: check(case, pruned, as_example(case.model, case.inputs(1))))}


def _cell(case: Case, compact: Mapping[str, Any], sample: Sample, use: Use, *, both: bool) -> str:
    tried = compact if both else {"loaded: ": compact["loaded: "]}
    for where, model in tried.items():
        found = _said(use, model, sample)
        if found != "yes":
            dense = _said(use, case.model, sample)
            if not _worse(found, dense):
                return found if found.startswith("yes") else f"{OWN}: {dense}"
            return f"{where}{found}; dense: {dense}"
    return "yes"


def _said(use: Use, model: Any, sample: Sample) -> str:
    """What a use of a copy says, which has not run before: what a package adds at the first call is no other use's."""
    return said(lambda: use(copy.deepcopy(model).eval(), sample))[:LONGEST]


def _worse(found: str, dense: str) -> bool:
    """Whether the dense model does what the compact one does not."""
    if not dense.startswith("yes") or found == dense:
        return False
    counts = [int(one.split()[2]) for one in (found, dense) if one.endswith("graphs")]
    return len(counts) < 2 or counts[0] > counts[1]


def passed(row: Mapping[str, Any]) -> bool:
    """Whether the compact model does all that the dense one does."""
    cells = {column: value for column, value in row.items() if column not in ("model", "passed", "environment")}
    return all(value.startswith(("yes", OWN)) and "; dense: " not in value for value in cells.values())


def rows(zoo: Zoo, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows, each as soon as it is known."""
    for name in options.models:
        found, problem = in_process(lambda name=name: check_one(zoo, name, options), options.limit)
        row: dict[str, Any] = {"zoo": options.zoo, "model": name, **found}
        if problem:
            last = [column for column in USES if column in found][-1:]
            row["problem"] = f"{problem}, after {last[0] if last else 'the start'}"
        row["passed"] = passed({column: value for column, value in row.items() if column != "zoo"})
        if options.json:
            print(json.dumps(row), flush=True)
        yield row


def as_markdown(found: Sequence[Mapping[str, Any]]) -> str:
    """A table with a line for each model, those first that lose something; and a sum over each use."""
    names = ("zoo", "model")
    uses = [column for column in dict.fromkeys(key for row in found for key in row) if column not in (*names, "passed")]
    uses.sort(key=lambda column: column == "problem")
    columns = [*names, *uses]
    lines = [f"# Uses: {sum(row['passed'] for row in found)} of {len(found)} compact models do all that their dense "
             "models do", "", "| use | yes | dense too | compact alone fails |", "|---|---|---|---|"]  # fmt: skip
    for column in uses:
        cells = [row[column] for row in found if column in row]
        own = sum(cell.startswith(OWN) for cell in cells)
        fine = sum(cell.startswith("yes") and "; dense: " not in cell for cell in cells)
        lines.append(f"| {column} | {fine} | {own} | {len(cells) - own - fine} |")
    lines += ["", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in sorted(found, key=lambda row: row["passed"]):
        lines.append("| " + " | ".join(str(row.get(column, "")).replace("|", "\\|") for column in columns) + " |")
    return "\n".join(lines) + "\n"


def _keep(found: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Writes rows in place of earlier ones of the same models."""
    new = {(row["zoo"], row["model"]): row for row in found}
    if (RESULTS / "uses.json").exists():
        kept = json.loads((RESULTS / "uses.json").read_text(encoding="utf-8"))["rows"]
        earlier = {(row["zoo"], row["model"]): row for row in kept}
        new = {**earlier, **{key: {**earlier.get(key, {}), **row} for key, row in new.items()}}
    for row in new.values():
        row["passed"] = passed({column: value for column, value in row.items() if column != "zoo"})
    setting = {"batch": 2, "threads": 1, "share": 0.5, "size": options.size or "the model's own"}
    print(keep("uses", list(new.values()), setting), file=sys.stderr)
    (RESULTS / "uses.md").write_text(as_markdown(list(new.values())), encoding="utf-8")


def main() -> None:
    """Checks the models and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", choices=ZOOS, default="torchvision")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--models", type=lambda given: given.split(","), help="comma-separated; when not given those "
                        "of the zoo, of torchvision the smallest of each family")  # fmt: skip
    parser.add_argument(
        "--uses", type=lambda given: given.split(","), help="comma-separated columns; all when not given"
    )
    parser.add_argument("--size", type=int, help="side of images, for models that take any; their own when not given")
    parser.add_argument("--limit", type=float, default=120, help="seconds for each use")
    parser.add_argument("--times", action="store_true", help="print the seconds of each use")
    parser.add_argument("--keep", action="store_true", help="write the rows to benchmarks/results/uses.json and .md")
    options = parser.parse_args()
    zoo: Any = importlib.import_module(f"zoo_{options.zoo}")
    options.uses = options.uses or [*USES, *CHECKS]
    options.models = options.models or (FAMILIES if options.zoo == "torchvision" else zoo.names())
    for name in options.models:
        if not zoo.knows(name):
            parser.error(f"--models: {options.zoo} has no model {name!r}")
    found = list(rows(zoo, options))
    if not options.json:
        show(found, as_json=False)
    print(f"{sum(row['passed'] for row in found)} of {len(found)} do all that the dense model does", file=sys.stderr)
    if options.keep:
        _keep(found, options)


if __name__ == "__main__":
    main()
