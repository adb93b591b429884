"""The page of a run: its sections, the command that repeats it, and what is missing in its folder."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from markupsafe import Markup

from prunekit.errors import ArtifactError, PrunekitError, reason_of
from prunekit.reading.text_files import read_json
from prunekit.report.figures.canvas import are_drawn
from prunekit.report.figures.charts import frontier
from prunekit.report.headline import sentence, tiles
from prunekit.report.rendering import rendered
from prunekit.report.run_data import Run, options_of, read_run
from prunekit.report.sections.model_tables import testing
from prunekit.report.sections.section import SECTIONS, Section, ordered
from prunekit.utils.files import StrPath, flattened, require_writable, write_text

Part = TypeVar("Part")
Log = Callable[[str], object]


@dataclass(frozen=True)
class Kind:
    """A kind of run that has a page of its own."""

    read_as: str  # name of the figures in `Run`
    needs: tuple[str, ...]  # the keys that they must have
    template: str  # of its page
    command: str | None = None  # that makes such a run; None: as its metrics say


KINDS = {
    "metrics.json": Kind("metrics", ("dense", "pruned"), "page.html"),
    "sensitivity.json": Kind("analysis", ("groups",), "sensitivity.html", "sensitivity"),
    "profile.json": Kind("profile", ("setting", "checks"), "profile.html", "profile"),
    "frontier.json": Kind("frontier", ("points", "score"), "frontier.html", "frontier"),
}
"""Kinds of runs, by the files that hold their figures."""
RUN = Path("resume", "run.json")
"""File of a run that has not finished; it exists while the run can be resumed."""
FORMER = "report.old.html"
"""New name of a page that is replaced by one with fewer figures."""


def write_report(
    run_folder: StrPath,
    page: StrPath | None = None,
    *,
    state: str | None = None,
    whole: bool = True,
    sections: Sequence[str] = (),
    log: Log = lambda text: None,
) -> Path:
    """Render the page of a run of any kind, which needs no other file and no network.

    Args:
        run_folder: the folder of a job, a sensitivity analysis or a latency profile, finished or not; a section whose
            file is missing says so.
        page: path of the page; None: `report.html` in the folder.
        state: state to show instead of the one in `status.json`, for a page that is the last file of a run.
        whole: whether a damaged file is an error. If not, damaged and missing files are named on the page, see
            `missing`; and if figures are missing, the previous page is kept as `report.old.html`.
        sections: the user's own sections on the page of a job, as `file.py:object`, besides registered ones.
        log: gets a message for each user's section that raised; the page names it and has the rest.

    Returns:
        The path of the page.

    Raises:
        ArtifactError: the folder does not exist, or a file in it is damaged.
        UsageError: there is no such section, or the page cannot be written.
    """
    folder = Path(run_folder)
    target, run = Path(page or folder / "report.html"), read_run(folder, whole=whole)
    require_writable(target)
    measured = run.status.get("state") == "finished"
    if page is None and not whole and measured and target.exists() and list(gaps(run, figures_of(run))):
        former = folder / FORMER
        if not former.exists():  # it may be the last place that has the figures
            target.rename(former)
    try:
        html = _render(run, state, sections, log, whole=whole)
    except PrunekitError:
        raise
    except Exception as error:
        if whole:
            raise
        name = figures_of(run)
        reason = f"{folder / name}: not as prunekit writes it ({reason_of(error)}); the file is damaged"
        log(reason)
        bare = replace(run, metrics={}, analysis={}, profile={}, frontier={}, damaged={**run.damaged, name: reason})
        html = _render(bare, state, sections, log, whole=False)
    write_text(target, html)
    return target


def _render(run: Run, state: str | None, sections: Sequence[str], log: Log, *, whole: bool) -> str:
    kind, failed, values = figures_of(run), list[str](), dict[str, Any]()
    # Pages of other kinds have imports of their own, such as torch.
    if kind == "profile.json":
        from prunekit.report.pages import profile_page as profile

        values = profile.values(run)
    elif kind == "sensitivity.json":
        from prunekit.report.sections import sensitivity_curves as sensitivity

        values = sensitivity.values(run)
    elif kind == "frontier.json":
        values = {"facts": run.frontier, "picture": frontier(run.frontier) if run.frontier and are_drawn() else None}
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
            "sections": [part for part in _shown(ordered(sections), lambda one: one.html(run), note, whole) if part],
        }
    return rendered(
        KINDS[kind].template,
        run=run,
        state=state or str(run.status.get("state", "unknown")),
        environment=[(key, _text(value)) for key, value in flattened(run.environment) if value != {}],
        gaps=[*gaps(run, kind), *failed],
        **values,
    )


def _shown(
    sections: Iterable[Section], show: Callable[[Section], Part], instead: Callable[[str], Part], whole: bool
) -> Iterator[Part]:
    """Yield what each section shows, or the replacement for a user's, or one of damaged files, that raised."""
    for section in sections:
        try:
            part = show(section)
        except Exception as error:
            ours = section.name in SECTIONS.declared
            if ours and whole:
                raise
            why = "its files are not as prunekit writes them" if ours else "it is missing here"
            part = instead(f"Section {section.name!r} raised {type(error).__name__}: {error}; {why}")
        yield part


