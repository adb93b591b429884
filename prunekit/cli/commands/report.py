"""`prunekit report`: the page of a run, or one that compares several."""

from pathlib import Path
from typing import Any

import click

from prunekit.cli.groups import register_command
from prunekit.cli.options import common_options
from prunekit.cli.output import Console, plain
from prunekit.errors import UsageError
from prunekit.known_names import SECTIONS
from prunekit.utils.display import count, digits, factor, in_unit, interval, share, table

COMPARISON = "comparison.html"


@register_command("report", about="Write a run's report again, or compare several runs.", place=14)
@click.argument("runs", nargs=-1, metavar="RUN [RUN]...", type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The page.  [default: report.html in the run's folder; comparison.html for several]",
)
@click.option(
    "--section",
    "sections",
    multiple=True,
    metavar="FILE.py:NAME",
    help="A section of your own on the page of a run: a class with read(run) and html(data). May be given several "
    "times; the file is run: name only files you trust.",
)
@common_options
def report_command(runs: tuple[Path, ...], output: Path | None, sections: tuple[str, ...], as_json: bool) -> None:
    """Write the report of a run again, from what is in its folder, such as after an update.

    Given several finished runs, one page compares them: score against multiply-accumulates and latency with the Pareto
    front, tables of both, and differences between the recipes. Scores of different test sets and latencies of different
    machines are kept apart. Nothing is measured.

    Exits with 1 if something of a run is missing or damaged: the page shows the rest, and says what to do.
    """
    console = Console(as_json)
    _check(runs, output, sections)
    from prunekit.report.pages.compare_page import write_comparison
    from prunekit.report.pages.run_page import missing, write_report

    with console.running():
        if len(runs) == 1:
            raised = list[str]()
            page = write_report(runs[0], output, whole=False, sections=sections, log=raised.append)
            lacking = [*missing(runs[0]), *raised]
            for each in lacking:
                console.log(f"{runs[0]}: {each}")
            shown = {"page": str(page), "runs": [str(runs[0])], "missing": lacking}
            console.result(shown, f"Report: {page}")
            click.get_current_context().exit(1 if lacking else 0)
        page = output or Path(COMPARISON)
        found = plain(write_comparison(runs, page))
    console.result({"page": str(page), **found}, f"{_text(found)}\nComparison: {page}")


def _check(runs: tuple[Path, ...], output: Path | None, sections: tuple[str, ...]) -> None:
    if not runs:
        raise UsageError("expected the folder of a run, such as runs/resnet34/<time>, or several to compare")
    wrong = [
        f"{run}: expected the folder of a run, with status.json in it, and {_instead(run)}"
        for run in runs
        if not (run / "status.json").is_file()
    ]
    seen = [run.resolve() for run in runs]
    wrong += [f"{run}: named twice" for index, run in enumerate(runs) if run.resolve() in seen[:index]]
    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        wrong.append(f"--output {output}: expected a file whose name ends in .html")
    if sections and len(runs) > 1:
        wrong.append("--section: expected a single run: a comparison has no sections of runs")
    wrong += [f"--section: {problem}" for name in sections if (problem := SECTIONS.problem(name)) is not None]
    if wrong:
        raise UsageError("\n".join(wrong))


def _instead(run: Path) -> str:
    """Return what is there instead of a run's folder, and which folder may have been meant."""
    if not run.exists():
        return "there is none"
    if not run.is_dir():
        return "this is a file"
    if (run.parent / "status.json").is_file():
        return f"this is a part of one; did you mean {run.parent}?"
    inside = sorted(path.parent for path in run.glob("*/status.json"))
    return f"there is none, but in its folders, such as {inside[-1]}" if inside else "there is none"


def _text(found: dict[str, Any]) -> str:
    rows = [
        (
            run["letter"],
            run["folder"],
            f"{in_unit(run['value'], run['unit'])} {interval(run['low'], run['high'])}".strip(),
            in_unit(run["dense"], run["unit"]),
            f"{count(run['macs'])} ({share(run['macs_left'])})",
            f"{count(run['params'])} ({share(run['params_left'])})",
        )
        for run in found["runs"]
    ]
    timed = [
        (
            row["letter"],
            row["model"],
            f"{row['runtime']}, {row['device']}, batch {row['batch']}, threads {row['threads']}, {row['dtype']}",
            digits(row["ms"]),
            digits(row["dense_ms"]),
            f"{factor(row['speedup'])} {interval(row['speedup_low'], row['speedup_high'])}{row['speedup_doubtful']}",
        )
        for row in found["latency"]
    ]
    score = " or ".join(dict.fromkeys(run["score"] for run in found["runs"]))
    lines = [table(("run", "folder", score, "dense", "MACs (left)", "parameters (left)"), rows, text=("folder",))]
    if timed:
        lines.append(table(("run", "model", "setting", "ms", "dense ms", "speedup"), timed, text=("model", "setting")))
    if keys := found["recipes"]["rows"]:
        letters = [run["letter"] for run in found["runs"]]
        lines.append(table(("key", *letters), [(key, *values) for key, values in keys]))
    return "\n".join([*lines, *found["notes"]])
