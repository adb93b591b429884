"""The page of a run's folder, whatever kind of run it is."""

from __future__ import annotations

from pathlib import Path

from prunekit.artifacts import write_text
from prunekit.report.run import Run, read_run


def write_page_again(folder: Path, target: Path | None) -> Path:
    """Renders it and returns its path; see `prunekit.report.write_again`."""
    where = target or folder / "report.html"
    write_text(where, _render(read_run(folder), where.parent))
    return where


def _render(run: Run, folder: Path) -> str:
    # A page of another kind imports what it alone needs: torch, for some.
    if run.profile:
        from prunekit.report import profile

        return profile.render(run)
    if run.analysis:
        from prunekit.report import sensitivity

        return sensitivity.render(run)
    from prunekit.report import page

    return page.render(run, folder=folder)
