"""The page of `visualize histograms`: distributions of weights and activations, dead and redundant channels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from prunekit.errors import ArtifactError
from prunekit.reading.text_files import read_json
from prunekit.report.figures import charts as figures
from prunekit.report.figures.canvas import COLORS, canvas, stacked
from prunekit.report.figures.charts import MAX_GROUPS, shortened
from prunekit.report.pages.images_page import as_data, read_facts, read_picture
from prunekit.report.rendering import linked, write
from prunekit.report.run_data import read_run

FACTS, PAGE = "histograms.json", "histograms.html"
MOST_ROWS = 200
"""Limit of rows of a table; all are in the CSV file."""


def write_histograms(folder: Path, run: Path | None = None) -> Path:
    """Render `histograms.html` into a folder that `prunekit.jobs.pictures.write_statistics` has written."""
    facts = read_json(folder / FACTS)
    try:
        rows = pd.read_csv(folder / "histograms.csv", dtype={"layer": str}, keep_default_na=False)
    except (ValueError, OSError) as error:
        raise ArtifactError(f"{folder / 'histograms.csv'}: expected a CSV table, but {error}") from error
    kinds = {kind: rows[rows["kind"] == kind] for kind in ("weights", "activations")}
    return write(
        folder / PAGE,
        "histograms.html",
        facts=facts,
        filters=as_data(read_picture(folder / facts["filters"])) if facts["filters"] else None,
        most=MOST_ROWS,
        parts={kind: figures.figure_or_none(distributions, part) for kind, part in kinds.items()},
        scores=None if run is None else figures.figure_or_none(figures.histograms, read_run(run).scores),
        summary=by_layer(facts["findings"]),
    )


def distributions(rows: pd.DataFrame) -> tuple[Markup, int, int]:
    """Return a panel for each layer, with the histogram of each model as the share of its values."""
    names, kind = list(rows["layer"].drop_duplicates()), str(rows["kind"].iloc[0])
    chosen = figures.evenly(names, MAX_GROUPS)
    columns = 4
    height = math.ceil(len(chosen) / columns)
    with canvas(columns, height, 1.65 * height + 0.5, kind, used=len(chosen)) as (figure, panels):
        for axes, name in zip(panels, chosen, strict=False):
            _panel(axes, name, rows[rows["layer"] == name], log=kind == "activations")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=2)
        label = f"Histograms of the {kind} of each layer"
        return stacked(figure, label, len(chosen), size="small"), len(chosen), len(names)


def _panel(axes: Any, name: str, rows: pd.DataFrame, *, log: bool) -> None:
    for model, part in rows.groupby("model", sort=False):
        edges = np.append(part["low"].to_numpy(), part["high"].iloc[-1])
        if edges[0] == edges[-1]:
            edges = edges + np.linspace(-0.5, 0.5, len(edges))  # a single value
        shares = 100 * part["count"].to_numpy() / max(part["count"].sum(), 1)
        # Bins of two models have the same width only if their ranges are the same.
        shares = shares / (edges[1] - edges[0])
        color = COLORS.get(str(model), COLORS["pruned"])
        axes.stairs(shares, edges, color=color, fill=True, alpha=0.25)
        axes.stairs(shares, edges, color=color, label=str(model), linewidth=1.1)
    axes.set_title(shortened(name, 26), fontsize=9.5)
    axes.tick_params(labelsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(3))
    if log:
        axes.set_yscale("log")
    axes.yaxis.set_major_formatter(NullFormatter() if log else FuncFormatter(lambda value, _: ""))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", which="both", left=False)


def histogram_counts(folder: Path, start: Path) -> dict[str, Any] | None:
    """Return how many channels of each model are dead and redundant, by `histograms.json` in a folder."""
    keys = {"images", "threshold", "channels", "findings"}
    facts = read_facts(folder / FACTS, keys, "channels and findings") if (folder / PAGE).is_file() else None
    if facts is None:
        return None
    found = Counter((row["model"], row["finding"]) for row in facts["findings"])
    rows = [
        {"model": model, "channels": channels, "dead": found[model, "dead"], "redundant": found[model, "redundant"]}
        for model, channels in facts["channels"].items()
    ]
    page = linked(folder / PAGE, start / "report.html")
    return {"images": facts["images"], "threshold": facts["threshold"], "page": page, "rows": rows}


def by_layer(findings: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the dead and the redundant channels of each model and layer."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for one in findings:
        key = one["model"], one["layer"]
        row = rows.setdefault(key, {"model": key[0], "layer": key[1], "dead": [], "redundant": []})
        row[one["finding"]].append(one["channel"])
    return list(rows.values())
