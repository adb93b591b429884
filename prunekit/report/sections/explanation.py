"""What keeps the pruned model from its ideal speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from prunekit.report.explain import explained
from prunekit.report.run import Run
from prunekit.report.sections.registry import register_section
from prunekit.report.templates import rendered


@register_section("explanation", about="what keeps the pruned model from its ideal speed", order=30)
class Explanation:
    """What keeps the pruned model from its ideal speed."""

    def read(self, run: Run) -> Mapping[str, Any] | None:
        """The explanation, where there is one."""
        return run.metrics.get("explanation") or None

    def html(self, data: Mapping[str, Any]) -> Markup:
        """Causes, modules and operators."""
        return rendered("sections/explanation.html", **explained(data))
