"""Sections on the models of a run: scores, sizes, latency, exported files, layers, channels, and what to do now."""

import os
import shlex
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from prunekit.data.roots import EXTENSIONS
from prunekit.measure.latency import row_text
from prunekit.report import headline
from prunekit.report.figures import charts as figures
from prunekit.report.headline import samples, scores, unit
from prunekit.report.run_data import Run, options_of, own_code, recipe_of, records
from prunekit.report.sections.section import register_section
from prunekit.utils.display import in_unit, scientific, share, size

SAID = {"budgets": "Budget", "blocks": "Blocks:", "on_time": "Time:", "deployed": "Deployed:"}


@register_section("result", about="scores and sizes of the models, and budgets", order=10, lines=SAID)
def result(run: Run) -> dict[str, Any]:
    """Return the metrics, and the lines that page and terminal share."""
    return {
        "metrics": run.metrics,
        "intervals": headline.intervals(run.metrics),
        "models": headline.models(run.metrics),
        "compared": list(headline.compared(run.metrics)),
        "reference": headline.reference(run.metrics),
        "deployed": list(headline.deployed(run.metrics)),
        "budgets": list(headline.budgeted(run.metrics.get("plan", {}))),
        "blocks": list(headline.blocks(run.metrics)),
        "on_time": list(headline.on_time(run.metrics)),
    }


@register_section("latency", about="measured latencies, and budgets of time", order=20, lines={"said": "Speedup of"})
def latency(run: Run) -> dict[str, Any]:
    """Return the rows of latencies beside their speedups, and a figure of the samples."""
    latencies, speedups = run.metrics.get("latency", []), run.metrics.get("speedup", [])
    delivered = run.metrics.get("delivered")
    last = [] if delivered is None else [{**delivered["target"], **delivered["final"], "model": "the delivered model"}]
    return {
        "metrics": run.metrics,
        "rows": list(row_text.paired(latencies, speedups)),
        "memory": any(row.get("peak_memory_bytes") is not None for row in latencies),
        "said": map(row_text.speedup_text, speedups),
        "latencies": figures.figure_or_none(figures.latencies, run.latency_samples),
        "unstable": row_text.unstable_lines(latencies, [*speedups, *last]),
        "machine": row_text.machine_text(run.metrics.get("machine", {}), latencies),
    }


@register_section(
    "exports", about="exported files: size, scores, latency, and how to run them", order=35, lines={"said": "Exported:"}
)
def exports(run: Run) -> dict[str, Any] | None:
    """Return a row for each exported file, with the command that runs it; None if the run exported nothing."""
    if not run.metrics.get("exports"):
        return None
    name, label = scores(run.metrics)[0]
    of, files = unit(run.metrics, name), [_export_row(row, name, run.folder) for row in run.metrics["exports"]]

    def said(row: Mapping[str, Any]) -> str:
        reached = "" if row["score"] is None else f", {label} {in_unit(row['score'], of)}"
        return f"{row['path']}: {size(row['size_bytes'])}{reached}; {row['agrees']}"

    return {"files": files, "score": label, "unit": of, "said": map(said, files)}


def _export_row(row: Mapping[str, Any], score: str, folder: Path) -> dict[str, Any]:
    """Return the values of a file's row in the table."""
    scores, quantized = row.get("scores") or {}, row.get("quantized")
    inputs = "real inputs" if row.get("real_inputs") else "random inputs"
    agrees = f"differs from eager by {scientific(row.get('max_relative_difference'))} on {inputs}"
    path, alone = folder / str(row.get("path")), row.get("format") in ("standalone", "hub")
    command = ["python", path / "model.py"] if alone else ["prunekit", "predict", path]
    if quantized:
        agrees = f"int8, output error {share(quantized.get('error'), 1)} on calibration data"
    return {
        **{key: row.get(key) for key in ("path", "format", "size_bytes", "quantized")},
        "score": scores.get(score),
        "low": scores.get("low"),
        "high": scores.get("high"),
        "agrees": agrees,
        "times": [
            *({**one, "over": "the model in eager", "other_ms": one["eager_ms"]} for one in row.get("latency") or []),
            *({**one, "over": f"the {one['over']} file"} for one in (quantized or {}).get("speedup") or []),
        ],
        "notes": row.get("notes") or [],
        "command": shlex.join([*map(str, command), "image.jpg"]),
    }


