"""Sections on channels: importance scores, sensitivity, coupling, and locks."""

from __future__ import annotations

from typing import Any

from prunekit.report.figures import charts as figures
from prunekit.report.figures import error_curves as curves
from prunekit.report.run_data import Run, records
from prunekit.report.sections.section import register_section


@register_section("scores", about="importance scores of kept and removed channels", order=140)
class ScoresSection:
    """Importance scores of kept and removed channels."""

    def read(self, run: Run) -> dict[str, Any]:
        """Return histograms of each channel group."""
        return {"histograms": figures.figure_or_none(figures.histograms, run.scores)}


@register_section("sensitivity", about="error against kept channels, which a plan was made from", order=150)
class SensitivitySection:
    """Error against kept channels, which a plan was made from."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """Return the curves, with where the plan stands; None if the plan was not made from such curves."""
        if run.sensitivity is None or not curves.ways(run.sensitivity):
            return None
        groups = None if run.coupling is None else run.coupling.drop_duplicates("group").set_index("group")
        kept = None if groups is None else groups["kept"].to_dict()
        return {"sensitivity": (curves.heatmap(run.sensitivity, kept), curves.lines(run.sensitivity, kept))}


@register_section("coupling", about="channels that can only be kept or removed together", order=160)
class CouplingSection:
    """Channels that are coupled."""

    def read(self, run: Run) -> dict[str, Any]:
        """Return a figure of groups and modules."""
        return {"coupling": figures.figure_or_none(figures.coupling, run.coupling)}


@register_section("locks", about="locked channels, and why", order=170)
class LocksSection:
    """Locked channels, with reasons."""

    def read(self, run: Run) -> dict[str, Any]:
        """Return the rows of a table."""
        return {"locks": records(run.locks)}
