"""Sections that show pictures in the folder of a run: detections, and what `prunekit visualize` has written."""

from __future__ import annotations

from typing import Any

from prunekit.report.pages.histograms_page import histogram_counts
from prunekit.report.pages.images_page import detections_data, features_data, filters_data, maps_data
from prunekit.report.run_data import Run
from prunekit.report.sections.section import register_section


@register_section("detections", about="test images with boxes, dense beside pruned", order=95)
class DetectionsSection:
    """Boxes in test images: as labeled, and as the models find them."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """Return the pictures in the folder."""
        detections = detections_data(run.folder / "detections")
        return None if detections is None else {"detections": detections}


@register_section("maps", about="class activation and saliency maps", order=100)
class MapsSection:
    """Places that the models look at: class activation and saliency maps."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """Return the maps in the folder, with their pictures."""
        maps = list(maps_data(run.folder / "maps"))
        return {"maps": maps} if maps else None


@register_section("features", about="pictures of feature maps", order=110)
class FeaturesSection:
    """Pictures of feature maps of an image."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """Return the pictures in the folder."""
        features = features_data(run.folder / "features")
        return None if features is None else {"features": features}


@register_section("filters", about="the filters of the first layer", order=120)
class FiltersSection:
    """The filters of the first layer."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """Return the picture in the folder."""
        filters = filters_data(run.folder / "filters")
        return None if filters is None else {"filters": filters}


@register_section("statistics", about="dead and redundant channels", order=130)
class StatisticsSection:
    """Dead and redundant channels, with a link to all histograms."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """Return what the histograms in the folder come to."""
        statistics = histogram_counts(run.folder / "histograms", run.page_folder)
        return None if statistics is None else {"statistics": statistics}
