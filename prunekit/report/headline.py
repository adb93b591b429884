"""The headline of a run (tiles, a sentence, the table of its models, lines), which page and terminal share."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prunekit.measure.latency.row_text import unstable_mark
from prunekit.settings.pruning import facts_from
from prunekit.utils import display as numbers
from prunekit.utils.display import Table

MODELS = ("dense", "control", "pruned", "deployed")
"""Models that a run may have; without fine-tuning there is no control."""
OPTIONAL = ("control", "deployed")
PROVEN = 1e-9
"""Largest relative difference of masked and compact model that counts as rounding in float64."""

SHOWN = 10
"""Names of blocks that are shown."""


@dataclass(frozen=True)
class Tile:
    """One figure in large type; a `doubtful` one says nothing."""

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


def sentence(metrics: Mapping[str, Any]) -> str:
    """Return the result in one sentence, empty if nothing was measured.

    For example "1.74× faster on this CPU (eager, batch 1), top-1 98.52 % against 98.89 %, 55.8 % fewer parameters,
    verified." An unstable speedup is only called so.
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
        reached, wanted = (numbers.in_unit(side[name], unit(metrics, name)) for side in (pruned, against))
        yield f"{label} {reached} against {wanted}{chance}"
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
    change = "speedup unstable" if unstable_mark(row) else change
    return f"{change} {where} ({row.get('runtime', 'eager')}, batch {row.get('batch', '–')})"


def tiles(metrics: Mapping[str, Any]) -> Iterator[Tile]:
    """Yield the figures at the top of the page that were measured."""
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


def _accuracy_tile(metrics: Mapping[str, Any]) -> Iterator[Tile]:
    name, label = scores(metrics)[0]
    pruned = model(metrics, "pruned").get(name)
    against = reference(metrics)
    before = model(metrics, against).get(name)
    if guessing(metrics):
        known = " against ".join(numbers.in_unit(value, unit(metrics, name)) for value in (pruned, before))
        yield Tile(capital(label), "at chance", f"{known}: no better than one answer for all", doubtful=True)
    elif numbers.is_number(pruned) and numbers.is_number(before):
        than = "dense control" if against == "control" else "dense model"
        detail = f"{_difference_unit(unit(metrics, name))} against the {than}{direction(metrics, name)}".strip()
        yield Tile(capital(label), numbers.difference(before, pruned), detail)


def _speedup_tile(metrics: Mapping[str, Any]) -> Iterator[Tile]:
    if (row := speedup(metrics)) is not None:
        where = f"{row.get('device')}, batch {row.get('batch')}"
        if unstable_mark(row):
            yield Tile("Speedup", "unstable", f"{where}: no conclusion; what to do is under Latency", doubtful=True)
        else:
            within = numbers.interval(row.get("low"), row.get("high"))
            yield Tile("Speedup", numbers.factor(row["median"]), f"{where}, 95 %: {within}")


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
        said = unit(metrics, name)
        cells = tuple(_accuracy(model, name, said, interval=name == main) for model in found)
        change = "says nothing: at chance" if guessing(metrics) else _points(before, pruned, name, said)
        yield Row(f"{capital(label)} on the test {what}{direction(metrics, name)}", cells, change)
    if masks := metrics.get("activations"):
        said = unit(metrics, main)
        cell, points = _accuracy(masks, main, said), _points(before, masks, main, said)
        yield Row(f"{capital(title)} under the activation masks", of_pruned(cell), points)
    counts = [model.get("n_test") for model in found]
    texts = (f"{count:,}" if isinstance(count, int) else numbers.NOTHING for count in counts)
    yield Row(f"Test {what}", tuple((text, "") for text in texts), "")
    for label, key, form, always in _costs(pruned.get("compressor")):
        if always or any(numbers.is_number(model.get(key)) for model in found):
            cells = tuple((form(model.get(key)), "") for model in found)
            yield Row(label, cells, numbers.change(before.get(key), pruned.get(key)))
    sparsity = metrics.get("sparsity", {})
    for label, key in (("Channels removed", "channels"), ("Zero weights under the masks", "weights")):
        if key in sparsity:
            yield Row(label, of_pruned((numbers.share(sparsity[key]), "")), "")


