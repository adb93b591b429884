"""A run, a sensitivity analysis, a latency profile, or a comparison of runs as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prunekit.artifacts import StrPath


def write(run_folder: StrPath, *, state: str | None = None) -> Path:
    """Renders `report.html` into a run folder: one page that needs no other file and asks for nothing on the network.

    Args:
        run_folder: the folder of a run, finished or not; a section whose file is not there says so.
        state: shown in place of the one in `status.json`, for a page that is the last thing a run writes.

    Returns:
        The path of the page.

    Raises:
        ArtifactError: the folder is not there, or a file in it is damaged.
    """
    # pandas and matplotlib take most of a second to import, and `prunekit.numbers` needs neither.
    from prunekit.report.page import write_page

    return write_page(Path(run_folder), state)


def write_sensitivity(run_folder: StrPath, *, state: str | None = None) -> Path:
    """Renders `report.html` into the folder of a sensitivity analysis; see `write`."""
    from prunekit.report.sensitivity import write_sensitivity_page

    return write_sensitivity_page(Path(run_folder), state)


def write_profile(run_folder: StrPath, *, state: str | None = None) -> Path:
    """Renders `report.html` into the folder of a latency profile; see `write`."""
    from prunekit.report.profile import write_profile_page

    return write_profile_page(Path(run_folder), state)


def write_explanation(folder: StrPath, result: Mapping[str, Any]) -> Path:
    """Renders `explain.html` into a folder, which is made; `result` is a `workflow.explain.Explanation` as JSON has it,
    with the names of its `dense` and `pruned` models.
    """
    from prunekit.report.explain import write_explanation_page

    return write_explanation_page(Path(folder), result)


def write_features(folder: StrPath) -> Path:
    """Renders `features.html` into a folder of pictures that `prunekit.workflow.features.write_features` has written,
    with what it returned in `features.json`.

    Raises:
        ArtifactError: a file is missing or damaged.
    """
    from prunekit.report.features import write_features_page

    return write_features_page(Path(folder))


def write_again(
    run_folder: StrPath,
    page: StrPath | None = None,
    *,
    sections: Sequence[str] = (),
    log: Callable[[str], object] = lambda text: None,
) -> Path:
    """Renders the page of a run of any kind: a job, a sensitivity analysis or a latency profile.

    Args:
        run_folder: of the run, finished or not.
        page: where to; None: `report.html` in the folder.
        sections: of your own on the page of a job, by `file.py:object`, beside those that are registered.
        log: is told of sections of others that raised; the page names them and has the rest.

    Raises:
        ArtifactError: the folder is not there.
        UsageError: there is no such section.

    Files that are damaged or gone are left out, and named on the page; see `missing`. Where figures are gone, the page
    that was there before stays as `report.old.html`.
    """
    from prunekit.report.again import write_page_again

    return write_page_again(Path(run_folder), None if page is None else Path(page), sections, log)


def missing(run_folder: StrPath) -> list[str]:
    """What the folder of a run should hold and does not, a sentence each with what to do; nothing of a whole run.

    Raises:
        ArtifactError: the folder is not there.
    """
    from prunekit.report.again import missing as found

    return found(Path(run_folder))


def write_comparison(run_folders: Sequence[StrPath], page: StrPath) -> dict[str, Any]:
    """Renders a page that compares runs of `finetune` and `prune`, with links to their reports, which are written where
    they are missing.

    Returns:
        What is on the page: `runs`, `latency`, `recipes` (what differs) and `notes`.

    Raises:
        UsageError: a run has not finished, or is of another kind.
        ArtifactError: a folder is not there, or a file in it is damaged.
    """
    from prunekit.report.compare import write_comparison_page

    return write_comparison_page([Path(folder) for folder in run_folders], Path(page))


def write_histograms(folder: StrPath, run: StrPath | None = None) -> Path:
    """Renders `histograms.html` into a folder that `prunekit.workflow.statistics.write_statistics` has written, with
    what it returned in `histograms.json`; `run` is the folder of the run whose scores are shown too.

    Raises:
        ArtifactError: a file is missing or damaged.
    """
    from prunekit.report.histograms import write_histograms_page

    return write_histograms_page(Path(folder), None if run is None else Path(run))


__all__ = [
    "missing",
    "write",
    "write_again",
    "write_comparison",
    "write_explanation",
    "write_features",
    "write_histograms",
    "write_profile",
    "write_sensitivity",
]
