"""The page of a run's folder, whatever kind of run it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from prunekit.artifacts import write_text
from prunekit.report.gaps import figures_of, gaps
from prunekit.report.run import Run, read_run

Log = Callable[[str], object]
FORMER = "report.old.html"
"""What a page is renamed to before one with fewer figures takes its place."""


def write_page_again(folder: Path, target: Path | None, sections: Sequence[str], log: Log) -> Path:
    """Renders it and returns its path; see `prunekit.report.write_again`."""
    where, run = target or folder / "report.html", read_run(folder, whole=False)
    measured = run.status.get("state") == "finished"
    if target is None and measured and where.exists() and list(gaps(run, figures_of(run))):
        former = folder / FORMER
        if not former.exists():  # it may be the last place that has the figures
            where.rename(former)
    write_text(where, _render(replace(run, page=where), sections, log))
    return where


def missing(folder: Path) -> list[str]:
    """What the folder of a run should hold and does not; see `prunekit.report.missing`."""
    run = read_run(folder, whole=False)
    kept = [f"the page that was there before is {folder / FORMER}"] if (folder / FORMER).exists() else []
    found = list(gaps(run, figures_of(run)))
    return found + kept if found else []


def _render(run: Run, sections: Sequence[str], log: Log) -> str:
    # A page of another kind imports what it alone needs: torch, for some.
    kind = figures_of(run)
    if kind == "profile.json":
        from prunekit.report import profile

        return profile.render(run)
    if kind == "sensitivity.json":
        from prunekit.report import sensitivity

        return sensitivity.render(run)
    from prunekit.report import page

    return page.render(run, sections=sections, log=log)
