"""Pruning in one call, and repair from unlabeled images: no labels, no gradients, no training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from prunekit.calibration import ChannelStats, TaylorTerms
from prunekit.calibration.patch_stats import PatchStats
from prunekit.calibration.patches import pixel_by_pixel
from prunekit.calibration.shortage import dead_inputs, too_few_rows
from prunekit.channels import ChannelMap, trace
from prunekit.channels.precision import HALF
from prunekit.compaction import compact, remarks
from prunekit.context import paused_garbage_collection, training_mode
from prunekit.criteria import get_criterion
from prunekit.deploy.subnormals import Flushed, without_subnormals
from prunekit.errors import DataError, ModelError, UsageError
from prunekit.globs import globs
from prunekit.inputs import arguments, count_of, moved, taken
from prunekit.measure.verify import verify
from prunekit.nested import map_tensors
from prunekit.planning import BudgetSettings, Plan, PruneSettings
from prunekit.planning.select import Scores
from prunekit.progress import reporting, stage
from prunekit.repair import RepairReport, RepairSettings
from prunekit.repair import repair as repair_masked
from prunekit.settings.pruning import Criterion, Scope, Target
from prunekit.tasks import Task
from prunekit.workflow.delivered import Delivered, Frozen
from prunekit.workflow.delivering import delivered, freeze
from prunekit.workflow.evidence import gathered, patch_statistics, statistics
from prunekit.workflow.goal import goal_for
from prunekit.workflow.planned import Planned
from prunekit.workflow.pruning import plan_model
from prunekit.wrappers import require_values, unwrapped

IMAGES = 1024
Data = tuple[Any, ...] | Tensor | Mapping[str, Any] | Iterable[Any]


@dataclass(frozen=True, eq=False)
class Pruned:
    """What `prune` returns.

    Attributes:
        model: the compact model, a new one of the same class.
        masked: the same in the dense model's size, what goes exactly 0 and the rest repaired; None without repair.
        plan: what was kept, and why.
        scores: (n_labels,) importance of every label.
        max_relative_difference: between the masked and the compact model in float64: over all operators in the trial,
            and of the outputs where it was repaired.
        repair: what the repair did; None without.
        notes: what the calibration was short of, channels that were zero all along, what a repair could not fit or did
            not keep, and what was set to 0 in the compact model as too small for full precision, in sentences; which
            classes are not the model's own any more; which methods no example runs that may need other sizes; whether
            all of it is frozen; and what was promised and not delivered.
        delivered: what was asked for and measured, where a budget is one of time.
    """

    model: nn.Module
    plan: Plan
    scores: Scores
    max_relative_difference: float
    masked: nn.Module | None = None
    repair: RepairReport | None = None
    notes: tuple[str, ...] = ()
    delivered: Delivered | None = None


def prune(
    model: nn.Module,
    data: Data,
    *,
    macs: float | None = None,
    channels: float | None = None,
    params: float | None = None,
    size_mb: float | None = None,
    latency_ms: float | None = None,
    speedup: float | None = None,
    memory_mb: float | None = None,
    target: Target | None = None,
    criterion: Criterion | None = None,
    scope: Scope | None = None,
    round_to: int = 1,
    min_channels: int = 1,
    ignore: str | Sequence[str] = (),
    ratios: Mapping[str, float] | None = None,
    plain_classes: bool = False,
    repair: RepairSettings | Literal[False] | None = None,
    images: int = IMAGES,
    stats: ChannelStats | None = None,
    gradients: TaylorTerms | None = None,
    seed: int = 0,
    more_examples: Sequence[tuple[Any, ...]] = (),
    task: Task | str | None = None,
    progress: bool | None = None,
) -> Pruned:
    """Prunes a model in one call: trace, score, plan, trial, compact; with images also repair.

    Given images, none of which needs a label, channels go in the order of an optimal brain surgeon on the patches that
    their consumers read, the budget is spent where the error is least for each multiply-accumulate saved
    (`criterion="elimination"`, `scope="per_mac"`), and what stays is refitted to what the dense model computes.
    Given an example alone, the filters of least norm go (`criterion="l2"`), and nothing is refitted. All criteria but
    elimination have `scope="uniform"`, but for budgets of time, which are spent where they cost least.

    Args:
        model: any module that runs on `data`; not changed.
        data: a tuple: positional arguments of `forward`, such as `(torch.randn(1, 3, 224, 224),)`. Or samples to
            calibrate on, preprocessed as the model wants them: a tensor (B, ...) or a mapping of tensors by the names
            of the arguments of `forward`; a map-style data set; or a loader, any iterable of batches, tensors or such
            mappings or (inputs, ...) each, such as a DataLoader; the first entry, or what `task` unpacks, may be
            several inputs: a tuple of them, or a mapping. Of a mapping, `labels` or `label` are no inputs, and what
            `forward` does not take is left out. Where it takes an `attention_mask`, batches may differ in length, and
            positions that the mask leaves out count for nothing.
        macs, channels, params: shares of the multiply-accumulates, of the channels and of the parameters that may be
            left, above 0 and below 1.
        size_mb: megabytes (10^6 bytes) that parameters and buffers may take in a file.
        latency_ms: median milliseconds of one forward pass of the batch that the target names, measured.
        speedup: how many times faster than the dense model it is to be on the target, measured.
        memory_mb: megabytes alive at the peak of a forward pass, see `BudgetSettings`. At least one of these seven is
            given, and all that are hold; `plan.provenance` says what is left of each, and which of them binds.
        target: runtime, device, batch, threads, dtype and memory format of what is on a target; float32 in eager
            on one CPU thread where it is not given. The model is profiled there, and plans are measured and made anew
            until the time is within 3 % of what was asked for; what is delivered is measured last, and in `delivered`.
        criterion: as `prunekit list criteria` shows them, each with what it needs. What can be had from images is
            collected from them; gradients need labels, and are given.
        scope: `uniform`, the same share of every group; `global`, ranked over all of them; `per_mac`, ranked by score
            for each multiply-accumulate, or whatever else the budget counts; or `capacity`, the widest layers that
            the budget allows, where scores only say which channels of a group go.
        round_to: channel counts become multiples of this where they can.
        min_channels: the fewest channels that any group keeps.
        ignore: a glob over module paths, or several, whose output channels stay.
        ratios: glob over module paths -> share of their output channels to keep.
        plain_classes: whether all modules keep their classes, and channels stay that could not go otherwise; so
            `torch.save(model)` makes a file that loads where prunekit is not installed. `notes` names other classes.
        repair: what is refitted and how, `RepairSettings()` where images are given; False: nothing.
        images: how many samples are taken from a loader or a data set; at least 8.
        stats: from `prunekit.calibrate`.
        gradients: from `prunekit.collect_gradients`.
        seed: of the random criterion.
        more_examples: further inputs, for branches of the model that the first does not take.
        task: whose `unpack` takes a loader's batches apart, where they come in another form; itself or its name.
        progress: whether to show stages and bars on stderr; None: on a terminal and in a notebook. The logger
            `prunekit` gets a line for each stage in any case.

    Raises:
        PlanError: the budget cannot be met or removes nothing, or a glob matches no module.
        UsageError: an argument is out of range, or `repair` is asked for without images.
        DataError: fewer than 8 images, or no tensors, or the task cannot unpack a batch; a `UsageError`.
        NonFiniteError: a layer reads or computes NaN or Inf on the images; names the layer.
        VerificationError: masked and compact model differ.
    """
    model = unwrapped(model)
    require_values(model, "prune")
    criterion = criterion or ("l2" if isinstance(data, tuple) else "elimination")
    budget = BudgetSettings(channels, macs, params, size_mb, latency_ms, speedup, memory_mb)
    settings = PruneSettings(
        budget=budget,
        target=target or Target(),
        criterion=criterion,
        scope=scope or ("per_mac" if criterion == "elimination" or budget.measured else "uniform"),
        round_to=round_to,
        min_channels=min_channels,
        ignore=globs(ignore, "ignore", model),
        ratios=_ratios(ratios),
        plain_classes=plain_classes,
    )
    given = _Given(stats, gradients, seed, tuple(more_examples))
    if isinstance(data, tuple):
        if repair:
            raise DataError("repair: expected images to repair from, a tensor or a loader; got a tuple of inputs")
        with reporting(progress, "prune"):
            planned, frozen = _planned(model, data, settings, given, _traced(model, data, given))
            flushed = without_subnormals(planned.compact, data)
            difference = max(planned.max_relative_difference, flushed.max_relative_difference)
            notes = planned.unseen + _said(flushed)
            result = Pruned(flushed.model, planned.plan, planned.scores, difference, notes=notes)
            return _timed(frozen, result)
    with reporting(progress, "prune"):
        stage("read the samples")
        seen = gathered(model, data, images, task)
        seen = moved(seen, next((parameter.device for parameter in model.parameters()), torch.device("cpu")))
        return _prune_on(model, seen, settings, given, None if repair is False else repair or RepairSettings())


@dataclass(frozen=True, eq=False)
class _Given:
    """What of a plan's evidence the caller has."""

    stats: ChannelStats | None
    gradients: TaylorTerms | None
    seed: int
    more_examples: tuple[tuple[Any, ...], ...]


