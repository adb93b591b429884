"""The page that compares several runs: scores, latencies, and what differs between their recipes."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prunekit.errors import ArtifactError, PrunekitError, UsageError, reason_of
from prunekit.measure.latency.row_text import dtype_text, paired, setting_text, unstable_mark
from prunekit.report.figures import pareto
from prunekit.report.figures.canvas import are_drawn
from prunekit.report.figures.pareto import MACHINE_KEYS, MAX_PANELS, TEST_KEYS, ComparedRun, Panel
from prunekit.report.headline import PROVEN, capital, direction, guessing, intervals, reference, unit
from prunekit.report.pages.run_page import write_report
from prunekit.report.rendering import linked, write
from prunekit.report.run_data import read_run
from prunekit.settings.job import WITHOUT_EFFECT
from prunekit.utils import display as numbers
from prunekit.utils.files import flattened, require_writable

ABSENT = "–"
PAGE = "report.html"


def write_comparison(folders: Sequence[Path], page: Path, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Render a page that compares runs of `finetune` and `prune`, with links to their reports, and further notes.

    Reports that are missing are written.
    """
    try:
        return _write(folders, page, notes)
    except PrunekitError:  # some are ValueErrors too
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        named = ", ".join(map(str, folders))
        raise ArtifactError(
            f"{named}: figures that are not as prunekit writes them ({reason_of(error)}); `prunekit report RUN` says "
            "of each run what is damaged"
        ) from error


def _write(folders: Sequence[Path], page: Path, notes: Sequence[str]) -> dict[str, Any]:
    found = pareto.compared_runs([read_run(folder) for folder in folders])
    _require_finished(found)
    require_writable(page)
    for side in found:
        if not (side.run.folder / PAGE).exists():
            write_report(side.run.folder)
    result = compared(found)
    result["notes"] += notes
    score = " or ".join(dict.fromkeys(side.score[1] + direction(side.run.metrics, side.score[0]) for side in found))
    units = " or ".join(dict.fromkeys(unit(side.run.metrics, side.score[0]) for side in found))
    panels = [panel for panel in _panels(found) if panel[2]]
    write(
        page,
        "compare.html",
        **result,
        score=score,
        intervals=" ".join(dict.fromkeys(filter(None, (intervals(side.run.metrics) for side in found)))),
        figure=pareto.pareto(panels, score, units) if panels and are_drawn() else None,
        fronts=[
            (panel[0], [", ".join(one.label for one in best) for best in pareto.fronts(panel[2]) if best])
            for panel in panels
        ],
        left_out=max(0, len(panels) - MAX_PANELS),
        links={side.letter: linked(side.run.folder / PAGE, page) for side in found},
        command=" ".join(["prunekit report", *(shlex.quote(str(folder)) for folder in folders)]),
    )
    return result


def _require_finished(found: Sequence[ComparedRun]) -> None:
    """Raise unless all runs have finished."""
    wrong = []
    for side in found:
        state, folder = side.run.status.get("state", "unknown"), side.run.folder
        if side.run.analysis or side.run.profile:
            wrong.append(f"{folder}: expected a run of `prunekit finetune` or `prunekit prune`, not an analysis")
        elif state == "finished" and not side.run.metrics:
            wrong.append(f"{folder}: its metrics.json is gone or empty; `prunekit report {folder}` says what to do")
        elif state != "finished":
            wrong.append(f"{folder}: expected a run that has finished, and this one is {state}; leave it out")
    if wrong:
        raise UsageError("\n".join(wrong))


def compared(found: Sequence[ComparedRun]) -> dict[str, Any]:
    """Return the tables of the page as plain data: runs, latencies, what differs between recipes, and notes."""
    return {
        "runs": [_run(side) for side in found],
        "latency": [row for side in found for row in _latency(side)],
        "recipes": differences([side.recipe for side in found]),
        "notes": list(_notes(found)),
    }


def _run(side: ComparedRun) -> dict[str, Any]:
    dense, pruned = side.model("dense"), side.model("pruned")
    against, (name, label), metrics = reference(side.run.metrics), side.score, side.run.metrics
    parity = (metrics.get("parity") or {}).get("max_relative_difference")
    left = {key: pruned[key] / dense[key] if pruned.get(key) and dense.get(key) else None for key in ("macs", "params")}
    return {
        "letter": side.letter,
        "folder": str(side.run.folder),
        "unit": unit(metrics, name),
        "lower_is_better": side.lower_is_better,
        "name": str(metrics.get("name") or side.run.folder.resolve().parent.name),
        "started": side.run.status.get("started"),
        "score": capital(label),
        "value": pruned.get(name),
        "low": pruned.get("low"),
        "high": pruned.get("high"),
        "dense": dense.get(name),
        "reference": against,
        "reference_value": side.model(against).get(name),
        "guessing": guessing(metrics),
        **{key: pruned.get(key) for key in ("macs", "params", "size_bytes", "n_test")},
        **{f"{key}_left": value for key, value in left.items()},
        "parity": parity,
        "verified": numbers.is_number(parity) and parity <= PROVEN,
        "shortfalls": list(metrics.get("shortfalls") or []),
    }


