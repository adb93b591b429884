"""The figures that a reader looks for first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prunekit.measure.latency.row_text import unstable_mark
from prunekit.settings.prune import facts_from
from prunekit.utils import display as numbers
from prunekit.utils.display import Table

MODELS = ("dense", "control", "pruned", "deployed")
"""The models of a run, as far as it has them: without fine-tuning there is no control."""
OPTIONAL = ("control", "deployed")


@dataclass(frozen=True)
class Tile:
    """One figure in large type; `doubtful` is one that says nothing."""

    label: str
    value: str
    detail: str
    doubtful: bool = False


@dataclass(frozen=True)
class Row:
    """One measure of each model; `change` is that of the pruned one against `reference`."""

    label: str
    cells: tuple[tuple[str, str], ...]
    """(value, detail in small type) per model."""
    change: str


def tiles(metrics: Mapping[str, Any]) -> Iterator[Tile]:
    """Yield the figures at the top of the page, as far as they were measured."""
    dense, pruned = model(metrics, "dense"), model(metrics, "pruned")
    for label, key in (("MACs", "macs"), ("Parameters", "params")):
        if numbers.is_number(dense.get(key)) and numbers.is_number(pruned.get(key)):
            detail = f"{numbers.count(dense[key])} → {numbers.count(pruned[key])}"
            yield Tile(label, numbers.change(dense[key], pruned[key]), detail)
    yield from _accuracy_tile(metrics)
    yield from _speedup_tile(metrics)
    parity = metrics.get("parity", {}).get("max_relative_difference")
    if numbers.is_number(parity):
        yield Tile("Masked against compact", numbers.scientific(parity), "largest relative difference")


def model(metrics: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the figures of a model, with the interval of its score; {} if the run has none of that name."""
    return {**(metrics.get(name) or {}), **((metrics.get("accuracy") or {}).get(name) or {})}


