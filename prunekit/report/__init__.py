"""A run, a sensitivity analysis or a latency profile as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write(run_folder: Path, *, state: str | None = None) -> Path:
    """Renders `report.html` into a run folder: one page that needs no other file and asks for nothing on the network.

    Args:
        run_folder: the folder of a run, finished or not; a section whose file is not there says so.
        state: shown in place of the one in `status.json`, for a page that is the last thing a run writes.

    Returns:
        The path of the page.

    Raises:
        ArtifactError: the folder is not there, or a file in it is damaged.
    """
    # pandas and matplotlib take most of a second to import, and `report.numbers` needs neither.
    from prunekit.report.page import write_page

    return write_page(Path(run_folder), state)


def write_sensitivity(run_folder: Path, *, state: str | None = None) -> Path:
    """Renders `report.html` into the folder of a sensitivity analysis; see `write`."""
    from prunekit.report.sensitivity import write_sensitivity_page

    return write_sensitivity_page(Path(run_folder), state)


def write_profile(run_folder: Path, *, state: str | None = None) -> Path:
    """Renders `report.html` into the folder of a latency profile; see `write`."""
    from prunekit.report.profile import write_profile_page

    return write_profile_page(Path(run_folder), state)


def write_explanation(folder: Path, result: Mapping[str, Any]) -> Path:
    """Renders `explain.html` into a folder, which is made; `result` is a `workflow.explain.Explanation` as JSON has it,
    with the names of its `dense` and `pruned` models.
    """
    from prunekit.report.explain import write_explanation_page

    return write_explanation_page(Path(folder), result)


def write_features(folder: Path) -> Path:
    """Renders `features.html` into a folder of pictures that `prunekit.workflow.features.write_features` has written,
    with what it returned in `features.json`.

    Raises:
        ArtifactError: a file is missing or damaged.
    """
    from prunekit.report.features import write_features_page

    return write_features_page(Path(folder))


__all__ = ["write", "write_explanation", "write_features", "write_profile", "write_sensitivity"]


def write_histograms(folder: Path, run: Path | None = None) -> Path:
    """Renders `histograms.html` into a folder that `prunekit.workflow.statistics.write_statistics` has written, with
    what it returned in `histograms.json`; `run` is the folder of the run whose scores are shown too.

    Raises:
        ArtifactError: a file is missing or damaged.
    """
    from prunekit.report.histograms import write_histograms_page

    return write_histograms_page(Path(folder), run)
