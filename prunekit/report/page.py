"""The page of a run's folder, whatever kind of run it is, and what the terminal says of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from markupsafe import Markup

from prunekit.artifacts import StrPath, flat, write_text
from prunekit.report.gaps import figures_of, gaps
from prunekit.report.headline import tiles
from prunekit.report.run import Run, read_run
from prunekit.report.sections.registry import SECTIONS, Section, ordered
from prunekit.report.summary import again, sentence
from prunekit.report.templates import rendered

Part = TypeVar("Part")
Log = Callable[[str], object]
TEMPLATES = {"metrics.json": "page.html", "sensitivity.json": "sensitivity.html", "profile.json": "profile.html"}
"""Templates of the pages of each kind of run, by the file that holds its figures."""
FORMER = "report.old.html"
"""What a page is renamed to before one with fewer figures takes its place."""


def write_report(
    run_folder: StrPath,
    page: StrPath | None = None,
    *,
    state: str | None = None,
    whole: bool = True,
    sections: Sequence[str] = (),
    log: Log = lambda text: None,
) -> Path:
    """Render the page of a run of any kind, which needs no other file and asks for nothing on the network.

    Args:
        run_folder: the folder of a job, a sensitivity analysis or a latency profile, finished or not; a section whose
            file is not there says so.
        page: where to; None: `report.html` in the folder.
        state: shown in place of the one in `status.json`, for a page that is the last thing a run writes.
        whole: whether a damaged file is an error. If not, files that are damaged or gone are left out and named on the
            page, see `missing`; and if figures are gone, the page that was there before stays as `report.old.html`.
        sections: of your own on the page of a job, by `file.py:object`, beside those that are registered.
        log: is told of sections of others that raised; the page names them and has the rest.

    Returns:
        The path of the page.

    Raises:
        ArtifactError: the folder is not there, or a file in it is damaged.
        UsageError: there is no such section.
    """
    folder = Path(run_folder)
    target, run = Path(page or folder / "report.html"), read_run(folder, whole=whole)
    measured = run.status.get("state") == "finished"
    if page is None and not whole and measured and target.exists() and list(gaps(run, figures_of(run))):
        former = folder / FORMER
        if not former.exists():  # it may be the last place that has the figures
            target.rename(former)
    write_text(target, _render(replace(run, page=target), state, sections, log))
    return target


def missing(run_folder: StrPath) -> list[str]:
    """Return what the folder of a run should hold and does not, a sentence each with what to do.

    Raises:
        ArtifactError: the folder is not there.
    """
    folder = Path(run_folder)
    run = read_run(folder, whole=False)
    kept = [f"the page that was there before is {folder / FORMER}"] if (folder / FORMER).exists() else []
    found = list(gaps(run, figures_of(run)))
    return found + kept if found else []


def _render(run: Run, state: str | None, sections: Sequence[str], log: Log) -> str:
    kind, failed, values = figures_of(run), list[str](), dict[str, Any]()
    # A page of another kind imports what it alone needs: torch, for some.
    if kind == "profile.json":
        from prunekit.report import profile

        values = profile.values(run)
    elif kind == "sensitivity.json":
        from prunekit.report import sensitivity

        values = sensitivity.values(run)
    else:

        def note(text: str) -> Markup:
            failed.append(text)
            log(text)
            return Markup()

        values = {
            "metrics": run.metrics,
            "tiles": list(tiles(run.metrics)),
            "sentence": sentence(run.metrics),
            "again": again(run),
            "sections": [part for part in _shown(ordered(sections), lambda one: one.html(run), note) if part],
        }
    return rendered(
        TEMPLATES[kind],
        run=run,
        state=state or str(run.status.get("state", "unknown")),
        environment=[(key, _text(value)) for key, value in flat(run.environment) if value != {}],
        gaps=[*gaps(run, kind), *failed],
        **values,
    )


def lines(metrics: Mapping[str, Any], folder: Path) -> list[str]:
    """Return what the terminal says of a finished run after its table: what the sections of its page say, shortfalls,
    and where everything is.
    """
    run = Run(folder, metrics=dict(metrics))
    said = _shown(ordered(), lambda section: section.text(run), lambda text: [text])
    return [
        *(line for part in said for line in part),
        *(f"Shortfall: {shortfall}" for shortfall in metrics["shortfalls"]),
        f"Model: {folder / 'model'}",
        f"Report: {folder / 'report.html'}",
    ]


def _shown(
    sections: Iterable[Section], show: Callable[[Section], Part], instead: Callable[[str], Part]
) -> Iterator[Part]:
    """Yield what each section shows; where one of others raises, what stands instead of it."""
    for section in sections:
        try:
            part = show(section)
        except Exception as error:
            if section.name in SECTIONS.declared:
                raise
            part = instead(f"Section {section.name!r} raised {type(error).__name__}: {error}; it is missing here")
        yield part


def _text(value: Any) -> str:
    """Return a value of the environment as text."""
    return "none" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