def _ratios(given: Mapping[str, float] | None) -> dict[str, float]:
    if given is not None and not isinstance(given, Mapping):
        raise UsageError(
            "ratios: expected shares by globs over module paths, such as {'layer1.*': 0.5}, "
            f"got {type(given).__name__} {given!r}"
        )
    return dict(given or {})


def _prune_on(
    model: nn.Module, images: Any, settings: PruneSettings, given: _Given, repairing: RepairSettings | None
) -> Pruned:
    images = map_tensors(images, pixel_by_pixel)
    example = arguments(model, taken(images, slice(2)))
    _require_running(model, example)
    chart = _traced(model, example, given)
    patches = None
    if "patches" in get_criterion(settings.criterion).needs:
        stage(f"patch statistics of {count_of(images)} samples")
        patches = patch_statistics(model, images, chart, repairing, settings.ignore, log=stage)
    given = replace(given, stats=given.stats or statistics(model, images, settings.criterion))
    planned, frozen = _planned(model, example, settings, given, chart, patches)
    plan, scores, difference = planned.plan, planned.scores, planned.max_relative_difference
    notes = _notes(settings.criterion, given.stats, patches) + planned.unseen
    if repairing is None:
        flushed = without_subnormals(planned.compact, example)
        difference = max(difference, flushed.max_relative_difference)
        result = Pruned(flushed.model, plan, scores, difference, notes=notes + _said(flushed))
        return _timed(frozen, result)
    masked, report = repair_masked(model, plan, images, repairing, log=stage)
    stage("verify: the repaired model and the compact one")
    small = compact(masked, plan)
    proof = verify(masked, small, plan, [arguments(model, taken(images, slice(8)))], strict=True)
    flushed = without_subnormals(small, example)
    difference = max(difference, proof.max_relative_difference, flushed.max_relative_difference)
    notes += report.notes + _said(flushed)
    result = Pruned(flushed.model, plan, scores, difference, masked, report, notes)
    return _timed(frozen, result)


