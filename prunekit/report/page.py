"""From a run folder to `report.html`."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from prunekit import numbers
from prunekit.artifacts import write_text
from prunekit.measure import wording
from prunekit.report import curves, figures
from prunekit.report.explain import explained
from prunekit.report.features import filters_of, pictured
from prunekit.report.gaps import gaps
from prunekit.report.gradients import flow_figures
from prunekit.report.headline import (
    budgeted,
    compared,
    compiled,
    deployed,
    early,
    masked,
    models,
    on_time,
    reference,
    repaired,
    scores,
    taught,
    tiles,
)
from prunekit.report.maps import mapped
from prunekit.report.methods import how
from prunekit.report.run import Run, read_run
from prunekit.report.schedule import drawn
from prunekit.report.summary import again, sentence

SCRIPTS = ("sort.js", "scroll.js")
FILTERS = (
    "count",
    "difference",
    "digits",
    "duration",
    "factor",
    "interval",
    "moment",
    "percent",
    "scientific",
    "share",
    "size",
)


def write_page(run_folder: Path, state: str | None = None) -> Path:
    """Renders `report.html` into a run folder and returns its path; see `prunekit.report.write`."""
    page = run_folder / "report.html"
    write_text(page, render(read_run(run_folder), state))
    return page


def environment() -> Environment:
    """Where the pages' templates are, with the filters that write numbers in them."""
    found = Environment(
        loader=PackageLoader("prunekit.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update({name: getattr(numbers, name) for name in FILTERS})
    found.filters.update({"doubtful": wording.doubtful, "computed": wording.computed, "how": how})
    # The only script that a page's policy lets run is this one, by its hash.
    script = "".join(files("prunekit.report").joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    found.globals.update({"script": Markup(script), "script_source": f"sha256-{digest}"})
    return found


def render(run: Run, state: str | None = None, folder: Path | None = None) -> str:
    """The page as HTML text; links lead from `folder`, that of the run where none is given."""
    # Norms have the widths of what feeds them: the layers that compute are the ones to show.
    layers = None if run.layers is None else run.layers[run.layers["macs_before"] > 0]
    page = environment().get_template("page.html")
    return page.render(
        run=run,
        metrics=run.metrics,
        state=state or str(run.status.get("state", "unknown")),
        tiles=list(tiles(run.metrics)),
        sentence=sentence(run.metrics),
        again=again(run),
        gaps=list(gaps(run)),
        models=models(run.metrics),
        compared=list(compared(run.metrics)),
        reference=reference(run.metrics),
        layers=records(layers),
        locks=records(run.locks),
        widths=figures.figure_or_none(figures.widths, layers),
        sensitivity=_sensitivity(run),
        coupling=figures.figure_or_none(figures.coupling, run.coupling),
        histograms=figures.figure_or_none(figures.histograms, run.scores),
        curves=figures.figure_or_none(partial(figures.curves, labels=dict(scores(run.metrics))), run.history),
        gradients=flow_figures(run.gradients),
        skipped=_skipped(run.history),
        schedule=figures.figure_or_none(partial(drawn, summary=run.metrics.get("schedule")), run.schedule),
        taught=list(taught(run.metrics)),
        compiled=list(compiled(run.metrics)),
        early=list(early(run.metrics)),
        budgets=list(budgeted(run.metrics.get("plan", {}))),
        on_time=list(on_time(run.metrics)),
        masked=list(masked(run.metrics)),
        deployed=list(deployed(run.metrics)),
        repaired=list(repaired(run.metrics)),
        repair=records(run.repair),
        clamps=_by_run(run.clamps),
        unstable=wording.unstable(run.metrics.get("latency", []), run.metrics.get("speedup", [])),
        machine=wording.surroundings(run.metrics.get("machine", {}), run.metrics.get("latency", [])),
        explained=explained(run.metrics["explanation"]) if run.metrics.get("explanation") else None,
        maps=mapped(run.folder / "maps"),
        features=pictured(run.folder / "features"),
        filters=filters_of(run.folder / "filters"),
        statistics=_statistics(run.folder / "histograms", folder or run.folder),
        latencies=figures.figure_or_none(figures.latencies, run.latency_samples),
        environment=list(flat(run.environment)),
    )


def records(frame: Any) -> list[dict[str, Any]] | None:
    """A table's rows, with None where a field is empty; None where there is no table."""
    if frame is None:
        return None
    return [dict(record) for record in frame.astype(object).where(frame.notna(), None).to_dict("records")]


def _sensitivity(run: Run) -> Any:
    """The curves that a plan was made from, with where it stands; None without."""
    rows = run.sensitivity
    if rows is None or not curves.ways(rows):
        return None
    kept = None if run.coupling is None else run.coupling.drop_duplicates("group").set_index("group")["kept"].to_dict()
    return curves.heatmap(rows, kept), curves.lines(rows, kept)


def _statistics(folder: Path, start: Path) -> dict[str, Any] | None:
    from prunekit.report.histograms import summed  # which needs this module

    return summed(folder, start)


def _skipped(history: pd.DataFrame | None) -> dict[str, int]:
    """Steps that training runs did not make, by run, where there are any."""
    if history is None or "skipped" not in history.columns:
        return {}
    by_run = history.groupby("run", sort=False)["skipped"].sum()
    return {str(run): int(steps) for run, steps in by_run.items() if steps > 0}


def _by_run(clamps: pd.DataFrame | None) -> dict[str, Any] | None:
    """A row for each clamped module, with the share of each training run."""
    if clamps is None or clamps.empty:
        return None
    runs = list(dict.fromkeys(clamps["run"]))
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for record in clamps.to_dict("records"):
        key = record["clamp"], record["module"]
        rows.setdefault(key, {"shares": {}, **record})["shares"][record["run"]] = record["share"]
    return {"runs": runs, "rows": list(rows.values())}


def _word(value: Any) -> str:
    return "none" if value is None else str(value)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested values as rows of a name with dots and a text."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list) else _word(value)
