"""Sections that show what `prunekit visualize` has written into the folder of a run."""

from __future__ import annotations

from typing import Any

from prunekit.report.pages.histograms_page import summed
from prunekit.report.pages.images_page import filters_of, mapped, pictured
from prunekit.report.run_data import Run
from prunekit.report.sections.section import register_section


@register_section("maps", about="class activation and saliency maps", order=100)
class MapsSection:
    """Where the models look: class activation and saliency maps."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """Return the maps in the folder, with their pictures."""
        maps = list(mapped(run.folder / "maps"))
        return {"maps": maps} if maps else None


@register_section("features", about="pictures of feature maps", order=110)
class FeaturesSection:
    """What layers make of an image: pictures of feature maps."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """Return the pictures in the folder."""
        features = pictured(run.folder / "features")
        return None if features is None else {"features": features}


@register_section("filters", about="the filters of the first layer", order=120)
class FiltersSection:
    """The filters of the first layer."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """Return the picture in the folder."""
        filters = filters_of(run.folder / "filters")
        return None if filters is None else {"filters": filters}


@register_section("statistics", about="dead and redundant channels", order=130)
class StatisticsSection:
    """Dead and redundant channels, with a link to all histograms."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """Return what the histograms in the folder come to."""
        statistics = summed(run.folder / "histograms", run.page_folder)
        return None if statistics is None else {"statistics": statistics}
