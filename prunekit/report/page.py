"""From a run folder to `report.html`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prunekit.artifacts import write_text
from prunekit.report.gaps import gaps
from prunekit.report.headline import tiles
from prunekit.report.run import Run, read_run
from prunekit.report.sections.registry import SECTIONS, Section, ordered
from prunekit.report.summary import again, sentence
from prunekit.report.templates import rendered

Log = Callable[[str], object]


def write_page(run_folder: Path, state: str | None = None) -> Path:
    """Renders `report.html` into a run folder and returns its path; see `prunekit.report.write`."""
    page = run_folder / "report.html"
    write_text(page, render(read_run(run_folder), state))
    return page


def render(run: Run, state: str | None = None, sections: Sequence[str] = (), log: Log = lambda text: None) -> str:
    """The page as HTML text.

    Args:
        sections: that are on it beside the registered ones, by `file.py:object`.
        log: is told of sections of others that raised, which the page names too.

    Raises:
        ArtifactError: a picture or table of a section is damaged.
        UsageError: there is no section of a name.
    """
    shown, failed = [], list[str]()
    for section in ordered(sections):
        try:
            shown.append(section.html(run))
        except Exception as error:
            if section.name in SECTIONS.declared:
                raise
            failed.append(raised(section, error))
            log(failed[-1])
    return of_run(
        "page.html",
        run,
        state,
        [*gaps(run), *failed],
        metrics=run.metrics,
        tiles=list(tiles(run.metrics)),
        sentence=sentence(run.metrics),
        again=again(run),
        sections=[part for part in shown if part],
    )


def of_run(template: str, run: Run, state: str | None, missing: Iterable[str], **values: Any) -> str:
    """A page of a run's folder, of whatever kind it is."""
    state = state or str(run.status.get("state", "unknown"))
    environment = list(flat(run.environment))
    return rendered(template, run=run, state=state, environment=environment, gaps=list(missing), **values)


def headline(run: Run) -> list[str]:
    """What the terminal says of a run that has finished, after its table: the sections of its page, in their order."""
    lines = []
    for section in ordered():
        try:
            lines += section.text(run)
        except Exception as error:
            if section.name in SECTIONS.declared:
                raise
            lines.append(raised(section, error))
    return lines


def raised(section: Section, error: Exception) -> str:
    """Says that a section is missing, and why."""
    return f"Section {section.name!r} raised {type(error).__name__}: {error}; it is missing here"


def _word(value: Any) -> str:
    return "none" if value is None else str(value)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested values as rows of a name with dots and a text."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list) else _word(value)