def speedup(metrics: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the row of the speedup that stands for all, the first on the CPU where there is one; None if untimed."""
    rows = [row for row in metrics.get("speedup", []) if numbers.is_number(row.get("median"))]
    return next((row for row in rows if row.get("device") == "cpu"), rows[0]) if rows else None


def reference(metrics: Mapping[str, Any]) -> str:
    """Return what the pruned model is fairly compared with: the control where there is one, else the dense model."""
    return "control" if numbers.is_number(model(metrics, "control").get(scores(metrics)[0][0])) else "dense"


def guessing(metrics: Mapping[str, Any]) -> bool:
    """Return whether the model that the pruned one is compared with is no better than chance: then the scores say
    nothing.
    """
    return bool(model(metrics, reference(metrics)).get("at_chance"))


def scores(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and label of every score of the run's task, the main one first."""
    found = metrics.get("task", {}).get("scores") or [{"name": "top1", "label": "top-1"}]
    return [(score["name"], score["label"]) for score in found]


def capital(text: str) -> str:
    """With a capital letter first, the others as they are."""
    return text[:1].upper() + text[1:]


def samples(metrics: Mapping[str, Any]) -> str:
    """Return what the data is made of."""
    return str(metrics.get("task", {}).get("samples", "images"))


def _accuracy_tile(metrics: Mapping[str, Any]) -> Iterator[Tile]:
    name, label = scores(metrics)[0]
    pruned = model(metrics, "pruned").get(name)
    against = reference(metrics)
    before = model(metrics, against).get(name)
    if guessing(metrics):
        known = " against ".join(numbers.percent(value, 2) for value in (pruned, before))
        yield Tile(capital(label), "at chance", f"{known}: no better than one answer for all", doubtful=True)
    elif numbers.is_number(pruned) and numbers.is_number(before):
        detail = f"points against the {'dense control' if against == 'control' else 'dense model'}"
        yield Tile(capital(label), numbers.difference(before, pruned), detail)


def _speedup_tile(metrics: Mapping[str, Any]) -> Iterator[Tile]:
    if (row := speedup(metrics)) is not None:
        interval = numbers.interval(row.get("low"), row.get("high"))
        where = f"{row.get('device')}, batch {row.get('batch')}, 95 %: {interval}{unstable_mark(row)}"
        yield Tile("Speedup", numbers.factor(row["median"]), where)


def models(metrics: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns of the table of models."""
    return tuple(name for name in MODELS if name not in OPTIONAL or name in metrics)


def compared(metrics: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of the dense / control / pruned table."""
    names = models(metrics)
    found = [model(metrics, name) for name in names]
    if not any(found):
        return
    before, pruned = model(metrics, reference(metrics)), model(metrics, "pruned")

    def of_pruned(cell: tuple[str, str]) -> tuple[tuple[str, str], ...]:
        return tuple(cell if name == "pruned" else ("", "") for name in names)

    what, (main, title) = samples(metrics), scores(metrics)[0]
    for name, label in scores(metrics):
        cells = tuple(_accuracy(model, name, interval=name == main) for model in found)
        change = "says nothing: at chance" if guessing(metrics) else _points(before, pruned, name)
        yield Row(f"{capital(label)} on the test {what}", cells, change)
    if masks := metrics.get("activations"):
        cell, points = _accuracy(masks, main), _points(before, masks, main)
        yield Row(f"{capital(title)} under the activation masks", of_pruned(cell), points)
    yield Row(f"Test {what}", tuple((_whole(model.get("n_test")), "") for model in found), "")
    for label, key, form in (
        ("MACs, one sample", "macs", numbers.count),
        ("Parameters", "params", numbers.count),
        ("Size of the weights file", "size_bytes", numbers.size),
    ):
        cells = tuple((form(model.get(key)), "") for model in found)
        yield Row(label, cells, numbers.change(before.get(key), pruned.get(key)))
    if numbers.is_number(before.get("memory_bytes")):
        cells = tuple((numbers.size(model.get("memory_bytes")), "") for model in found)
        change = numbers.change(before.get("memory_bytes"), pruned.get("memory_bytes"))
        yield Row("Memory of a forward pass, counted", cells, change)
    sparsity = metrics.get("sparsity", {})
    for label, key in (("Channels removed", "channels"), ("Zero weights under the masks", "weights")):
        if key in sparsity:
            yield Row(label, of_pruned((numbers.share(sparsity[key]), "")), "")


def comparison(metrics: Mapping[str, Any]) -> Table:
    """Return the same as a table of text: every measure of each model, and how the pruned one compares."""
    headings = ("", *models(metrics), f"pruned against {reference(metrics)}")
    rows = [(row.label, *(" ".join(cell).strip() for cell in row.cells), row.change) for row in compared(metrics)]
    return Table(headings, rows)


def repaired(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield what repair did, in a line, where the run had any."""
    found = metrics.get("repair")
    if found:
        errors = " → ".join(numbers.share(found.get(when), 2) for when in ("before", "after"))
        end = "" if found.get("kept") else ": no better, so nothing was changed"
        layers = f"{found.get('refitted')} of {found.get('layers')} layers refitted"
        yield f"output error on held-out images {errors} of its variance{end}; {layers}"


def deployed(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was done to the compact model for running it, in a line, where the run was asked to."""
    found = metrics.get("deployment")
    if found:
        norms = f"{found['folded_norms']} BatchNorms folded, " if found["folded_norms"] else ""
        layout = "channels last, " if found["channels_last"] else ""
        apart, rounded = (numbers.scientific(found[key]) for key in ("max_relative_difference", "after_rounding"))
        proof = f"equal to the pruned model to {apart} on {found['inputs']} images in float64"
        yield f"{norms}{layout}{proof}, to {rounded} with its weights rounded to their own dtype"


def budgeted(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a plan leaves of each budget, a line each: shares of the dense model, megabytes, and predicted
    time.
    """
    for name, found in plan.get("budgets", {}).items():
        facts = facts_from(name, found)
        left, asked, dense = (facts.shown(found[key]) for key in ("left", "asked", "dense"))
        of = "" if facts.share else f", of {dense}"
        binds = ", the one that binds" if plan.get("binding") == name and len(plan["budgets"]) > 1 else ""
        yield f"{name}: {left} {'predicted' if facts.measured else 'left'}, {facts.limit} {asked} asked for{of}{binds}"


def on_time(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was delivered for budgets of time, in a line, where the run had any."""
    found = metrics.get("delivered")
    if found:
        final, target = found["final"], found["target"]
        budgets = (metrics.get("plan") or {}).get("budgets", {})
        asked = " and ".join(
            facts_from(name, budgets.get(name, {})).shown(value) for name, value in found["asked"].items()
        )
        where = f"{target['runtime']} on {target['device']}, batch {target['batch']}, threads {target['threads']}"
        both = f"; both models with {found['deployed']}" if found.get("deployed") else ""
        speedup = f"{numbers.factor(final['speedup'])} {numbers.interval(final['speedup_low'], final['speedup_high'])}"
        yield (
            f"{asked} asked for, {speedup} and {numbers.digits(final['ms'])} ms delivered: "
            f"{numbers.share(found['excess'], 1)} of the time asked for ({where}; measured last, after "
            f"{len(found['attempts'])} attempts{both}){unstable_mark(final)}"
        )


def masked(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield what activation masks do on the test images, in a line, where the run had any."""
    found = metrics.get("activations")
    if found:
        target = f" (target {numbers.share(found['target'])})" if numbers.is_number(found.get("target")) else ""
        name, label = scores(metrics)[0]
        reached = " ".join((label, *_accuracy(found, name)))
        yield f"{numbers.share(found.get('sparsity'))} of the activations are zero{target}, {reached}".rstrip()


def taught(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the teacher of each training run took, a line each."""
    for run, cost in (metrics.get("teacher") or {}).items():
        yield f"{run}: {numbers.duration(cost['seconds'])}, {numbers.share(cost['step_share'])} of the training steps"


def compiled(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield what came of compiling the steps of each training run, a line each."""
    for run, found in (metrics.get("compiled") or {}).items():
        seconds = f"{run}: {numbers.duration(found['seconds'])} of compiling"
        yield seconds if found["fallback"] is None else f"{run}: in eager, because {found['fallback']}"


def early(metrics: Mapping[str, Any]) -> Iterator[str]:
    """When masks were made physical, in a sentence, where training went on with the compact model."""
    if found := metrics.get("compacted_early"):
        yield (
            f"The plan was final after {numbers.digits(found['epoch'])} epochs; there masked and compact model agreed "
            f"to {found['max_relative_difference']:.1e}, and the compact one was trained from there on"
        )


def clamped(metrics: Mapping[str, Any]) -> Iterator[str]:
    """A line for each training run and gradient clamp: what the module that needed it most needed."""
    for row in metrics.get("clamps", []):
        what = "values" if row.get("by") == "value" else "gradients"
        share = numbers.share(row.get("share"), 2)
        yield f"{row.get('run')}, {row.get('clamp')}: {share} of the {what} at {row.get('module') or 'the model'}"


def _accuracy(model: Mapping[str, Any], name: str, *, interval: bool = True) -> tuple[str, str]:
    ends = numbers.interval(model.get("low"), model.get("high")) if interval else ""
    return numbers.percent(model.get(name), 2), ends


def _points(before: Mapping[str, Any], pruned: Mapping[str, Any], name: str) -> str:
    difference = numbers.difference(before.get(name), pruned.get(name))
    return difference if difference == numbers.NOTHING else f"{difference} points"


def _whole(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else numbers.NOTHING
