"""What layers make of an image: pictures of feature maps."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from prunekit.report.features import pictured
from prunekit.report.run import Run
from prunekit.report.sections.registry import register_section
from prunekit.report.templates import rendered


@register_section("features", about="pictures of feature maps", order=110)
class Features:
    """What layers make of an image: pictures of feature maps."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """The pictures in the folder."""
        return pictured(run.folder / "features")

    def html(self, features: dict[str, Any]) -> Markup:
        """The pictures."""
        return rendered("sections/features.html", features=features)