def _costs(by: str | None) -> Iterator[tuple[str, str, Callable[[Any], str], bool]]:
    """Yield label, key and format of each cost, and whether all runs have it; not all measure what zeros take."""
    yield "MACs, one sample", "macs", numbers.count, True
    yield "Parameters", "params", numbers.count, True
    yield "Size of the weights file", "size_bytes", numbers.size, True
    yield "Weights file, plain", "plain_bytes", numbers.size, False
    yield f"Weights file, plain, by {by}", "plain_compressed_bytes", numbers.size, False
    yield "Weights file, zeros as bits", "bitmask_bytes", numbers.size, False
    yield f"Weights file, zeros as bits, by {by}", "bitmask_compressed_bytes", numbers.size, False
    yield "Memory of a forward pass, counted", "memory_bytes", numbers.size, False


def _accuracy(model: Mapping[str, Any], name: str, said: str, *, interval: bool = True) -> tuple[str, str]:
    ends = numbers.interval(model.get("low"), model.get("high")) if interval else ""
    return numbers.in_unit(model.get(name), said), ends


def _points(before: Mapping[str, Any], pruned: Mapping[str, Any], name: str, said: str) -> str:
    difference = numbers.difference(before.get(name), pruned.get(name))
    return difference if difference == numbers.NOTHING else f"{difference} {_difference_unit(said)}".rstrip()


def _difference_unit(said: str) -> str:
    return "points" if said == "%" else said


def comparison(metrics: Mapping[str, Any]) -> Table:
    """Return the table of models as text: every measure of each model, and how the pruned one compares."""
    headings = ("", *models(metrics), f"pruned against {reference(metrics)}")
    rows = [(row.label, *(" ".join(cell).strip() for cell in row.cells), row.change) for row in compared(metrics)]
    return Table(headings, rows)