def _latency(side: ComparedRun) -> Iterator[dict[str, Any]]:
    rows = side.run.metrics.get("latency", [])
    dense = {setting_text(row): row.get("median_ms") for row in rows if row.get("model") == "dense"}
    for row, beside in paired(rows, side.run.metrics.get("speedup", [])):
        if row.get("model") == "dense":
            continue
        speedup = beside or {}
        yield {
            "letter": side.letter,
            **{key: row.get(key) for key in ("model", "device", "runtime", "batch", "threads", "low_ms", "high_ms")},
            "dtype": dtype_text(row),
            "ms": row.get("median_ms"),
            "dense_ms": dense.get(setting_text(row)),
            "speedup": speedup.get("median"),
            "speedup_low": speedup.get("low"),
            "speedup_high": speedup.get("high"),
            "doubtful": unstable_mark(row),
            "speedup_doubtful": unstable_mark(speedup),
        }


def _panels(found: Sequence[ComparedRun]) -> Iterator[Panel]:
    yield (
        "multiply-accumulates",
        "millions of MACs, one sample",
        [replace(point, cost=point.cost / 1e6) for point in pareto.by_macs(found)],
    )
    for setting in pareto.settings(found):
        yield setting, "median latency, ms", pareto.by_latency(found, setting)


def _notes(found: Sequence[ComparedRun]) -> Iterator[str]:
    """Yield why runs cannot be compared, and the shortfalls of each."""
    if len({side.tested for side in found}) > 1:
        what = [key for key in TEST_KEYS if len({str(side.data.get(key)) for side in found}) > 1]
        keys = f" ({', '.join(f'data.{key}' for key in what)})" if what else ""
        yield f"The test sets differ{keys}: {_parts(found, 'tested')}. Scores are comparable within each alone."
    elif any(side.data.get("source") == "own" for side in found):
        yield "Samples are your own (--data): that all runs were tested on the same ones is not known."
    if len({side.machine[len(side.tested) :] for side in found}) > 1:
        what = [key for key in MACHINE_KEYS if len({str(side.run.environment.get(key)) for side in found}) > 1]
        parts = _parts(found, "machine")
        yield f"The machines differ ({', '.join(what)}): {parts}. Latencies are comparable within each alone."
    for side in found:
        for shortfall in side.run.metrics.get("shortfalls") or []:
            yield f"{side.letter} fell short: {shortfall}"


def _parts(found: Sequence[ComparedRun], by: str) -> str:
    """Return letters of runs that are alike, e.g. "A, B | C"."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for side in found:
        groups.setdefault(getattr(side, by), []).append(side.letter)
    return " | ".join(", ".join(letters) for letters in groups.values())


@dataclass(frozen=True)
class Differences:
    """Keys of recipes whose values differ, with the value of each recipe as text."""

    rows: tuple[tuple[str, tuple[str, ...]], ...]  # (key, values)
    missing: tuple[str, ...]  # keys that recipes of another version do not have, and on which the others agree


def differences(recipes: Sequence[Mapping[str, Any]]) -> Differences:
    """Compare recipes key by key, in the order of the first that has the key.

    A section that one recipe leaves out (`null`) and another fills is a difference in each of its keys.
    """
    flats = [{key: _word(value) for key, value in flattened(recipe)} for recipe in recipes]
    # A section that is null in one recipe has keys in another, which show the difference.
    sections = {key.rpartition(".")[0] for one in flats for key in one}
    rows, missing = [], []
    for key in dict.fromkeys(key for one in flats for key in one):
        if key.split(".")[0] in WITHOUT_EFFECT or key in sections:
            continue
        values = [one.get(key, ABSENT) for one in flats]
        if len(set(values)) > 1:
            known = {one[key] for one in flats if key in one}
            emptied = any(_emptied(one, key) for one in flats)
            if len(known) > 1 or emptied:
                rows.append((key, tuple(values)))
            else:
                missing.append(key)
    return Differences(tuple(rows), tuple(missing))


def _emptied(flat: Mapping[str, str], key: str) -> bool:
    """Return whether a section that would hold the key is null in a recipe."""
    parts = key.split(".")
    return any(flat.get(".".join(parts[:length])) == "null" for length in range(1, len(parts)))


def _word(value: Any) -> str:
    """Return a value as a recipe has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
