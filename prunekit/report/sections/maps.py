"""Where the models look: class activation and saliency maps."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from prunekit.report.maps import mapped
from prunekit.report.run import Run
from prunekit.report.sections.registry import register_section
from prunekit.report.templates import rendered


@register_section("maps", about="class activation and saliency maps", order=100)
class Maps:
    """Where the models look: class activation and saliency maps."""

    def read(self, run: Run) -> list[dict[str, Any]] | None:
        """The maps in the folder, with their pictures."""
        return mapped(run.folder / "maps") or None

    def html(self, maps: list[dict[str, Any]]) -> Markup:
        """The pictures."""
        return rendered("sections/maps.html", maps=maps)
