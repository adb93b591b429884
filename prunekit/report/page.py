"""From a run folder to `report.html`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from prunekit.artifacts import write_text
from prunekit.report import figures, numbers
from prunekit.report.headline import compared, reference, tiles
from prunekit.report.run import Run, read_run


def write_page(run_folder: Path, state: str | None = None) -> Path:
    """Renders `report.html` into a run folder and returns its path; see `prunekit.report.write`."""
    page = run_folder / "report.html"
    write_text(page, render(read_run(run_folder), state))
    return page


def render(run: Run, state: str | None = None) -> str:
    """The page as HTML text."""
    environment = Environment(
        loader=PackageLoader("prunekit.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        {name: getattr(numbers, name) for name in ("count", "digits", "duration", "factor", "interval", "moment")}
    )
    # Norms have the widths of what feeds them: the layers that compute are the ones to show.
    layers = None if run.layers is None else run.layers[run.layers["macs_before"] > 0]
    return environment.get_template("page.html").render(
        run=run,
        metrics=run.metrics,
        state=state or str(run.status.get("state", "unknown")),
        tiles=list(tiles(run.metrics)),
        compared=list(compared(run.metrics)),
        reference=reference(run.metrics),
        layers=_records(layers),
        locks=_records(run.locks),
        widths=figures.figure_or_none(figures.widths, layers),
        histograms=figures.figure_or_none(figures.histograms, run.scores),
        curves=figures.figure_or_none(figures.curves, run.history),
        latencies=figures.figure_or_none(figures.latencies, run.latency_samples),
        environment=list(_flat(run.environment)),
    )


def _records(frame: Any) -> list[dict[str, Any]] | None:
    if frame is None:
        return None
    return [dict(record) for record in frame.astype(object).where(frame.notna(), None).to_dict("records")]


def _word(value: Any) -> str:
    return "none" if value is None else str(value)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list) else _word(value)
