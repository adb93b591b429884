"""One-shot pruning: `prune` and `plan`, with repair from unlabeled samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Unpack

from torch import nn

from prunekit.channels.cut.narrow_norms import keep_narrow_norms
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.compaction.compact_model import compact, remarks
from prunekit.deploy.deployment_transform import FlushedModel, without_subnormals
from prunekit.errors import DataError, require_kind
from prunekit.hooks.model_copy import named_tensors, with_tensors, with_weights
from prunekit.hooks.wrappers import require_trainable, unwrapped
from prunekit.measure.verification import verify
from prunekit.modes.public_call import public_call
from prunekit.planning.keywords import PlanKeywords, prune_settings, shows_keywords
from prunekit.planning.plan import Plan
from prunekit.pruning.plan_search import Planned
from prunekit.pruning.prune_request import Calibration, Request
from prunekit.pruning.pruned import Pruned
from prunekit.settings.calibration import IMAGES, RepairSettings
from prunekit.settings.weight_pattern import PatternSettings
from prunekit.utils.context import is_large, release_memory
from prunekit.utils.inputs import sample_count
from prunekit.utils.outputs import Outputs
from prunekit.utils.progress import reporting, stage

if TYPE_CHECKING:
    from prunekit.repair.repair_report import RepairReport
    from prunekit.statistics.channel_stats import ChannelStats
    from prunekit.statistics.taylor_terms import TaylorTerms
    from prunekit.tasks.task import Task


@public_call
@shows_keywords(PlanKeywords)
def prune(
    model: nn.Module,
    example: Any = None,
    *,
    calibration: Calibration | None = None,
    repair: RepairSettings | Literal[False] | None = None,
    images: int = IMAGES,
    stats: ChannelStats | None = None,
    gradients: TaylorTerms | None = None,
    seed: int = 0,
    more_examples: Sequence[Any] = (),
    outputs: Outputs | None = None,
    task: Task | str | None = None,
    progress: bool | None = None,
    **removed: Unpack[PlanKeywords],
) -> Pruned:
    """Prune a model in one call: trace, score, plan, trial, compact; with calibration data also repair.

    Given an example alone, the filters of least norm are removed (`criterion="l2"`), and nothing is fitted again. Given
    calibration data, which needs no labels, channels are removed in the order of an optimal brain surgeon on the
    patches that their consumers read, where the error is least for each multiply-accumulate saved
    (`criterion="elimination"`, `scope="per_mac"`), and the kept weights are fitted to the outputs of the dense model.
    All other criteria have `scope="uniform"` by default, except for budgets of time, which are spent where they cost
    least.

    Args:
        model: any module that runs on the example; not changed.
        example: what the model is called with: a tensor, such as `torch.randn(1, 3, 224, 224)`, a tuple of positional
            arguments, a mapping of arguments by name, or a list of images (C, H, W). May be left out where
            `calibration` is given; with both, this is what is traced.
        calibration: samples, preprocessed as the model wants them: a tensor (B, ...), a tuple of all tensors that
            `forward` requires, or a mapping of tensors by the names of its arguments; a map-style data set; or a
            loader, any iterable of batches, tensors or such mappings or (inputs, ...) each, such as a DataLoader or a
            generator; the first entry, or what `task` unpacks, may be several inputs: a tuple of them, or a mapping. Of
            a mapping, `labels` or `label` are no inputs, and what `forward` does not take is left out. Where it takes
            an `attention_mask`, batches may differ in length, and positions that the mask leaves out count for nothing.
            Images (C, H, W) may come one by one, as a list, or in batches that are lists or tuples of them, alone or
            with targets; of any sizes where the model takes a list, as torchvision's detectors do. Batches of
            ultralytics' loaders are taken as they are, and their uint8 images scaled to 0..1. An iterable data set may
            yield samples or batches. Or what `collect` found, if several budgets are tried.
        macs: share of the multiply-accumulates that may be left, above 0 and at most 1.
        channels: share of the channels that may be left.
        params: share of the parameters that may be left.
        size_mb: megabytes (10^6 bytes) that parameters and buffers may take in a file.
        latency_ms: median milliseconds of one forward pass of the batch that the target names, measured.
        speedup: how many times faster than the dense model it is to be on the target, measured.
        memory_mb: megabytes alive at the peak of a forward pass, see `BudgetSettings`. At least one budget or a
            pattern is given, and all that are hold; `plan.provenance` says what is left of each, and which binds.
        pattern: of zeros among single weights, in what the budgets leave; without a budget all channels stay.
            `unstructured`, `2:4` or another `N:M`, `kernel`, or `PatternSettings`, which also say how zeros are chosen
            and which layers have them. With calibration data they are chosen where they add the least error, and the
            kept weights are fitted; without, the smallest weights go.
        sparsity: share of zeros, for patterns that do not say it; alone it stands for `unstructured`.
        target: runtime, device, batch, threads, dtype and memory format for budgets of time and memory; None: float32
            in eager on one CPU thread. The model is profiled there, and plans are made and measured until the time is
            within 3 % of the budget; the final model is measured last, see `delivered`. All this ends after
            `Target.limit_s` seconds of measuring, with what was measured by then, marked unstable.
        criterion: as `prunekit list criteria` shows them, each with what it needs. What samples can give is collected
            from them; gradients need labels, and are given.
        scope: `uniform`, the same share of every group; `global`, ranked over all of them; `per_mac`, ranked by score
            for each multiply-accumulate, or whatever else the budget counts; or `capacity`, the widest layers that
            the budget allows, where scores only rank the channels of a group.
        round_to: channel counts become multiples of this where they can.
        min_channels: the fewest channels that any group keeps.
        ignore: whose output channels are kept: a glob over module paths, a module (with all that is in it), a class of
            modules, or several of these.
        ratios: share of the output channels to keep, by globs, modules or classes as in `ignore`. Blocks with a module
            in `ignore` or `ratios` stay.
        layout: which widths layers may have. "free": each its own. "equal": the same where layers repeat, as those of a
            transformer do. "huggingface": only what a configuration of the model's class in transformers can say; then
            `result.model.save_pretrained(folder)` writes what plain `from_pretrained` loads. Other channels stay, and
            all blocks.
        depth: whether blocks may go as a whole, beside channels. A block is a residual branch: layers whose result is
            added to the stream that they read; what is left of it is a constant, one number for each channel, and none
            of its layers runs. Or it is a part of a concatenation, such as a layer of a DenseNet, of which nothing is
            left. True: widths and blocks are chosen together; "auto": so for budgets of time in scopes `per_mac` and
            `global`, else only where widths alone cannot meet the budget; False: all stay.
            `print(prunekit.trace(model, example))` lists the blocks, and those that stay with the reason; `Plan.gone`
            are those that went.
        min_blocks: the fewest blocks that stay of each stage, as `layer1` is one with the blocks `layer1.0` and
            `layer1.1`, of those that may go.
        plain_classes: whether all modules keep their classes, and channels whose removal needs another are kept, as
            are all blocks; so a file of `torch.save(model)` can be loaded where prunekit is not installed. `notes`
            names other classes.
        settings: budgets, target and all of the above in one object, in place of these keywords.
        repair: what is fitted again and how; None: `RepairSettings()` if calibration data is given; False: nothing.
        images: how many samples are taken from a loader or a data set; at least 8.
        stats: from `prunekit.calibrate`.
        gradients: from `prunekit.collect_gradients`.
        seed: of the random criterion.
        more_examples: further examples, for branches of the model that the first does not take.
        outputs: which of the model's outputs are read, and so keep their sizes: names or positions, such as "logits",
            0 or "1.boxes", several of them, or a function of the output; None: all, except what the model returns to
            be given again, such as cached keys and values. Others may become narrower.
        task: whose `unpack` takes batches in another form apart; itself or its name.
        progress: whether to show stages and bars on stderr; None: on a terminal and in a notebook; elsewhere a line now
            and then, once the call takes longer than half a minute. The logger `prunekit` gets a line for each stage in
            any case.
        removed: the keywords from `macs` to `settings`, and further budgets by name.

    Raises:
        PlanError: the budget cannot be met or removes nothing, or a glob matches no module.
        UsageError: an argument is out of range, neither an example nor calibration data is given, or `repair` is asked
            for without the latter.
        DataError: fewer than 8 samples, or no tensors, or the task cannot unpack a batch; a `UsageError`.
        NonFiniteError: a layer reads or computes NaN or Inf on the samples; names the layer.
        VerificationError: masked and compact model differ.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> pk.prune(model, torch.randn(1, 4), macs=0.5).model[0].out_features
        8
        >>> refitted = pk.prune(model, calibration=torch.randn(64, 4), macs=0.5)
        >>> refitted.repair.after <= refitted.repair.before
        True

        Blocks go as a whole where channels alone cannot meet the budget, as where each group keeps eight of sixteen:

        >>> class Block(torch.nn.Sequential):
        ...     def forward(self, x):
        ...         return x + super().forward(x)
        >>> blocks = [Block(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)) for _ in range(4)]
        >>> deep = torch.nn.Sequential(*blocks)
        >>> shorter = pk.prune(deep, torch.randn(1, 8), macs=0.2, min_channels=8, depth=True)
        >>> shorter.plan.totals()["blocks"], len(shorter.plan.gone)
        ((4, 1), 3)
    """
    model = with_weights(unwrapped(model, offloaded=True))
    require_trainable(model, "prune")
    wanted = prune_settings(model, calibration is not None, **removed)
    if repair and calibration is None:
        raise DataError(
            "repair: expected samples to repair from, got none: prune(model, calibration=images, repair=...)"
        )
    if repair is not False:
        require_kind("repair", repair, RepairSettings, "prunekit.RepairSettings(), or False for none")
    request = Request(model, example, calibration, wanted, images, stats, gradients, seed, more_examples, task, outputs)
    with reporting(progress, "prune"):
        planned = request.find_plan(None if calibration is None else repair or RepairSettings())
        if wanted.pattern is not None:
            fitting = None if repair is False else repair or RepairSettings()
            return _timed(request, planned, _with_zeros(request, planned, wanted.pattern, fitting))
        if calibration is None or repair is False:
            return _timed(request, planned, _as_planned(request, planned))
        if is_large(request.model):
            planned.compact.to("meta")  # it is made again of the repaired weights, and would take memory until then
        return _timed(request, planned, _repaired(request, planned, repair or RepairSettings()))


@public_call
@shows_keywords(PlanKeywords)
def plan(
    model: nn.Module,
    example: Any = None,
    *,
    calibration: Calibration | None = None,
    images: int = IMAGES,
    stats: ChannelStats | None = None,
    gradients: TaylorTerms | None = None,
    seed: int = 0,
    more_examples: Sequence[Any] = (),
    outputs: Outputs | None = None,
    channel_map: ChannelMap | None = None,
    task: Task | str | None = None,
    progress: bool | None = None,
    **removed: Unpack[PlanKeywords],
) -> Plan:
    """Decide which channels of a model are kept: trace, score, plan, and try the plan until masked == compact.

    `masked`, `compact`, `transfer` and `verify` work with the plan; `prune` goes on to the compact model itself.

    Args:
        model: any module that runs on the example; not changed.
        example: what the model is called with: a tensor, a tuple of positional arguments, or a mapping of arguments by
            name. May be left out if `calibration` is given.
        calibration: samples as for `prune`, for what the criterion reads; without them it reads the weights, or
            `stats` and `gradients`.
        images, stats, gradients, seed, more_examples, outputs, task, progress: as for `prune`.
        channel_map: of this model, if it was traced already, on the same examples in the same order.
        removed: what may go: budgets, criterion, scope, limits and patterns, all as for `prune`; or `settings`.

    Raises:
        PlanError: the budget cannot be met or removes nothing, a glob matches no module, or the channel map is that of
            another model.
        UsageError: an argument is out of range, neither an example nor calibration data is given, or the channel map
            was traced on more examples.
        DataError: fewer than 8 samples, or no tensors, or the task cannot unpack a batch; a `UsageError`.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> plan = pk.plan(model, torch.randn(1, 4), macs=0.5)
        >>> pk.compact(model, plan)[0].out_features
        8
    """
    model = with_weights(unwrapped(model, offloaded=True))
    require_trainable(model, "plan")
    wanted = prune_settings(model, calibration is not None, **removed)
    request = Request(model, example, calibration, wanted, images, stats, gradients, seed, more_examples, task, outputs)
    with reporting(progress, "plan"):
        found = request.find_plan(channel_map=channel_map).plan
        return found if wanted.pattern is None else _masked_plan(request, found, wanted.pattern)


def _as_planned(request: Request, planned: Planned) -> Pruned:
    """Return the result without a repair: the compact model of the trial."""
    flushed = without_subnormals(planned.compact, request.search.examples[0])
    difference = max(planned.max_relative_difference, flushed.max_relative_difference)
    notes = request.notes + planned.notes + _said(request, planned, flushed)
    return Pruned(flushed.model, planned.plan, planned.scores, difference, notes=notes)


def _repaired(request: Request, planned: Planned, repairing: RepairSettings) -> Pruned:
    """Return the result with the kept weights fitted to the outputs of the dense model on the samples."""
    from prunekit.repair.repair_model import repair as repair_masked

    masked, report = repair_masked(request.model, planned.plan, request.samples, repairing, log=stage)
    release_memory(request.model)
    stage("verify: the repaired model and the compact one")
    return _verified(request, planned, masked, request.proof_examples(), report, report.notes)


def _verified(
    request: Request,
    planned: Planned,
    masked: nn.Module,
    examples: list[tuple[Any, ...]],
    report: RepairReport | None,
    notes: tuple[str, ...],
) -> Pruned:
    """Return the result of a masked model whose weights are not those of the trial: compacted, and proven again."""
    small = compact(masked, planned.plan)
    proof = verify(masked, small, planned.plan, examples, strict=True)
    flushed = without_subnormals(small, request.search.examples[0])
    difference = max(planned.max_relative_difference, proof.max_relative_difference, flushed.max_relative_difference)
    said = (*request.notes, *planned.notes, *notes, *_said(request, planned, flushed))
    keep_narrow_norms(masked, planned.plan.channel_map, planned.plan.keep)
    return Pruned(flushed.model, planned.plan, planned.scores, difference, masked, report, said)


def _with_zeros(
    request: Request, planned: Planned, pattern: PatternSettings, repairing: RepairSettings | None
) -> Pruned:
    """Return the result with zeros among the weights that the plan's channels leave, and fitted where asked for."""
    from prunekit.pruning.pattern_zeros import with_best_order, zeros_by_size, zeros_from_samples

    report = None
    few = request.search.examples[0] if request.samples is None else request.first_samples(8)
    model, order = with_best_order(request.model, planned.plan, few, pattern)
    if request.samples is None:
        stage(f"pattern {pattern.in_words}: the smallest weights")
        plan, layers = zeros_by_size(model, planned.plan, request.search.examples[0], pattern)
        masked = with_tensors(model, {name: tensor.detach().clone() for name, tensor in named_tensors(model)})
        plan.zero(masked)
    else:
        stage(f"pattern {pattern.in_words}: from {sample_count(request.samples)} samples")
        found = zeros_from_samples(model, planned.plan, request.samples, pattern, repairing, log=stage)
        masked, plan, layers, report = found.model, found.plan, found.layers, found.report
    stage("verify: the masked model and the compact one")
    notes = (*layers.notes(), *filter(None, [order]), *(() if report is None else report.notes))
    proving = [few] if request.samples is None else request.proof_examples()
    return _verified(request, replace(planned, plan=plan), masked, proving, report, notes)


def _masked_plan(request: Request, plan: Plan, pattern: PatternSettings) -> Plan:
    """Return a plan with masks of single weights."""
    from prunekit.pruning.pattern_zeros import zeros_by_size, zeros_from_samples

    if request.samples is None:
        return zeros_by_size(request.model, plan, request.search.examples[0], pattern)[0]
    return zeros_from_samples(request.model, plan, request.samples, pattern, RepairSettings(), log=stage).plan


def _timed(request: Request, planned: Planned, result: Pruned) -> Pruned:
    """Return the result with its measured time, if a budget is one of time."""
    took = request.search.deliver(planned, result.model)
    return result if took is None else replace(result, delivered=took, notes=result.notes + tuple(took.shortfalls))


def _said(request: Request, planned: Planned, flushed: FlushedModel) -> tuple[str, ...]:
    state = planned.plan.channel_map.state
    words = state.in_words(request.model) if state else ""
    return (*flushed.notes, *filter(None, [words]), *remarks(flushed.model))