def models(metrics: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns of the table of models."""
    return tuple(name for name in MODELS if name not in OPTIONAL or name in metrics)


def model(metrics: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the figures of a model, with the interval of its score; {} if the run has none of that name."""
    return {**(metrics.get(name) or {}), **((metrics.get("accuracy") or {}).get(name) or {})}


def speedup(metrics: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the main speedup: that delivered for a budget of time, or the first row on the CPU, or of all; or None."""
    if found := metrics.get("delivered"):
        final = found["final"]
        figures = {"median": final["speedup"], "low": final["speedup_low"], "high": final["speedup_high"]}
        return {**found["target"], **figures, "stable": final["stable"]}
    rows = [row for row in metrics.get("speedup", []) if numbers.is_number(row.get("median"))]
    return next((row for row in rows if row.get("device") == "cpu"), rows[0]) if rows else None


def reference(metrics: Mapping[str, Any]) -> str:
    """Return what the pruned model is fairly compared with: the control where there is one, else the dense model."""
    return "control" if numbers.is_number(model(metrics, "control").get(scores(metrics)[0][0])) else "dense"


def guessing(metrics: Mapping[str, Any]) -> bool:
    """Return whether the model that the pruned one is compared with is at chance, so that scores say nothing."""
    return bool(model(metrics, reference(metrics)).get("at_chance"))


def scores(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return name and label of every score of the run's task, the main one first."""
    found = metrics.get("task", {}).get("scores") or [{"name": "top1", "label": "top-1"}]
    return [(score["name"], score["label"]) for score in found]


def unit(metrics: Mapping[str, Any], name: str) -> str:
    """Return the unit of a score of the run's task."""
    return str(_facts(metrics, name).get("unit", "%"))


def lower_is_better(metrics: Mapping[str, Any], name: str) -> bool:
    """Return whether less of a score of the run's task is better."""
    return bool(_facts(metrics, name).get("lower_is_better"))


def _facts(metrics: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return next((one for one in metrics.get("task", {}).get("scores") or () if one["name"] == name), {})


def direction(metrics: Mapping[str, Any], name: str) -> str:
    """Return what follows the label of a score of which less is better; empty for others."""
    return " (lower is better)" if lower_is_better(metrics, name) else ""


def intervals(metrics: Mapping[str, Any]) -> str:
    """Return a sentence on the intervals of the main score, and one on what it means, as far as it has them."""
    by, note = metrics.get("task", {}).get("interval", "Wilson"), _facts(metrics, scores(metrics)[0][0]).get("note")
    said = (f"In brackets: 95 % {by} intervals." if by else "", f"{capital(str(note))}." if note else "")
    return " ".join(filter(None, said))


def capital(text: str) -> str:
    """Return text with a capital first letter; an abbreviation such as `mAP` stays as it is."""
    return text if text[1:2].isupper() else text[:1].upper() + text[1:]


def samples(metrics: Mapping[str, Any]) -> str:
    """Return what samples of the data are called, such as images."""
    return str(metrics.get("task", {}).get("samples", "images"))


def budgeted(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each budget of a plan: what is left and was asked for, as share, megabytes or predicted time."""
    lost = plan.get("max_drop")
    if lost:
        yield f"max_drop: {lost['said']}"
    for name, found in plan.get("budgets", {}).items():
        facts = facts_from(name, found)
        asked, dense = (facts.shown(found[key]) for key in ("asked", "dense"))
        of = "" if facts.share else f", of {dense}"
        binds = ", the one that binds" if plan.get("binding") == name and len(plan["budgets"]) > 1 else ""
        what = "predicted" if facts.measured else "left"
        found_by = "as far as max_drop allows" if lost and lost.get("narrows", plan.get("binding")) == name else ""
        yield f"{facts.asked(found['left'])} {what}, {found_by or f'{facts.limit} {asked} asked for'}{of}{binds}"


def blocks(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield how many blocks are gone, and which, in a line, if any are."""
    if gone := metrics.get("blocks"):
        of = (metrics.get("plan") or {}).get("blocks", len(gone))
        yield f"{len(gone)} of {of} gone as a whole: {numbers.listed(gone, SHOWN)}"


def on_time(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield the time that was delivered for budgets of time in a line, if the run had any."""
    if found := metrics.get("delivered"):
        final, target = found["final"], found["target"]
        budgets = (metrics.get("plan") or {}).get("budgets", {})
        asked = " and ".join(
            facts_from(name, budgets.get(name, {})).asked(value) for name, value in found["asked"].items()
        )
        where = f"{target['runtime']} on {target['device']}, batch {target['batch']}, threads {target['threads']}"
        given = f"{asked} asked for, " if asked else ""
        tried = f", after {len(found['attempts'])} attempts" if found["attempts"] else ""
        both = f"; both models with {found['deployed']}" if found.get("deployed") else ""
        speedup = f"{numbers.factor(final['speedup'])} {numbers.interval(final['speedup_low'], final['speedup_high'])}"
        share = f": {numbers.share(found['excess'])} of the time asked for" if asked else ""
        of = ", unstable" if unstable_mark(final) else share
        yield (
            f"{given}{speedup} and {numbers.digits(final['ms'])} ms delivered{of} ({where}; measured last{tried}{both})"
        )


def deployed(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield the changes of the deployed model in a line, if the run has one."""
    if found := metrics.get("deployment"):
        norms = f"{found['folded_norms']} BatchNorms folded, " if found["folded_norms"] else ""
        layout = "channels last, " if found["channels_last"] else ""
        apart, rounded = (numbers.scientific(found[key]) for key in ("max_relative_difference", "after_rounding"))
        proof = f"equal to the pruned model to {apart} on {found['inputs']} images in float64"
        yield f"{norms}{layout}{proof}, to {rounded} with its weights rounded to their own dtype"


def repaired(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield the result of the repair in a line, if the run had one."""
    if found := metrics.get("repair"):
        errors = " → ".join(numbers.share(found.get(when), 2) for when in ("before", "after"))
        end = "" if found.get("kept") else ": no better, so nothing was changed"
        layers = f"{found.get('refitted')} of {found.get('layers')} layers refitted"
        yield f"output error on held-out images {errors} of its variance{end}; {layers}"


def masked(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield the effect of activation masks on the test images, if the run had any, and how a budget was spread."""
    if found := metrics.get("activations"):
        asked = [
            f"{what} {numbers.share(found[key])}" for key, what in ASKED.items() if numbers.is_number(found.get(key))
        ]
        target = f" ({', '.join(asked)})" if asked else ""
        name, label = scores(metrics)[0]
        reached = " ".join((label, *_accuracy(found, name, unit(metrics, name))))
        weighted = ", weighted by MACs" if found.get("by") == "macs" else ""
        shown = f"{numbers.share(found.get('sparsity'))} of the activations are zero{weighted}{target}, {reached}"
        yield shown.rstrip()
        if errors := found.get("errors"):
            spread, uniform = (numbers.share(errors.get(way), 2) for way in ("spread", "uniform"))
            way = "spread over the layers by errors" if found.get("way") == "spread" else "one share for all layers"
            yield f"{way}; output error on held-out images, of its variance: {spread} spread, {uniform} with one share"


ASKED = {"target": "target", "overall": "overall budget"}
"""Shares of zeros that masks may be asked for, by their keys in the metrics."""


def searched(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield which learning rate each training run took that searched for one, a line each."""
    for run, found in (metrics.get("trainings") or {}).items():
        taken, (start, *tried) = found.get("lr"), found.get("rates") or [None]
        name = numbers.training_name(run)
        if taken is None:
            continue
        if start is None:
            yield f"{name}: lr {taken:g} was taken, the middle of its range: 5 % of the steps are too few to try others"
            continue
        losses = {row["rate"]: row["held_out_loss"] for row in (start, *tried)}
        losses = {rate: math.inf if loss is None else loss for rate, loss in losses.items()}
        before, left = (_loss(losses[0]), _loss(losses[taken]))
        none = "" if losses[taken] < losses[0] else ", the lowest, because none helped"
        yield f"{name}: lr {taken:g} was taken of {len(tried)} tried{none} (held-out loss {left}; start {before})"


def _loss(value: float) -> str:
    return numbers.digits(value) if math.isfinite(value) else "not finite"


def fake_quantized(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield in how many layers each training run saw int8, a line each."""
    for run, found in (metrics.get("trainings") or {}).items():
        if seen := found.get("fake_quantize"):
            what = f"{seen['dtype']} in weights and inputs of {numbers.plural(seen['layers'], 'layer')}"
            yield f"{numbers.training_name(run)}: saw {what}, also where epochs were compared"


def unbeaten(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each training run in which no epoch was better than its start."""
    name, label = scores(metrics)[0]
    for run, found in (metrics.get("trainings") or {}).items():
        start = found.get("start")
        if found.get("best_epoch") == 0 and numbers.is_number(start):
            reached = f"{label} {numbers.in_unit(start, unit(metrics, name))}"
            if (distance := found.get("start_held_out_loss")) is not None:
                reached = f"held-out loss {_loss(distance)}, {reached}"
            yield f"{numbers.training_name(run)}: no epoch beat the start ({reached}), which is delivered"


def compiled(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield the time to compile the steps of each training run, or why they ran in eager, a line each."""
    for run, found in (metrics.get("compiled") or {}).items():
        run = numbers.training_name(run)
        seconds = f"{run}: {numbers.duration(found['seconds'])} of compiling"
        yield seconds if found["fallback"] is None else f"{run}: in eager, because {found['fallback']}"


def early(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield when masks became final and training went on with the compact model, in a sentence."""
    if found := metrics.get("compacted_early"):
        yield (
            f"The plan was final after {numbers.digits(found['epoch'])} epochs; there masked and compact model agreed "
            f"to {found['max_relative_difference']:.1e}, and the compact one was trained from there on"
        )


def clamped(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each training run and gradient clamp: the module with the largest share beyond the limit."""
    for row in metrics.get("clamps", []):
        what = "values" if row.get("by") == "value" else "gradients"
        share, run = numbers.share(row.get("share"), 2), numbers.training_name(str(row.get("run")))
        yield f"{run}, {row.get('clamp')}: {share} of the {what} at {row.get('module') or 'the model'}"
