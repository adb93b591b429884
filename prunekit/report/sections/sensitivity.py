"""Error against kept channels, which a plan was made from."""

from __future__ import annotations

from markupsafe import Markup

from prunekit.report import curves
from prunekit.report.run import Run
from prunekit.report.sections.registry import register_section
from prunekit.report.templates import rendered


@register_section("sensitivity", about="error against kept channels, which a plan was made from", order=150)
class Sensitivity:
    """Error against kept channels, which a plan was made from."""

    def read(self, run: Run) -> Run | None:
        """The run, where its plan was made from such curves."""
        return None if run.sensitivity is None or not curves.ways(run.sensitivity) else run

    def html(self, run: Run) -> Markup:
        """The curves, with where the plan stands."""
        assert run.sensitivity is not None
        groups = None if run.coupling is None else run.coupling.drop_duplicates("group").set_index("group")
        kept = None if groups is None else groups["kept"].to_dict()
        figures = curves.heatmap(run.sensitivity, kept), curves.lines(run.sensitivity, kept)
        return rendered("sections/sensitivity.html", sensitivity=figures)