@register_section("widths", about="the layers that compute, before and after", order=90)
def widths(run: Run) -> dict[str, Any]:
    """Return a figure of the layers that compute, before and after, and the rows of a table."""
    # Norms have the widths of what feeds them: the layers that compute are the ones to show.
    layers = None if run.layers is None else run.layers[run.layers["macs_before"] > 0]
    figure = figures.figure_or_none(figures.widths, layers)
    return {"widths": figure, "layers": records(layers), "blocks": list(headline.blocks(run.metrics))}


@register_section("scores", about="importance scores of kept and removed channels", order=140)
def importance(run: Run) -> dict[str, Any]:
    """Return histograms of the scores of kept and removed channels, for each channel group."""
    return {"histograms": figures.figure_or_none(figures.histograms, run.scores)}


@register_section("coupling", about="channels that can only be kept or removed together", order=160)
def coupling(run: Run) -> dict[str, Any]:
    """Return a figure of channel groups and the modules that they couple."""
    return {"coupling": figures.figure_or_none(figures.coupling, run.coupling)}


@register_section("locks", about="locked channels, and why", order=170)
def locks(run: Run) -> dict[str, Any]:
    """Return the rows of a table of locked channels, with reasons."""
    return {"locks": records(run.locks)}


FOLDERS = 1000
"""Folders that are looked through for an image: the place is what a recipe says, which may be anybody's."""


@register_section("usage", about="what to do with the model now, as commands", order=5)
def usage(run: Run) -> dict[str, Any] | None:
    """Return commands that load, test, run, export and time the model of this run; None if it has no model yet."""
    if (folder := final_model(run)) is None:
        return None
    image = _image(run)
    return {"steps": list(_steps(run, folder, image)), "samples": samples(run.metrics), "image": image}


def final_model(run: Run) -> Path | None:
    """Return the folder of the model that the run delivers, with its whole path; None if there is none yet."""
    folder = run.folder.absolute() / ("deployed" if run.metrics.get("deployment") else "model")
    return folder if folder.is_dir() else None


def testing(run: Run) -> str:
    """Return the command that tests the model of a run on the data of its recipe; empty if it lacks either."""
    folder = final_model(run)
    words = ["prunekit", "evaluate", str(folder), *options_of(run, "model", "data")]
    return shlex.join(words) if folder is not None and run.recipe else ""


def _steps(run: Run, folder: Path, image: str | None) -> Iterator[tuple[str, str]]:
    """Yield what is done, and the command or the lines of Python that do it."""
    both, own = options_of(run, "model", "data"), own_code(run).get("model")
    model, place = ["--model", own] if own else [], repr(str(folder))
    load = f"import prunekit as pk\n\nmodel = pk.load({place})"
    if own:
        load = (
            "import prunekit as pk\nfrom prunekit.models.zoo import load_factory\n\n"
            f"dense = load_factory({own!r})\nmodel = pk.load({place}, model=dense)"
        )
    yield "Load it in Python", load
    if test := testing(run):
        yield "Test it on the test data of this run", test
    if image is not None:
        shown = ["prunekit", "predict", str(folder), image, *model]
        yield "Run it on an image, or a folder of them", shlex.join(shown)
    exports = [("Export it to ONNX; the file is checked and timed", "onnx", "model.onnx")]
    if samples(run.metrics) == "images":
        exports.append(("Write a folder that runs without prunekit, for a server", "standalone", "standalone"))
    for title, kind, name in exports:
        words = ["prunekit", "export", str(folder), "--to", kind, "--output", str(folder.parent / name)]
        yield title, shlex.join([*words, *both])
    timed, title = [str(folder), *model], "Time it again"
    if run.recipe:
        timed, title = [str(folder.parent / "recipe.yaml"), str(folder), *both], "Time it again, beside the dense model"
    yield title, shlex.join(["prunekit", "bench", *timed])


def _image(run: Run) -> str | None:
    """Return the path of an image of the run's data; None if they are no image files, or not here."""
    data = recipe_of(run).get("data") or {}
    if data.get("source") not in ("imagefolder", "coco", "yolo"):
        return None
    folders = islice(os.walk(str(data.get("root"))), FOLDERS)
    files = (os.path.join(place, name) for place, _, names in folders for name in sorted(names))
    return next((file for file in files if file.lower().endswith(EXTENSIONS)), None)