def _require_running(model: nn.Module, example: tuple[Any, ...]) -> None:
    """Checks that a model in half precision runs where it is: a trace does without, what looks at images doesn't.

    Raises:
        ModelError: an operator is not there in half precision.
    """
    kind = next((tensor.dtype for tensor in model.parameters() if tensor.dtype in HALF), None)
    if kind is None:
        return
    try:
        with training_mode(model, False), torch.no_grad():
            model(*map_tensors(example, torch.clone))
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} does not run on the images in {str(kind).removeprefix('torch.')} on "
            f"{next(model.parameters()).device}: {error}; expected a device that has its operators in this precision; "
            "or prune it in full precision, prune(model.float(), images.float(), ...), and call .half() on the result"
        ) from error


def _timed(frozen: Frozen | None, result: Pruned) -> Pruned:
    """The result with what it was measured to take, where a budget is one of time."""
    if frozen is None:
        return result
    found = delivered(frozen, result.model, log=stage)
    return replace(result, delivered=found, notes=result.notes + tuple(found.shortfalls))


def _said(flushed: Flushed) -> tuple[str, ...]:
    return (*flushed.notes, *remarks(flushed.model))


def _notes(criterion: Criterion, stats: ChannelStats | None, patches: PatchStats | None) -> tuple[str, ...]:
    """What to say of the evidence that a criterion looked at."""
    moments = stats.too_few_samples() if stats is not None and "moments" in get_criterion(criterion).needs else ()
    return (*moments, *(() if patches is None else (*too_few_rows(patches), *dead_inputs(patches))))


def _traced(model: nn.Module, example: tuple[Any, ...], given: _Given) -> ChannelMap:
    stage("trace")
    with paused_garbage_collection():
        return trace(model, example, *given.more_examples)


def _planned(
    model: nn.Module,
    example: tuple[Any, ...],
    settings: PruneSettings,
    given: _Given,
    chart: ChannelMap,
    patches: PatchStats | None = None,
) -> tuple[Planned, Frozen | None]:
    """A plan that meets the budgets; with how it was found, where one is of time."""
    goal = goal_for(model, example, chart, settings, more_examples=given.more_examples, log=stage)

    def plan(wanted: PruneSettings, channel_map: ChannelMap) -> Planned:
        stage(f"plan by {wanted.criterion}, and try it")
        return plan_model(
            model,
            example,
            wanted,
            stats=given.stats,
            gradients=given.gradients,
            patches=patches,
            seed=given.seed,
            channel_map=channel_map,
            more_examples=given.more_examples,
            latency=None if goal is None else goal.table,
        )

    if goal is None:
        return plan(settings, chart), None
    frozen = freeze(goal, plan, log=stage)
    return frozen.planned, frozen
