"""The page of a run's folder, whatever kind of run it is, and what the terminal says of a run.

A run in one sentence, and the command that makes it again.

What the folder of a run should hold and does not, and what to do about it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from markupsafe import Markup
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from prunekit.errors import ArtifactError
from prunekit.measure.latency.row_text import unstable_mark
from prunekit.report.headline import capital, guessing, reference, scores, speedup, tiles
from prunekit.report.run_data import Run, read_run
from prunekit.report.sections.section import SECTIONS, Section, ordered
from prunekit.report.templates import rendered
from prunekit.settings.job import JobSettings
from prunekit.utils import display as numbers
from prunekit.utils.files import StrPath, flattened, read_json, write_text
from prunekit.utils.registry import registered_names
from prunekit.utils.user_code import is_reference

PROVEN = 1e-9
"""Largest relative difference of masked and compact model that counts as rounding in float64."""
FACTORY = "FILE.py:FACTORY"


@dataclass(frozen=True)
class Again:
    """How a run is made again."""

    command: str
    said: str


def sentence(metrics: Mapping[str, Any]) -> str:
    """Return what came out, e.g. "1.74× faster on this CPU (eager, batch 1), top-1 98.52 % against 98.89 %, 55.8 %
    fewer parameters, verified."; empty where nothing was measured.
    """
    text = ", ".join(_parts(metrics)).replace(" %", "\u00a0%")
    return f"{capital(text)}." if text else ""


def _parts(metrics: Mapping[str, Any]) -> Iterator[str]:
    dense, pruned, against = (metrics.get(name) or {} for name in ("dense", "pruned", reference(metrics)))
    if (row := speedup(metrics)) is not None:
        yield _speed(row)
    name, label = scores(metrics)[0]
    if numbers.is_number(pruned.get(name)) and numbers.is_number(against.get(name)):
        chance = " (at chance, so that it says nothing)" if guessing(metrics) else ""
        yield f"{label} {numbers.percent(pruned[name], 2)} against {numbers.percent(against[name], 2)}{chance}"
    before, after = dense.get("params"), pruned.get("params")
    if numbers.is_number(before) and numbers.is_number(after) and before:
        yield f"{numbers.share(abs(1 - after / before))} {'fewer' if after <= before else 'more'} parameters"
    parity = metrics.get("parity", {}).get("max_relative_difference")
    if numbers.is_number(parity) and parity <= PROVEN:
        yield "verified"


def _speed(row: Mapping[str, Any]) -> str:
    ratio, device = row["median"], row.get("device", "cpu")
    where = "on this CPU" if device == "cpu" else f"on {device}"
    change = f"{numbers.factor(ratio)} faster" if ratio >= 1 else f"{numbers.factor(1 / ratio)} slower"
    unstable = f",{unstable_mark(row)}" if unstable_mark(row) else ""
    return f"{change} {where} ({row.get('runtime', 'eager')}, batch {row.get('batch', '–')}{unstable})"


def again(run: Run, job: str | None = None) -> Again | None:
    """Return the command that runs the recipe of a run's folder once more; None where it has none.

    Args:
        run: whose folder it is.
        job: the command's name; None: as its metrics say.
    """
    if run.recipe is None:
        return None
    job = job or ("prune" if run.metrics.get("fine_tuned") is False else "finetune")
    command = f"prunekit {job} {shlex.quote(str(run.folder / 'recipe.yaml'))}"
    recipe = recipe_of(run)
    own = dict(_own(recipe))
    words = [f"--{name} {shlex.quote(reference)}" for name, reference in own.items()]
    words += ["--allow-code"] * any(is_reference(name) for _, name, _ in registered_names(JobSettings, recipe))
    said = "Makes this run again, in a new folder; on the same machine and versions"
    more = f", with your own {' and '.join(own)}" if own else ""
    return Again(" ".join([command, *words]), f"{said}{more}:")


def recipe_of(run: Run) -> dict[str, Any]:
    """The recipe of a run as nested dicts; {} where there is none, or none that can be read."""
    try:
        found = YAML(typ="safe", pure=True).load(StringIO(run.recipe or ""))
    except YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def _own(recipe: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the options of what a recipe has of the user's own code, each with its factory; only a model's is in the
    recipe.
    """
    if _at(recipe, "model", "zoo") == "own":
        named = str(_at(recipe, "model", "name"))
        yield "model", named if ":" in named else FACTORY
    if _at(recipe, "data", "source") == "own":
        yield "data", FACTORY
    if "own" in (_at(recipe, part, "optimizer") for part in ("baseline", "sparsify", "finetune")):
        yield "optimizer", FACTORY


