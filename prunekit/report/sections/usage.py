"""The section on what to do with the pruned model: commands with the paths of this run, to copy."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunekit.report.headline import samples
from prunekit.report.run_data import Run, recipe_of
from prunekit.report.sections.section import register_section

FACTORY = "FILE.py:FACTORY"


@dataclass(frozen=True)
class Step:
    """One thing to do with the model: what it does, and the command or the lines of Python."""

    title: str
    command: str


@register_section("usage", about="what to do with the model now, as commands", order=5)
class UsageSection:
    """Commands that load, run, export and time the model of this run."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """Return the steps; None if the run has no model yet."""
        folder = run.folder / ("deployed" if run.metrics.get("deployment") else "model")
        return {"steps": list(_steps(run, folder)), "own": _own(run)} if folder.is_dir() else None


def _own(run: Run) -> bool:
    """Return whether the model is built by the user's own code, without which its folder cannot be loaded."""
    model = recipe_of(run).get("model")
    return isinstance(model, dict) and model.get("zoo") == "own"


def _steps(run: Run, folder: Path) -> Iterator[Step]:
    images = samples(run.metrics) == "images"
    path, own = shlex.quote(str(folder)), f" --model {FACTORY}" if _own(run) else ""
    given = "photo.jpg" if images else "inputs.npz"
    dense = ", model=dense" if own else ""
    yield Step("Load it in Python", f"import prunekit as pk\n\nmodel = pk.load({str(folder)!r}{dense})")
    what = "an image, or a folder of them" if images else "inputs that are ready"
    yield Step(f"Run it on {what}", f"prunekit predict {path} {given}{own}")
    yield Step("Export it to ONNX; the file is checked and timed", f"prunekit export {path} --to onnx{own}")
    if images:
        yield Step(
            "Write a folder that runs without prunekit, for a server", f"prunekit export {path} --to standalone{own}"
        )
    both = f"{shlex.quote(str(run.folder / 'recipe.yaml'))} {path}" if run.recipe is not None else path
    yield Step(
        "Time it again, beside the dense model" if run.recipe else "Time it again", f"prunekit bench {both}{own}"
    )