def _text(value: Any) -> str:
    """Return a value of the environment as text."""
    return "none" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def missing(run_folder: StrPath) -> list[str]:
    """Return what is missing in the folder of a run, a sentence each with what to do."""
    folder = Path(run_folder)
    run = read_run(folder, whole=False)
    kept = [f"the page that was there before is {folder / FORMER}"] if (folder / FORMER).exists() else []
    found = list(gaps(run, figures_of(run)))
    return found + kept if found else []


def gaps(run: Run, name: str = "metrics.json") -> Iterator[str]:
    """Yield a sentence for each file of a run that is damaged, and for figures that are missing."""
    yield from (f"{reason}; what it held is missing here" for file, reason in run.damaged.items() if file != name)
    found = getattr(run, KINDS[name].read_as)
    lacking = [key for key in KINDS[name].needs if not found.get(key)]
    if lacking:
        yield _unmeasured(run, name, ", ".join(map(repr, lacking)))


def _unmeasured(run: Run, name: str, lacking: str) -> str:
    state, file = str(run.status.get("state", "unknown")), run.folder / name
    command = again(run, KINDS[name].command or _job(run))
    redo = f"`{command}` makes the run again" if command else "make the run again from its recipe"
    if not file.exists() and state != "finished":
        if (run.folder / RUN).exists() and command:
            onward = f"unless it still runs, `{command} --resume {shlex.quote(str(run.folder))}` goes on with it"
        else:
            onward = f"unless it still runs, {redo}"
        return f"The run has not finished (status: {state}), and {name} is not there: nothing was measured; {onward}"
    what = run.damaged.get(name) or (f"{name} lacks {lacking}" if file.exists() else f"{name} is not there")
    measure = f", or `{test}` tests its model" if (test := testing(run)) else ""
    though = ", though the run has finished" if state == "finished" else ""
    return f"{what}{though}: figures are missing here; put the file back, or {redo}{measure}"


def _job(run: Run) -> str | None:
    """Return the command of the run, if its folder still says so; None: as its metrics say."""
    if run.metrics:
        return None
    try:
        command = str(read_json(run.folder / RUN).get("command"))
    except (ArtifactError, AttributeError):
        tuned = run.history is None or "pruned" in set(run.history["run"])
        return "finetune" if tuned else "prune"
    return command if command in ("finetune", "prune") else None


def figures_of(run: Run) -> str:
    """Return the name of the file with a run's figures, by the files there or by where its folder is."""
    analyses = [name for name, kind in KINDS.items() if kind.command]
    there = [name for name in analyses if (run.folder / name).exists()]
    place = f"{run.folder.resolve().parent.name}.json"
    return there[0] if there else place if place in analyses and not run.metrics else "metrics.json"


def again(run: Run, job: str | None = None) -> str | None:
    """Return the command that runs the recipe of a run again; None if it has no recipe."""
    if run.recipe is None:
        return None
    job = job or ("prune" if run.metrics.get("fine_tuned") is False else "finetune")
    options = options_of(run, "model", "data", "optimizer")
    return shlex.join(["prunekit", job, str(run.folder.absolute() / "recipe.yaml"), *options])


def lines(metrics: Mapping[str, Any], folder: Path) -> list[str]:
    """Return what the terminal says of a finished run after its table.

    These are the lines of the sections of its page, shortfalls, and where the model and the report are.
    """
    run = Run(folder, metrics=dict(metrics))
    said = _shown(ordered(), lambda section: section.text(run), lambda text: [text], whole=True)
    return [
        *(line for part in said for line in part),
        *(f"Shortfall: {shortfall}" for shortfall in metrics["shortfalls"]),
        f"Model: {folder / 'model'}",
        f"Report: {folder / 'report.html'}",
    ]