def _at(recipe: Mapping[str, Any], part: str, key: str) -> Any:
    found = recipe.get(part)
    return found.get(key) if isinstance(found, Mapping) else None


MEASURED = {
    "metrics.json": ("dense", "pruned"),
    "sensitivity.json": ("groups",),
    "profile.json": ("setting", "checks"),
}
"""The file that each kind of run writes its figures to, and keys that it cannot be without."""
COMMANDS = {"sensitivity.json": "sensitivity", "profile.json": "profile"}
RUN = Path("resume", "run.json")
"""What a run that has not finished is of; there as long as it can be resumed."""


def figures_of(run: Run) -> str:
    """Return the name of the file that holds a run's figures: by what is there, else by where its folder lies."""
    there = [name for name in COMMANDS if (run.folder / name).exists()]
    place = f"{run.folder.resolve().parent.name}.json"
    return there[0] if there else place if place in COMMANDS and not run.metrics else "metrics.json"


def gaps(run: Run, name: str = "metrics.json") -> Iterator[str]:
    """Says, a sentence each, which files of a run are damaged, and why its figures are not there.

    Args:
        run: read with what is damaged left out.
        name: of the file with its figures.
    """
    yield from (f"{reason}; what it held is missing here" for file, reason in run.damaged.items() if file != name)
    found = {"metrics.json": run.metrics, "sensitivity.json": run.analysis, "profile.json": run.profile}[name]
    lacking = [key for key in MEASURED[name] if not found.get(key)]
    if lacking:
        yield _unmeasured(run, name, ", ".join(map(repr, lacking)))


def _unmeasured(run: Run, name: str, lacking: str) -> str:
    state, file = str(run.status.get("state", "unknown")), run.folder / name
    begun = again(run, COMMANDS.get(name) or _job(run))
    command = begun.command if begun else ""
    anew = f"`{command}` makes the run again" if command else "make the run again from its recipe"
    if not file.exists() and state != "finished":
        if (run.folder / RUN).exists() and command:
            onward = f"unless it still runs, `{command} --resume {shlex.quote(str(run.folder))}` goes on with it"
        else:
            onward = f"unless it still runs, {anew}"
        return f"The run has not finished (status: {state}), and {name} is not there: nothing was measured; {onward}"
    what = run.damaged.get(name) or (f"{name} lacks {lacking}" if file.exists() else f"{name} is not there")
    model = run.folder / "model"
    measure = f", or `prunekit evaluate {shlex.quote(str(model))}` tests its model" if model.is_dir() else ""
    though = ", though the run has finished" if state == "finished" else ""
    return f"{what}{though}: figures are missing here; put the file back, or {anew}{measure}"


def _job(run: Run) -> str | None:
    """Return the command that the run is of, where its folder still says so; None: as its metrics say."""
    if run.metrics:
        return None
    try:
        command = str(read_json(run.folder / RUN).get("command"))
    except (ArtifactError, AttributeError):
        tuned = run.history is None or "pruned" in set(run.history["run"])
        return "finetune" if tuned else "prune"
    return command if command in ("finetune", "prune") else None


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
        from prunekit.report.pages import profile_page as profile

        values = profile.values(run)
    elif kind == "sensitivity.json":
        from prunekit.report.pages import sensitivity_page as sensitivity

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
        environment=[(key, _text(value)) for key, value in flattened(run.environment) if value != {}],
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
