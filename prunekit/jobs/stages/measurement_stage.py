"""The measurement stage: scores, sizes, latency and tables of a job's models, `metrics.json`, and pictures of boxes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.backends.session import inputs_like
from prunekit.data.loader import batches
from prunekit.jobs.analyses.explain import explain_job
from prunekit.jobs.run.job_subject import JobSubject
from prunekit.jobs.run.run_folder import Attempts, RunFolder, environment
from prunekit.jobs.stages.deployment_stage import DEPLOYED
from prunekit.jobs.stages.training_stage import missed_targets
from prunekit.masks.masked_model import Sparsity
from prunekit.measure import model_size
from prunekit.measure.accuracy import Scores
from prunekit.measure.latency.comparison import LatencyReport, devices, measure_latency
from prunekit.measure.latency.row_text import failure_lines, speedup_text, unstable_lines
from prunekit.measure.verification import Verification
from prunekit.planning.plan import Plan, load_plan
from prunekit.pruning.latency.latency_target import LatencyResult
from prunekit.pruning.plan_search import Planned
from prunekit.report.figures.detection_boxes import CONFIDENCE, boxes_side_by_side, write_png
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import facts_of
from prunekit.tasks.detection import DETECTION, Targets
from prunekit.tasks.task import Task, described_task
from prunekit.utils.context import training_mode
from prunekit.utils.display import in_unit, percent
from prunekit.utils.files import write_csv, write_json
from prunekit.utils.inputs import call, inputs_as_example

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Measurements:
    """Figures of the dense model, its control and the compact model that was loaded from its folder."""

    models: dict[str, dict[str, Any]]  # by name, what `results.csv` holds of each
    accuracies: dict[str, Scores]  # scores by the model's name
    latency: LatencyReport  # of all models but the control
    activations: dict[str, Any] | None = None  # figures of the activation masks (`measure_masks`); None without masks
    # why the pruned model is not faster (`explain_job`); None if it was not asked for
    explanation: dict[str, Any] | None = None
    failures: tuple[str, ...] = ()  # what could not be measured; its figure is None, or missing


def measure_models(
    prepared: JobSubject,
    run: RunFolder,
    dense: nn.Module,
    control: nn.Module | None,
    deployed: nn.Module | None,
    *,
    attempt: Attempts,
    final: LatencyResult | None = None,
) -> Measurements:
    """Measure scores on the test data, which nothing has seen before, and sizes and latency."""
    log = attempt.log
    pruned = prepared.load_model(run.path / "model", dense)
    task, example = prepared.splits.task, prepared.example_inputs
    inputs = inputs_like(example, drawn=task.labeled_images)
    found = {"dense": dense, "control": control, "pruned": pruned, "deployed": deployed}
    models = {name: model for name, model in found.items() if model is not None}
    files = {
        "dense": run.path / "checkpoints" / "dense.safetensors",
        "control": run.path / "checkpoints" / "control.safetensors",
        "pruned": run.path / "model" / "model.safetensors",
        "deployed": run.path / DEPLOYED / "model.safetensors",
    }
    accuracies, figures = {}, {}
    with_zeros = prepared.job.compress or bool(load_plan(run.path / "model").element_masks)
    for name, model in models.items():
        reached = accuracies[name] = prepared.tested(model)
        figures[name] = {
            **reached.values,
            "n_test": reached.n_test,
            "params": model_size.count_parameters(model),
            "macs": attempt(f"MACs of the {name} model", partial(model_size.count_macs, model, example)),
            "size_bytes": model_size.size_bytes(files[name] if files[name].exists() else files["dense"]),
            "tensor_bytes": model_size.count_bytes(model),
        }
        if with_zeros and (stored := attempt(f"files of the {name} model", partial(model_size.stored_sizes, model))):
            figures[name] |= stored.figures()
        if prepared.job.prune.budget.memory_mb is not None:
            target = prepared.job.prune.target
            counted = partial(model_size.count_memory, model, example, target.batch, target.dtype)
            figures[name]["memory_bytes"] = attempt(f"memory of the {name} model", counted)
        log(f"test: {name} {_reached(reached, task)}")
        if reached.at_chance:
            log(f"test: {_at_chance(name, reached, task.main.label)}")
    settings = prepared.job.latency
    timed = {name: model for name, model in models.items() if name != "control"}
    timing = partial(measure_latency, timed, inputs, settings, devices("auto", settings), log=log)
    latency = attempt("latency", timing) or LatencyReport((), (), (), ())
    if final is not None:
        latency = final.in_place(latency, "pruned" if deployed is None else "deployed")
    if latency.rows:
        write_csv(run.path / "latency_samples.csv", list(latency.sample_rows()))
    write_csv(run.path / "results.csv", [{"model": name, **row} for name, row in figures.items()])
    said = [f"speedup of {speedup_text(row)}" for row in latency.speedup]
    for note in [*said, *unstable_lines(latency.rows, latency.speedup), *latency.notes]:
        log(f"latency: {note}")
    explanation = explain_job(dense, pruned, inputs, settings, latency.speedup, log)
    return Measurements(figures, accuracies, latency, explanation=explanation)


def _reached(found: Scores, task: Task) -> str:
    """Return the main score with its interval, and the other scores, in words."""
    main, *others = (in_unit(found.values[score.name], score.unit) for score in task.scores)
    interval = "" if found.interval is None else " [{:.2f}, {:.2f}]".format(*found.interval)
    named = [f"{score.label} {value}" for score, value in zip(task.scores[1:], others, strict=True)]
    said = main if task.main.name == "top1" else f"{task.main.label} {main}"
    return f"{', '.join([said + interval, *named])} of {found.n_test} {task.samples}"


def _at_chance(name: str, found: Scores, label: str) -> str:
    """Return a sentence on a model whose main score is no better than chance."""
    value, chance = (in_unit(each, found.unit) for each in (next(iter(found.values.values())), found.chance))
    return (
        f"the {name} model's {label}, {value}, is not shown to be better than {chance}, which always answering the "
        "most frequent class gives"
    )


def metrics_of(
    measured: Measurements,
    planned: Planned,
    proof: Verification,
    share: Sparsity,
    prepared: JobSubject,
    stages: dict[str, float],
) -> dict[str, Any]:
    """Return what `metrics.json` holds of the measurements."""
    chart, job, task = planned.plan.channel_map, prepared.job, prepared.splits.task
    return {
        "name": job.name,
        "task": described_task(task),
        **measured.models,
        "accuracy": {name: found.figures() for name, found in measured.accuracies.items()},
        "sparsity": {"weights": share.weights, "channels": share.channels},
        "plan": {
            **{key: planned.plan.provenance.get(key) for key in ("budgets", "binding", "max_drop")},
            "macs_left": chart.macs_left(planned.plan.keep),
            "blocks": len(chart.branches.found),
            "free_parameter_share": chart.free_share(n for n in chart.labels if not n.endswith(_STATISTICS)),
            "trial_max_relative_difference": planned.max_relative_difference,
            "locked_by_trial": list(planned.locked_by_trial),
        },
        "blocks": [branch.name for branch in planned.plan.gone],
        "latency": [dict(row) for row in measured.latency.rows],
        "speedup": [dict(row) for row in measured.latency.speedup],
        "latency_notes": list(measured.latency.notes),
        "latency_failures": [dict(row) for row in measured.latency.failures],
        "machine": dict(measured.latency.machine),
        "explanation": measured.explanation,
        "parity": {name: getattr(proof, name) for name in ("max_relative_difference", "inputs", "dtype")},
        "activations": measured.activations,
        "shortfalls": shortfalls(measured, share, job, task.main.label),
        "seconds": sum(stages.values()),
        "stages": dict(stages),
        "environment": environment(),
    }


UNTOLD = "what pruning costs cannot be told by it"
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def shortfalls(measured: Measurements, share: Sparsity, job: JobSettings, label: str = "top-1") -> list[str]:
    """Return what was asked for and missed, in sentences; `label` names the main score."""
    found = []
    dense = {**measured.models["dense"], "channels": 1.0}
    pruned = {**measured.models["pruned"], "channels": 1 - share.channels}
    for name, asked in job.prune.budget.given.items():
        facts = facts_of(name)
        whole = dense.get(facts.counted_as) if facts.share else facts.per_unit
        counted = pruned.get(facts.counted_as)
        if whole is None or counted is None:
            continue
        left = counted / whole
        if left > facts.as_cost(asked):
            came = facts.as_cost(left)  # a user's sentence may format the number itself
            said = facts.found_as.format(came if "{:" in facts.found_as else facts.shown(came, 2))
            found.append(f"budget {facts.asked(asked)}: {said}")
    for name, reached in measured.accuracies.items():
        if reached.at_chance:  # of the dense model, comparisons mean nothing
            chance = _at_chance(name, reached, label)
            found.append(chance if name not in ("dense", "control") else f"{chance}: {UNTOLD}")
    slower = [row for row in measured.latency.speedup if row["high"] < 1 and row["stable"]]
    found += [f"slower than the dense model: {speedup_text(row)}" for row in slower]
    found += [f"latency not measured: {text}" for text in failure_lines(measured.latency.failures)]
    found += measured.failures
    return found + missed_targets(measured.activations)


DETECTIONS = "detections"
SHOWN = 6
"""The most images that are shown."""
LOOKED_AT = 24
"""Test images, evenly spread, of which the first with boxes are shown."""


def write_detections(prepared: JobSubject, models: Mapping[str, nn.Module], run: Path) -> list[str]:
    """Draw the boxes of a few test images, and those that each model finds in them, a PNG file for each image."""
    splits = prepared.splits
    if splits.task is not DETECTION:
        return []
    spread = torch.linspace(0, len(splits.test) - 1, min(LOOKED_AT, len(splits.test))).long()
    parts = list(batches(splits.test, len(spread), shuffle_seed=None, indices=spread))
    images, targets = torch.cat([part for part, _ in parts]), [target for _, part in parts for target in part]
    chosen = [i for i, target in enumerate(targets) if len(target["labels"])][:SHOWN]
    found = {name: _detected(model, images[chosen]) for name, model in models.items()} if chosen else {}
    rows = []
    for number, i in enumerate(chosen):
        sides = {"labeled": targets[i], **{name: each[number] for name, each in found.items()}}
        counts = {
            name: len(side["labels"]) if "scores" not in side else int((side["scores"] >= CONFIDENCE).sum())
            for name, side in sides.items()
        }
        said = ", ".join(f"{name} {count}" for name, count in counts.items())
        heading = (
            f"Test image {int(spread[i])}",
            f"boxes: {said}; of models those of at least {percent(100 * CONFIDENCE, 0)}",
        )
        file = f"{number:02}.png"
        write_png(run / DETECTIONS / file, boxes_side_by_side(images[i], sides, splits.classes, heading))
        rows.append({"image": int(spread[i]), "picture": file, "boxes": counts})
    if rows:
        write_json(run / DETECTIONS / "detections.json", {"models": list(models), "images": rows})
    return [str(row["picture"]) for row in rows]


def _detected(model: nn.Module, images: Tensor) -> Targets:
    example = inputs_as_example(model, images)
    with training_mode(model, False), torch.inference_mode():
        found: Targets = DETECTION.scored(model, example, call(model, example))
    return found


SIZES = (("in_channels", "out_channels"), ("in_features", "out_features"), ("num_features", "num_features"))


def layer_rows(dense: nn.Module, compact: nn.Module, plan: Plan) -> list[dict[str, Any]]:
    """Return widths, MACs (one sample) and parameters of every layer with a width, before and after pruning.

    Widths after are 0 for a layer of a block that is gone; what is left of its parameters is the constant in its place.
    """
    chart, small = plan.channel_map, dict(compact.named_modules())
    before, after = chart.layer_macs(), chart.layer_macs(plan.keep)
    rows = []
    for path, module in dense.named_modules():
        names = next((pair for pair in SIZES if hasattr(module, pair[0])), None)
        if names is None or any(module.children()):
            continue
        there = chart.is_present(path, plan.keep)
        rows.append(
            {
                "module": path,
                "kind": type(module).__name__,
                "in_before": getattr(module, names[0]),
                "in_after": getattr(small[path], names[0]) if there else 0,
                "out_before": getattr(module, names[1]),
                "out_after": getattr(small[path], names[1]) if there else 0,
                "macs_before": before.get(path, 0),
                "macs_after": after.get(path, 0),
                "params_before": model_size.count_parameters(module),
                "params_after": model_size.count_parameters(small[path]) if path in small else 0,
            }
        )
    return rows


def write_plan(folder: Path, planned: Planned) -> None:
    """Write a plan into a run's folder, with tables of its scores, locks and groups."""
    plan = planned.plan
    plan.save(folder)
    scores = [
        {"group": group.name, "channel": index, "score": float(planned.scores[label]), "kept": int(plan.keep[label])}
        for group in plan.channel_map.groups
        for index, label in enumerate(group.labels)
        if np.isfinite(planned.scores[label])
    ]
    locks = [asdict(lock) for lock in plan.channel_map.locks]
    coupled = ("group", "channels", "kept", "module", "tensor", "axis", "position")
    write_csv(folder / "scores.csv", scores, ("group", "channel", "score", "kept"))
    write_csv(folder / "locks.csv", locks, ("reason", "module", "operator", "channels"))
    write_csv(folder / "coupling.csv", _coupling_rows(plan), coupled)


def _coupling_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return every axis of a parameter or buffer that carries channels of a group.

    Axis 0 of a weight is a module's output, the others its input; in transposed convolutions it is the other way round.
    """
    modules = dict.fromkeys(name.rpartition(".")[0] for name in plan.channel_map.labels)
    positions = {module: position for position, module in enumerate(modules)}
    rows = []
    for group in plan.channel_map.groups:
        kept = int(np.count_nonzero(plan.keep[group.labels]))
        for name, axis in group.slots:
            module, _, tensor = name.rpartition(".")
            row = {"group": group.name, "channels": len(group.labels), "kept": kept, "module": module}
            rows.append(row | {"tensor": tensor, "axis": axis, "position": positions[module]})
    return rows
