"""Sensitivity analysis: the error of a model's output for each number of channels that a group keeps."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelGroup, ChannelMap
from prunekit.channels.trial.trial import run_trial
from prunekit.criteria.elimination import eliminations
from prunekit.criteria.scoring import score
from prunekit.data.datasets import describe_corrupt
from prunekit.data.loader import Batches
from prunekit.hooks.wrappers import unwrapped
from prunekit.jobs.run.baseline_cache import train_baseline
from prunekit.jobs.run.command_subject import RECIPE_ONLY, Own
from prunekit.jobs.run.job_subject import JobSubject, chosen_batches, prepare
from prunekit.jobs.run.resume import run_recipe
from prunekit.jobs.run.run_folder import AnalysisRun, Finish, environment, run_folder, write_report
from prunekit.measure.group_sensitivity import forward_passes, measure_sensitivity
from prunekit.modes.public_call import public_call
from prunekit.planning.feasibility import chosen_groups
from prunekit.planning.sensitivity_curves import (
    MeasuredPoint,
    SensitivityCurve,
    fewest_within,
    keep_in_group,
    rank_correlation,
)
from prunekit.planning.solver import halved
from prunekit.pruning.sample_statistics import joined_samples, patch_statistics
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import PruneSettings
from prunekit.tasks.task import Loss, Task, described_task, pair
from prunekit.utils.context import paused_garbage_collection, threads
from prunekit.utils.display import Displayed, Table, count, digits, plural, share
from prunekit.utils.files import write_csv, write_json
from prunekit.utils.inputs import as_example, inputs_as_example, sample_count, select_samples, to_device
from prunekit.utils.progress import Log, reporting, stage, wanted
from prunekit.utils.tensors import gather

LIMITS = {"kept_1": 0.01, "kept_10": 0.1}
"""Errors, as shares of the variance, for which the fewest kept channels are reported."""


@dataclass(frozen=True, eq=False, repr=False)
class Sensitivity(Displayed):
    """Sensitivity of a model to the removal of channels, by group.

    Attributes:
        channel_map: of the model, after a trial.
        groups: those that were analyzed.
        curves: by a group's name, from statistics of the layers that read it; missing if none of these can be followed.
        measured: by a group's name, errors of the model with channels of the group masked; empty if not measured.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> found = pk.sensitivity(model, torch.randn(64, 8))
        >>> found
        <Sensitivity: 1 channel group, from statistics>
        >>> (row,) = found.rows()
        >>> row["group"], row["channels"], row["kept_10_fast"] < 1  # for an error of 10 % some channels may go
        ('0', 16, True)
    """

    channel_map: ChannelMap
    groups: tuple[ChannelGroup, ...]
    curves: Mapping[str, SensitivityCurve]
    measured: Mapping[str, tuple[MeasuredPoint, ...]]

    def points(self) -> list[dict[str, Any]]:
        """Return a row for every group and number of kept channels; see `curve_rows`."""
        return curve_rows(self.channel_map, self.curves, self.measured)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each group, sorted by the error at half of the channels, measured or else the fast total.

        It holds `group`, `module`, `channels`, `macs` (of the group in the dense model), and for both ways, with names
        that end in `_fast` and `_measured`: `kept_1` and `kept_10`, the least share of the channels (0..1) at which the
        error is within 1 and 10 % of the variance; `half`, the error at half of the channels. `half_total` is the sum
        by which a budget is spent. A value is None if there is no such curve.
        """
        by = "half_measured" if self.measured else "half_total"
        rows = [self._row(group) for group in self.groups]
        return sorted(rows, key=lambda row: (row[by] is None, -(row[by] or 0.0)))

    def _row(self, group: ChannelGroup) -> dict[str, Any]:
        size, curve, points = group.labels.size, self.curves.get(group.name), self.measured.get(group.name, ())
        none, half = keep_in_group(self.channel_map, group.labels, 0), max(1, size // 2)
        row: dict[str, Any] = {"group": group.name, "module": group.module, "channels": size}
        row["macs"] = self.channel_map.macs() - self.channel_map.macs(none)
        fast = [] if curve is None else [(kept, curve.share_at(kept)) for kept in range(size, 0, -1)]
        for way, line in (("fast", fast), ("measured", [(point.kept, point.error) for point in points])):
            for name, limit in LIMITS.items():
                row[f"{name}_{way}"] = fewest_within(line, limit) / size if line else None
            row[f"half_{way}"] = dict(line).get(half)
        return row | {"half_total": None if curve is None else curve.error_at(half)}

    def _headline(self) -> str:
        rows = self.rows()
        how = "measured" if self.measured else "from statistics"
        most = f"; most sensitive: {', '.join(row['group'] for row in rows[:3])}" if len(rows) > 1 else ""
        return f"{plural(len(rows), 'channel group')}, {how}{most}"

    def _parts(self) -> Iterator[str | Table]:
        yield (
            "Channels to keep for an error within 1 % and 10 % of the variance, and the error at half of the channels "
            "(total: what a budget is spent by); the most sensitive group first."
        )
        columns = {"fast 1 %": "kept_1_fast", "10 %": "kept_10_fast", "at half": "half_fast", "total": "half_total"}
        if self.measured:
            found = {"measured 1 %": "kept_1_measured", "10 % ": "kept_10_measured", "at half ": "half_measured"}
            columns |= found
        cells = [
            (row["group"], row["channels"], count(row["macs"]), *(_cell(name, row[name]) for name in columns.values()))
            for row in self.rows()
        ]
        yield Table(("group", "channels", "MACs", *map(str.strip, columns)), cells)
        if self.agreement is not None:
            about = "Rank correlation of fast and measured, over groups at half of the channels"
            yield f"{about}: {self.agreement:.2f}"

    @property
    def agreement(self) -> float | None:
        """Spearman's rank correlation, over groups, of fast totals and measured errors at half of the channels.

        None unless there are both.
        """
        pairs = [(row["half_total"], row["half_measured"]) for row in self.rows()]
        both = np.array([pair for pair in pairs if None not in pair], dtype=float).reshape(-1, 2)
        return rank_correlation(both[:, 0], both[:, 1])


def _cell(name: str, value: float | None) -> str:
    return digits(value) if name == "half_total" else share(value, 0 if name.startswith("kept") else 1)


@public_call
def sensitivity(
    model: nn.Module,
    batches: Any,
    *,
    measured_on: Any = None,
    groups: Sequence[str] = (),
    loss: Loss | None = None,
    more_examples: Sequence[Any] = (),
    task: Task | str | None = None,
    log: Log = stage,
    progress: bool | None = None,
) -> Sensitivity:
    """Return the error of a model's output for each number of channels that a group keeps.

    For models of any task. The fast way needs unlabeled calibration samples: the channels of a group are removed in the
    order of an optimal brain surgeon on the inputs of the layers that read them (Hassibi & Stork 1993, by groups of
    weights). The error after each is what remains when these layers are fitted again, per output, as a share of its
    variance. It is local, and what a repair can reach. With `measured_on` the same channels are also masked in the
    model without a repair, and its output is compared with the dense one; see `prunekit.measure.group_sensitivity`.

    Args:
        model: in any mode, on any device; not changed.
        batches: calibration samples, at least 8, preprocessed as the model wants them, as `prunekit.prune` takes them:
            images (B, ...), a loader of them...; labels are not used.
        measured_on: samples in the same forms, with or without labels; None: nothing is measured.
        groups: globs over the names of channel groups, which are module paths; none: all.
        loss: for `measured_on` with targets, of what the model returns and the targets; None: the task's.
        more_examples: further examples for the trace, for branches of the model that the batches do not take.
        task: unpacks batches that come in another form, and has the loss and the scores that are measured; itself or
            its name. None: the cross entropy and top-1 of class scores.
        log: gets a line for each step, and before measuring one on the number of forward passes.
        progress: whether to show bars on stderr; None: on a terminal and in a notebook.

    Raises:
        DataError: there are no samples, or too few, or they come in a form that is not known.
        PlanError: no channel is free, or a glob matches no group.
        NonFiniteError: a layer reads or gives NaN or Inf; names it.
        ModelError, UsageError: as for `measure_sensitivity`.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> found = pk.sensitivity(model, torch.randn(64, 4))
        >>> print(found)
        Channels to keep for an error within 1 % and 10 % of the variance, ...
        ...
          group  channels  MACs  fast 1 %  10 %  at half  ...
          0            16    96  ...
        >>> [(row["group"], row["channels"], 0 < row["half_fast"] < 1) for row in found.rows()]
        [('0', 16, True)]
    """
    with reporting(progress, "sensitivity"):
        return analyze_sensitivity(unwrapped(model), batches, measured_on, groups, loss, more_examples, task, log)


def analyze_sensitivity(
    model: nn.Module,
    images: Any,
    measured_on: Any = None,
    groups: Sequence[str] = (),
    loss: Loss | None = None,
    more_examples: Sequence[Any] = (),
    task: Task | str | None = None,
    log: Log = stage,
    *,
    measured_as: Task | str | None = None,
    progress: bool = False,
) -> Sensitivity:
    """Do what `sensitivity` does, and show no bars but those of the measurement.

    `measured_as` is the task of the samples in `measured_on`; None: `task`.
    """
    calibration = joined_samples(model, images, sys.maxsize, task)
    first = next(model.parameters(), gather(calibration)[0])
    calibration = to_device(calibration, first.device)
    examples = [
        inputs_as_example(model, select_samples(calibration, slice(2))),
        *(as_example(model, one) for one in more_examples),
    ]
    with paused_garbage_collection():
        chart = trace(model, *examples)
        chosen_groups(chart, groups)
        chart = run_trial(model, chart, partial(halved, settings=PruneSettings()), examples).channel_map
    chosen = chosen_groups(chart, groups)
    about = f"sensitivity: {len(chosen)} channel groups, {sample_count(calibration)} samples"
    stats = patch_statistics(model, calibration, chart, groups=chosen, log=lambda line: log(f"{about}; {line}"))
    found = eliminations(model, chart, stats, chosen)
    curves = {name: SensitivityCurve(order.labels, order.errors, order.outputs) for name, order in found.items()}
    orders = {group.name: curves[group.name].labels if group.name in curves else group.labels for group in chosen}
    if without := [group for group in chosen if group.name not in curves]:
        names, scores = ", ".join(group.name for group in without), score("l2", model, chart)
        log(f"sensitivity: no fast curve, order by magnitude: no layer that can be followed reads {names}")
        orders |= {group.name: group.labels[np.argsort(scores[group.labels], kind="stable")] for group in without}
    if measured_on is None:
        return Sensitivity(chart, chosen, curves, {})
    log(f"sensitivity: measuring takes {forward_passes(orders)} forward passes over the samples, one as the model is")
    task = measured_as or task
    measured = measure_sensitivity(model, chart, orders, measured_on, loss=loss, task=task, progress=progress)
    return Sensitivity(chart, chosen, curves, measured)


def analyze(
    job: JobSettings,
    *,
    measured: bool = False,
    groups: Sequence[str] = (),
    log: Log = stage,
    progress: bool | None = None,
    finish: Finish | None = write_report,
    own: Own = RECIPE_ONLY,
) -> AnalysisRun[Sensitivity]:
    """Analyze the sensitivity of a job's dense model, which is trained first if it has no weights; see `sensitivity`.

    If it is measured too, by the loss and the scores of the job's task, then on as many validation samples as the job
    calibrates on.
    """
    text, shown = run_recipe(job, own), wanted(progress)
    prepared = prepare(job, own)
    task = prepared.splits.task
    chosen_groups(trace(prepared.model, prepared.example_inputs), groups)
    # validation samples, never test samples
    labeled = chosen_batches(job, prepared.splits.validation, in_order=True) if measured else None
    images = prepared.calibration_images()
    with run_folder(job.output / job.name, "sensitivity", log, text, finish) as run, threads(job.threads):
        model = train_baseline(prepared, log=run.log, progress=shown).model.to(prepared.device)
        start = time.perf_counter()
        measured_as = replace(task, unpack=pair)  # the batches of a job are unpacked
        result = analyze_sensitivity(
            model, images, labeled, groups, log=run.log, measured_as=measured_as, progress=shown
        )
        metrics = _metrics(prepared, sample_count(images), result, labeled)
        metrics |= {"seconds": time.perf_counter() - start}
        write_csv(run.path / "sensitivity.csv", result.points(), CURVE_COLUMNS)
        write_json(run.path / "sensitivity.json", metrics)
        if prepared.splits.corrupt:
            run.log(f"data: {describe_corrupt(prepared.splits.corrupt)}")
    return AnalysisRun(run.path, result, metrics)


def _metrics(prepared: JobSubject, images: int, result: Sensitivity, labeled: Batches | None) -> dict[str, Any]:
    """Return what `sensitivity.json` holds."""
    points = next(iter(result.measured.values()), ())
    return {
        "name": prepared.job.name,
        "task": described_task(prepared.splits.task),
        "macs": result.channel_map.macs(),
        "images": images,
        "measured_images": None if labeled is None else labeled.images,
        "dense": {"loss": points[0].loss, **points[0].scores} if points else None,
        "agreement": result.agreement,
        "groups": result.rows(),
        "fast": {
            name: {"errors": [curve.share_at(kept) for kept in range(curve.labels.size, 0, -1)]}
            for name, curve in result.curves.items()
        },
        "measured": {name: [point.row() for point in found] for name, found in result.measured.items()},
        "environment": environment(),
    }


CURVE_COLUMNS = (
    *("group", "module", "kept", "channels", "macs_saved"),
    *("error_fast", "error_total", "error_measured", "kl", "loss"),
)
"""Columns of `curve_rows`, which the scores of a task follow where they were measured."""


def curve_rows(
    channel_map: ChannelMap,
    curves: Mapping[str, SensitivityCurve],
    measured: Mapping[str, Sequence[MeasuredPoint]] | None = None,
) -> list[dict[str, Any]]:
    """Return MACs saved and errors of each group with a curve, for each number of kept labels, from all to one.

    `error_fast` is the mean, and `error_total` the sum, over outputs of the layers that read the group, weighted by
    their gains, after the kept weights are fitted again. The other errors are of the masked model's output; None if
    not measured. `loss` and the scores of the task, by name, are those of the masked model.
    """
    rows, dense = [], channel_map.macs()
    for group in channel_map.groups:
        curve, points = curves.get(group.name), {point.kept: point for point in (measured or {}).get(group.name, ())}
        for kept in range(group.labels.size, 0, -1) if curve is not None else sorted(points, reverse=True):
            order = group.labels if curve is None else curve.labels  # MACs depend on the number alone
            point = points.get(kept)
            row = {"group": group.name, "module": group.module, "kept": kept, "channels": group.labels.size}
            row |= {"macs_saved": dense - channel_map.macs(keep_in_group(channel_map, order, kept))}
            row |= {"error_fast": None if curve is None else curve.share_at(kept)}
            row |= {"error_total": None if curve is None else curve.error_at(kept)}
            row |= {"error_measured": None if point is None else point.error}
            row |= {name: getattr(point, name, None) for name in ("kl", "loss")}
            rows.append(row | (dict(point.scores) if point else {}))
    return rows
