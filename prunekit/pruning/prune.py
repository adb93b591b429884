"""One-shot pruning: `prune` and `plan`, with repair from unlabeled samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack

import torch
from torch import Tensor, nn

from prunekit.channels.cut.narrow_norms import keep_narrow_norms
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.channels.tracing.tracer import HALF
from prunekit.channels.trial.comparison import shortened
from prunekit.compaction.compact_model import compact, remarks
from prunekit.deploy.deployment_transform import without_subnormals
from prunekit.distributed.process_group import require_equal
from prunekit.distributed.shared_work import workers
from prunekit.errors import DataError, ModelError, UsageError, raised_as, require_kind
from prunekit.hooks.model_copy import named_tensors, with_tensors, with_weights
from prunekit.hooks.wrappers import require_trainable, unwrapped
from prunekit.measure.verification import verify
from prunekit.modes.public_call import public_call
from prunekit.planning.keywords import PlanKeywords, prune_settings, shows_keywords
from prunekit.planning.plan import Plan
from prunekit.pruning.plan_search import CriterionInputs, Planned, PlanSearch
from prunekit.pruning.pruned import Pruned
from prunekit.settings.calibration import IMAGES, RepairSettings
from prunekit.settings.pruning import PruneSettings
from prunekit.settings.weight_pattern import PatternSettings
from prunekit.utils.context import is_large, release_memory, training_mode
from prunekit.utils.inputs import as_example, call, inputs_as_example, sample_count, select_samples
from prunekit.utils.outputs import Outputs
from prunekit.utils.progress import reporting, stage
from prunekit.utils.tensors import gather, map_tensors, tensors_digest

if TYPE_CHECKING:
    from prunekit.measure.score_drop import Evaluate, HeldOutScores
    from prunekit.models.vocabulary import Vocabulary
    from prunekit.pruning.collected_statistics import Collected
    from prunekit.repair.repair_report import RepairReport
    from prunekit.statistics.channel_stats import ChannelStats
    from prunekit.statistics.taylor_terms import TaylorTerms
    from prunekit.tasks.task import Task


Calibration: TypeAlias = "Tensor | Mapping[str, Any] | Iterable[Any] | Collected"
"""Samples: tensors that hold all of them, a list of images, a data set, a generator, or a loader; or of `collect`."""


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
    evaluate: Evaluate | None = None,
    held_out: Any = None,
    vocabulary: Vocabulary | Literal["used"] | None = None,
    tokenizer: Any = None,
    remeasure: bool = False,
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
            generator; the first entry, or what `task` unpacks, may be several inputs: a tuple of them, or a mapping.
            Where `forward` requires several, they may come one after the other: (ids, mask, labels). Of a mapping,
            `labels` or `label` are no inputs, and what `forward` does not take is left out. Where it takes an
            `attention_mask`, batches may differ in length, and positions that the mask leaves out count for nothing.
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
        max_drop: how much lower the score may be than the dense model's, such as 0.01 for one point of a score in
            percent, a rise of one percent of a perplexity, or as much in the unit of any other score. The smallest
            model is looked for that keeps to it within the other budgets; the fastest, by prediction, if there is a
            budget of time or a target. Half of the held-out samples choose it, and the others confirm that the drop is
            at most that, at 95 %: see `score`. Without a repair far less can go.
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
        round_to: channel counts become multiples of this where they can. None: of 16 where 128 channels or more are,
            of 8 from 64, of 4 from 32, of 2 from 16 on, for which kernels are fast; 1: any number.
        min_channels: the fewest channels that any group keeps.
        ignore: whose output channels are kept: a glob over module paths, a module (with all that is in it), a class of
            modules, or several of these.
        ratios: share of the output channels to keep, by globs, modules or classes as in `ignore`. Blocks with a module
            in `ignore` or `ratios` stay.
        layout: which widths layers may have. "free": each its own. "equal": the same where layers repeat, as those of a
            transformer do. "huggingface": only what a configuration of the model's class in transformers can say; then
            `result.model.save_pretrained(folder)` writes what plain `from_pretrained` loads. Other channels stay, and
            all blocks. "llama.cpp", "vllm": of these, what that server quantizes, see `PruneSettings.layout`.
        tensor_parallel: with the layout "vllm", the devices that a server splits each layer among.
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
        evaluate: for `max_drop`: a function of the model, in eval mode and without gradients, that returns its score,
            higher if it is better, or better the score of each sample, (N,); or a task or its name, whose main score
            counts, on `held_out`. None: whether class scores say what the dense model says.
        held_out: for `max_drop`: samples apart from the calibration data, in the same forms, with targets where
            `evaluate` is a task. None: up to 4,096 of the calibration data, at least a third, which are kept apart.
        vocabulary: which tokens of a language model stay: "used", those of the calibration data and what a tokenizer
            needs to write any text; or a `Vocabulary`. None: all. Budgets count from the model with all tokens. The
            result's model takes the new ids: `result.vocabulary` translates ids and makes the smaller tokenizer.
        tokenizer: the model's, for `vocabulary="used"`.
        remeasure: for budgets of time: whether networks are timed again whose times in the cache are doubtful, as the
            machine was busy then.
        progress: whether to show stages and bars on stderr; None: on a terminal and in a notebook; elsewhere a line now
            and then, once the call takes longer than half a minute. The logger `prunekit` gets a line for each stage in
            any case.
        removed: the keywords from `macs` to `settings`, and further budgets by name.

    Raises:
        PlanError: the budget cannot be met or removes nothing, or a glob matches no module.
        UsageError: an argument is out of range, neither an example nor calibration data is given, `repair` is asked
            for without the latter, or `evaluate` returns no number, or another one each time.
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

        A budget of the score, for which held-out samples with targets are given:

        >>> x, y = torch.randn(600, 4), torch.randint(2, (600,))
        >>> kept = pk.prune(model, calibration=x, max_drop=0.2, evaluate="image_classification", held_out=(x, y))
        >>> kept.score.most <= 0.2
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
    limit = wanted.budget.max_drop
    if limit is None and (evaluate is not None or held_out is not None):
        raise UsageError("evaluate, held_out: expected them together with max_drop, which they measure; got none")
    with reporting(progress, "prune"):
        if limit is not None:
            from prunekit.pruning.score_budget import ScoreSearch, judged, with_axis

            calibration, task, models = judged(model, calibration, images, held_out, evaluate, task)
            wanted = with_axis(wanted)
        request = Request(
            model, example, calibration, wanted, images, stats, gradients, seed, more_examples, task, outputs, remeasure
        )
        if vocabulary is not None or tokenizer is not None:
            from prunekit.pruning.smaller_vocabulary import with_fewer_tokens

            request, noted = with_fewer_tokens(request, vocabulary, tokenizer)
        fitting = None if calibration is None or repair is False else repair or RepairSettings()
        request.prepare(None if calibration is None else repair or RepairSettings())
        if limit is None:
            planned = request.search.find(request.inputs)
            result = pruned_by(request, planned, fitting)
        else:

            def make(planned: Planned) -> tuple[Pruned, HeldOutScores]:
                found = pruned_by(request, planned, fitting)
                return found, models.score(found.model)

            planned, result, drop = ScoreSearch(request.search, request.inputs, models, limit, make).run()
            result = replace(result, plan=planned.plan, score=drop)
        took = request.search.deliver(planned, result.model)
        result = result if vocabulary is None else noted(result)
        return result if took is None else replace(result, delivered=took, notes=result.notes + tuple(took.shortfalls))


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
        request.prepare(channel_map=channel_map)
        found = request.search.find(request.inputs).plan
        return found if wanted.pattern is None else _masked_plan(request, found, wanted.pattern)


def pruned_by(request: Request, planned: Planned, fitting: RepairSettings | None) -> Pruned:
    """Return the result of a plan, with kept weights fitted to the samples where settings of a repair are given."""
    if request.settings.pattern is not None:
        return _with_zeros(request, planned, request.settings.pattern, fitting)
    if fitting is None:
        return _result(request, planned, planned.compact)
    if is_large(request.model):
        planned.compact.to("meta")  # it is made again of the repaired weights, and would take memory until then
    return _repaired(request, planned, fitting)


def _result(
    request: Request,
    planned: Planned,
    small: nn.Module,
    difference: float = 0.0,
    masked: nn.Module | None = None,
    report: RepairReport | None = None,
    notes: tuple[str, ...] = (),
) -> Pruned:
    """Return the result with a compact model, which differs from the masked one by `difference` beside the trial's."""
    flushed = without_subnormals(small, request.search.examples[0])
    state = planned.plan.channel_map.state
    kept = state.in_words(request.model) if state else ""
    doubt = "" if request.inputs.check is None else request.inputs.check.note
    found = (*request.notes, doubt, *planned.notes, *notes, *flushed.notes, kept, *remarks(flushed.model))
    said = tuple(filter(None, found))
    most = max(planned.max_relative_difference, difference, flushed.max_relative_difference)
    return Pruned(flushed.model, planned.plan, planned.scores, most, masked, report, said)


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
    result = _result(request, planned, small, proof.max_relative_difference, masked, report, notes)
    keep_narrow_norms(masked, planned.plan.channel_map, planned.plan.keep)
    return result


