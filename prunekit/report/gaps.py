"""What the folder of a run should hold and does not, and what to do about it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from prunekit.artifacts import read_json
from prunekit.errors import ArtifactError
from prunekit.report.run import Run
from prunekit.report.summary import again

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
    """The name of the file that holds a run's figures: by what is there, else by where its folder lies."""
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
    """The command that the run is of, where its folder still says so; None: as its metrics say."""
    if run.metrics:
        return None
    try:
        command = str(read_json(run.folder / RUN).get("command"))
    except (ArtifactError, AttributeError):
        tuned = run.history is None or "pruned" in set(run.history["run"])
        return "finetune" if tuned else "prune"
    return command if command in ("finetune", "prune") else None