def _with_zeros(
    request: Request, planned: Planned, pattern: PatternSettings, repairing: RepairSettings | None
) -> Pruned:
    """Return the result with zeros among the weights that the plan's channels leave, and fitted where asked for."""
    from prunekit.pruning.pattern_zeros import zeros_by_size, zeros_from_samples

    model, report = request.model, None
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
    notes = (*layers.notes(), *(() if report is None else report.notes))
    proving = [request.search.examples[0]] if request.samples is None else request.proof_examples()
    return _verified(request, replace(planned, plan=plan), masked, proving, report, notes)


def _masked_plan(request: Request, plan: Plan, pattern: PatternSettings) -> Plan:
    """Return a plan with masks of single weights."""
    from prunekit.pruning.pattern_zeros import zeros_by_size, zeros_from_samples

    if request.samples is None:
        return zeros_by_size(request.model, plan, request.search.examples[0], pattern)[0]
    return zeros_from_samples(request.model, plan, request.samples, pattern, RepairSettings(), log=stage).plan


@dataclass(eq=False)
class Request:
    """The arguments of `prune`, `plan` or `Pruner`, and what `prepare` makes of them."""

    model: nn.Module
    example: Any
    calibration: Calibration | None
    settings: PruneSettings
    images: int
    stats: ChannelStats | None
    gradients: TaylorTerms | None
    seed: int
    more_examples: Sequence[Any]
    task: Task | str | None
    outputs: Outputs | None = None
    remeasure: bool = False
    samples: Any = field(default=None, init=False)  # of the calibration data, on the model's device; None without them
    search: PlanSearch = field(init=False)  # for the plan
    inputs: CriterionInputs = field(init=False)  # what the criterion reads
    notes: tuple[str, ...] = field(default=(), init=False)  # what the calibration was short of

    def prepare(self, repair: RepairSettings | None = None, channel_map: ChannelMap | None = None) -> None:
        """Read the samples, trace the model, and collect what the criterion needs."""
        self._require_kinds()
        collected = None if self.calibration is None else self._read_samples()
        if collected is not None:
            channel_map = channel_map or collected.channel_map
        example = self._example()
        more = tuple(as_example(self.model, one) for one in self.more_examples)
        if self.settings.budget.measured and workers() > 1:
            raise UsageError(
                "budget: expected none of time in sharing_work, as each process would measure its own; give another "
                "one, or start `prunekit prune` by torchrun, of which the first process measures alone"
            )
        if workers() > 1:
            require_equal(tensors_digest(named_tensors(self.model)), "the model's weights")
            require_equal(tensors_digest(("", one) for one in gather(self.samples)), "the calibration samples")
        if self.samples is not None:
            _require_running(self.model, self.first_samples(2))
        if channel_map is None:
            stage("trace")
        search = PlanSearch.trace(
            self.model,
            example,
            self.settings,
            more_examples=more,
            channel_map=channel_map,
            outputs=self.outputs,
            log_plans=True,
        )
        release_memory(self.model)
        patches = None if collected is None else collected.patches
        self.inputs = CriterionInputs(self.stats, self.gradients, patches, self.seed)
        if self.samples is not None and not self.settings.channels_stay:
            from prunekit.pruning.sample_statistics import evidence_of_samples

            self.inputs, self.notes = evidence_of_samples(
                self.model, self.samples, search.channel_map, self.settings, repair, self.inputs
            )
        release_memory(self.model)
        if self.settings.budget.measured:
            from prunekit.pruning.latency_budget_search import with_profile  # with all runtimes

            search = with_profile(search, again=self.remeasure)
        self.search = search

    def _require_kinds(self) -> None:
        """Raise if statistics or further examples are of another kind than was asked for."""
        if self.stats is not None or self.gradients is not None:
            from prunekit.statistics.channel_stats import ChannelStats
            from prunekit.statistics.taylor_terms import TaylorTerms

            require_kind(
                "stats", self.stats, ChannelStats, "channel statistics, from prunekit.calibrate(model, loader)"
            )
            made = "gradients of a loss, from prunekit.collect_gradients(model, loader, loss=...)"
            require_kind("gradients", self.gradients, TaylorTerms, made)
        require_kind("more_examples", self.more_examples, (list, tuple), "a list of examples, such as [x, y]")

    def _read_samples(self) -> Collected | None:
        """Take the samples from the calibration data; return what `collect` found, if that was given."""
        from prunekit.pruning.collected_statistics import Collected

        if not isinstance(self.calibration, Collected):
            from prunekit.pruning.sample_statistics import samples_for

            stage("read the samples")
            self.samples = samples_for(self.model, self.calibration, self.images, self.task)
            return None
        self.calibration.require_unchanged(self.model)
        given = {"example": self.example, "more_examples": self.more_examples, "outputs": self.outputs}
        for name, value in given.items():
            if value is not None and len(value if isinstance(value, (list, tuple)) else (0,)):
                raise UsageError(f"{name}: the model was traced by collect; give {name} to none, or outputs to collect")
        self.samples = self.calibration.samples
        return self.calibration

    def first_samples(self, count: int) -> tuple[Any, ...]:
        """Return the first samples as one batch, as the model takes it."""
        return inputs_as_example(self.model, select_samples(self.samples, slice(count)))

    def proof_examples(self) -> list[tuple[Any, ...]]:
        """Return the first samples, on which the result is compared: a few at a time for a large model."""
        each, count = 2 if is_large(self.model) else 8, min(8, sample_count(self.samples))
        whole = self.first_samples(count)
        short = shortened(self.model, self.search.channel_map, whole, self.search.examples[0])
        if short is not whole:  # all samples in part, and two as they are
            return [short, self.first_samples(min(2, count))]
        parts = (select_samples(self.samples, slice(start, start + each)) for start in range(0, count, each))
        return [inputs_as_example(self.model, part) for part in parts]

    def _example(self) -> tuple[Any, ...]:
        if self.example is None and self.samples is None:
            raise UsageError(
                "expected an example to trace, as in prune(model, x, macs=0.5), or samples to calibrate on, as in "
                "prune(model, calibration=loader, macs=0.5); got neither"
            )
        if self.example is None:
            return as_example(self.model, self.first_samples(2))  # they may have been made in inference mode
        try:
            return as_example(self.model, self.example)
        except ModelError:
            raise
        except UsageError as error:
            raise UsageError(
                f"{error}; samples to calibrate on are given by name: prune(model, calibration=data, macs=0.5)"
            ) from None


def _require_running(model: nn.Module, example: tuple[Any, ...]) -> None:
    """Raise if a model in half precision cannot run on its device, which tracing it does not need."""
    kind = next((tensor.dtype for tensor in model.parameters() if tensor.dtype in HALF), None)
    if kind is None:
        return
    kind_name, device = str(kind).removeprefix("torch."), next(model.parameters()).device
    failed = f"{type(model).__name__} does not run on the images in {kind_name} on {device}: "
    advice = (
        "; expected a device that has its operators in this precision; or prune it in full precision, "
        "prune(model.float(), calibration=images.float(), ...), and call .half() on the result"
    )
    with raised_as(ModelError, failed, advice, str), training_mode(model, False), torch.no_grad():
        call(model, map_tensors(example, torch.clone))
