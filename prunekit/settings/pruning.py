"""Settings of pruning: budgets and what their figures mean, criterion, scope, target and schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le

from prunekit.errors import UsageError, share_meant
from prunekit.known_names import BUDGETS, CRITERIA, PositiveInt
from prunekit.settings.deployment import Target
from prunekit.settings.validation import Checked
from prunekit.settings.weight_pattern import PatternSettings
from prunekit.utils import display as numbers
from prunekit.utils.registry import Registered, RegisteredKeys
from prunekit.utils.user_code import ForbiddenReference, is_reference

Share = Annotated[float, Gt(0), Le(1)]
Times = Annotated[float, Gt(1)]
Amount = Annotated[float, Gt(0)]
NS_PER_MS = 1e6


@dataclass(frozen=True)
class BudgetFacts:
    """Properties of a budget, which are the arguments of `prunekit.register_budget`."""

    name: str
    about: str = ""
    unit: str = ""
    figure: str = ""
    share: bool = False
    least: bool = False
    measured: bool = False
    per_unit: float = 1.0
    peak: bool = False
    each_group: bool = False
    counted_as: str = ""
    found_as: str = ""

    @property
    def annotation(self) -> Any:
        """Type and bounds of the figures."""
        if self.share:
            return Times if self.least else Share
        return Amount

    def problem(self, value: object) -> str | None:
        """Return what is wrong with a figure, as "expected ..., got ..."; None if nothing is."""
        above, most = int(self.share and self.least), 1 if self.share and not self.least else math.inf
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and above < value <= most and value < math.inf:  # type: ignore[operator]
            return None
        if self.share and not self.least:
            return f"expected a share above {above} and at most {most}, got {value!r}{share_meant(value)}"
        figure = self.figure or f"number of {self.unit}".removesuffix(" of ")
        return f"expected a {figure} above {above}, got {value!r}"

    def as_cost(self, value: float) -> float:
        """Return the limited amount of a figure, of which less is better, or the figure of an amount."""
        if not self.least:
            return float(value)
        return 1 / value if value else math.inf  # a model of blocks alone, all of them gone, takes no time

    def in_words(self, value: float) -> str:
        """Return a figure with its unit."""
        gap = " " if self.unit and not self.share else ""
        return f"{value:.4g}{gap}{self.unit}"

    def shown(self, value: float, places: int = 1) -> str:
        """Return a figure as tables and reports show it: rounded, a share in percent, bytes with a prefix."""
        if self.share:
            return numbers.factor(value) if self.least else numbers.share(value, places)
        return numbers.size(1e6 * value) if self.unit == "MB" else f"{numbers.digits(value)} {self.unit}".rstrip()

    def asked(self, value: float) -> str:
        """Return the budget and its limit as tables and reports show them, e.g. "MACs 50.0 %"."""
        return f"{numbers.resource(self.name)} {self.shown(value)}"

    @property
    def limit(self) -> str:
        """Whether the figure is a minimum or a maximum, in words."""
        return "at least" if self.least else "at most"

    def left_of(self, value: float, dense: float) -> float:
        """Return the share of the dense model that a figure leaves, given the dense model's figure."""
        return dense / value if self.least else value / dense

    def loosened(self, value: float, times: float) -> float:
        """Return the figure that allows a multiple of what this one allows."""
        return value / times if self.least else value * times

    def excess(self, asked: float, ms: float, speedup: float) -> float:
        """Return the time of a measured model over the time that was asked for; for budgets of time."""
        if self.share:
            found = speedup if self.least else 1 / speedup
        else:
            found = self.as_cost(ms / (self.per_unit / NS_PER_MS))
        return asked / found if self.least else found / asked


def facts_of(name: str) -> BudgetFacts:
    """Return the facts of a budget; of a built-in one without importing it."""
    declared = BUDGETS.declared.get(name)
    if declared is not None:
        return BudgetFacts(name, **declared.facts)
    found: BudgetFacts = BUDGETS.get(name).facts
    return found


def facts_without_code(name: str) -> BudgetFacts:
    """Return the facts of a budget without running user code: of `file.py:object` only that figures are above 0."""
    return BudgetFacts(name) if is_reference(name) else facts_of(name)


NOTED = ("unit", "share", "least", "measured")


def noted_facts(facts: BudgetFacts) -> dict[str, Any]:
    """Return the facts that a plan stores of a budget, for readers that do not have it; none of a built-in one."""
    return {} if facts.name in BUDGETS.declared else {key: getattr(facts, key) for key in NOTED}


def facts_from(name: str, note: Mapping[str, Any]) -> BudgetFacts:
    """Return the facts of a plan's budget, from what the plan stores, without running user code."""
    if name in BUDGETS.declared:
        return facts_of(name)
    return BudgetFacts(name, **{key: note[key] for key in NOTED if key in note})


CriterionName = Annotated[str, Registered(CRITERIA)]
"""A name in `prunekit list criteria`, or `file.py:function`."""
Scope = Literal["uniform", "global", "per_mac", "capacity"]
"""`capacity` maximizes the mean logarithm of the share of MACs that layers keep: after long training, widths matter
more than initial weights (Rethinking the Value of Network Pruning, Liu et al. 2019)."""

OtherBudgets = Annotated[dict[str, float], RegisteredKeys(BUDGETS, lambda name: facts_without_code(name).annotation)]


@dataclass(frozen=True, init=False)
class BudgetSettings:
    """Budgets: what may be left. At least one is given, and a plan meets all of them.

    Other registered budgets are keywords as well, and keys of the same mapping in a recipe:
    `BudgetSettings(macs=0.5, energy=0.4)`. A budget in a file is `BudgetSettings(**{"mine.py:energy": 0.4})`.

    Raises:
        UsageError: no budget has such a name, or a figure is out of range.

    Example:
        >>> import prunekit as pk
        >>> pk.BudgetSettings(macs=0.5, size_mb=10).given
        {'macs': 0.5, 'size_mb': 10}
        >>> pk.BudgetSettings(macs=50)
        Traceback (most recent call last):
        prunekit.errors.UsageError: macs: expected a share above 0 and at most 1, got 50; did you mean 0.5?
    """

    channels: Share | None = None
    """Share of the channels that are not locked."""
    macs: Share | None = None
    """Share of the multiply-accumulates of one sample in eval mode, without auxiliary heads that only run in train mode
    or that the model's `fuse()` removes."""
    params: Share | None = None
    """Share of the parameters."""
    size_mb: Amount | None = None
    """Bytes of all parameters and buffers as saved, in units of 10^6."""
    latency_ms: Amount | None = None
    """Median time of one forward pass of the batch, measured on the target."""
    speedup: Times | None = None
    """Speed over the dense model's, measured beside it on the target."""
    memory_mb: Amount | None = None
    """Peak bytes of a forward pass of the target's batch, in units of 10^6: parameters, buffers, inputs and results of
    operators, in the target's dtype, as eager makes and frees them."""
    max_drop: Amount | None = None
    """How much lower the score may be than the dense model's, on held-out samples: 0.01 is one point of a score in
    percent, a rise of 1 % of a perplexity, or 0.01 in the unit of any other score. The smallest model is looked for,
    with a target the fastest. With `quantize` it is the score of the int8 file, of the first such format in `export`.
    Fine-tuning comes after it."""
    others: OtherBudgets = field(default_factory=dict)
    """Further registered budgets by name."""

    def __init__(
        self,
        channels: float | None = None,
        macs: float | None = None,
        params: float | None = None,
        size_mb: float | None = None,
        latency_ms: float | None = None,
        speedup: float | None = None,
        memory_mb: float | None = None,
        max_drop: float | None = None,
        others: Any = None,  # `dataclasses.replace` passes it
        **more: float | None,
    ) -> None:
        values = {
            "channels": channels,
            "macs": macs,
            "params": params,
            "size_mb": size_mb,
            "latency_ms": latency_ms,
            "speedup": speedup,
            "memory_mb": memory_mb,
            "max_drop": max_drop,
            "others": {name: value for name, value in {**(others or {}), **more}.items() if value is not None},
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        # files are looked up where they are used
        names = [name for name in self.others if not is_reference(name)]
        if unknown := [text for name in names if (text := BUDGETS.problem(name)) is not None]:
            raise UsageError("; ".join(f"budget: {text}" for text in unknown))
        if problems := self.problems():
            raise UsageError("; ".join(problems))

    @property
    def given(self) -> dict[str, float]:
        """The given budgets of what is left and their figures, by name; `max_drop` is none of them."""
        own = {name: getattr(self, name) for name in OWN_BUDGETS}
        return {name: value for name, value in own.items() if value is not None} | self.others

    @property
    def asked_for(self) -> dict[str, float]:
        """The given budgets that somebody asked for: those of `WITHOUT_EFFECT` only narrow models."""
        return {name: value for name, value in self.given.items() if WITHOUT_EFFECT.get(name) != value}

    def changed(self, **figures: float | None) -> BudgetSettings:
        """Return settings with other figures and without `max_drop`; None removes a budget."""
        return BudgetSettings(**(self.given | figures))

    @property
    def measured(self) -> bool:
        """True if any budget is one of time."""
        return any(facts_of(name).measured for name in self.given)

    def problems(self, facts: Callable[[str], BudgetFacts] = facts_without_code) -> list[str]:
        """Return what is wrong with the figures, a sentence each.

        Args:
            facts: returns the facts of a budget; `facts_of` runs user code, and so knows the bounds of its budgets.
        """
        found = ((name, facts(name).problem(value)) for name, value in self.given.items())
        problems = [f"{name}: {text}" for name, text in found if text is not None]
        drop = None if self.max_drop is None else BudgetFacts("max_drop").problem(self.max_drop)
        return problems if drop is None else [*problems, f"max_drop: {drop}"]

    def require_sound(self) -> None:
        """Check the figures of all budgets; user code is run if it is allowed.

        Raises:
            UsageError: one is out of range.
        """
        if problems := self.problems(
            lambda name: (facts_without_code if isinstance(name, ForbiddenReference) else facts_of)(name)
        ):
            raise UsageError("; ".join(problems))


WITHOUT_EFFECT = {"macs": 0.98, "speedup": 1 / 0.98}
"""Budgets by which a score or a frontier narrows models, where they are not asked for: no text shows them."""
OWN_BUDGETS = tuple(one.name for one in fields(BudgetSettings) if one.name not in ("max_drop", "others"))
"""Budgets of what is left that are fields of `BudgetSettings`."""


Layout = Literal["free", "equal", "huggingface", "llama.cpp", "vllm"]
SERVERS: Mapping[str, tuple[int, int]] = {"llama.cpp": (32, 256), "vllm": (16, 128)}
"""By layout of a server, the entries of a block in which it stores a row of a matrix: of the smaller, and the larger.

llama.cpp has blocks of 32 (Q8_0, Q4_0) and 256 (Q4_K and other K-quants), and stores rows of another number in float16,
or in the smaller blocks (`tensor_type_fallback` in llama-quant.cpp). vLLM's kernels for FP8 take multiples of 16, those
for GPTQ and AWQ of 128 (`GPTQ_MARLIN_MIN_THREAD_K` in marlin_utils.py).
"""
NEARER: tuple[Layout, ...] = ("huggingface", "equal", "free")
"""Layouts of no server, each with fewer conditions than the one before."""
Depth = bool | Literal["auto"]
ScheduleKind = Literal["oneshot", "iterative", "linear", "exponential", "cubic"]
ScheduleUnit = Literal["epoch", "step"]
ScheduleScore = Literal["criterion", "movement"]
ScheduleGradients = Literal["masked", "straight_through"]
MASKED_DECAY = 2e-4
"""Decay of masked weights by default, as in Zhou et al. 2021."""


@dataclass(frozen=True)
class ScheduleSettings(Checked):
    """A schedule: how much is pruned when, while the masked model is fine-tuned.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> settings = pk.ScheduleSettings("linear", rounds=4)
        >>> pruner = pk.Pruner(model, optimizer, x, macs=0.5, steps=8, schedule=settings)
        >>> for _ in range(8):
        ...     model(x).square().mean().backward()
        ...     optimizer.step()
        ...     pruner.step()
        >>> print(pruner)
        final plan, MACs 50.0 % left
        <BLANKLINE>
        pruning steps so far
          step  pruned  came back  MACs left
          2          2          0     87.5 %
          4          2          0     75.0 %
          6          2          0     62.5 %
          8          2          0     50.0 %
    """

    kind: ScheduleKind = "cubic"
    """Growth of the pruned share. `oneshot`: all at once. `iterative`: rounds of pruning and recovery, each keeping the
    same share of the rest (Han et al. 2015). `linear`, `exponential`, `cubic` (Zhu & Gupta 2017): gradually."""
    unit: ScheduleUnit = "epoch"
    """Unit of `begin`, `end`, `every` and `freeze`: epochs, also fractions of them, or optimizer steps."""
    begin: Annotated[float, Ge(0)] = 0.0
    """When pruning begins; `oneshot` and `iterative` prune at once then."""
    end: Annotated[float, Gt(0)] | None = None
    """When the budget is met; null: halfway from `begin` to the end of training; for `iterative`, with a last recovery
    as long as the others."""
    rounds: PositiveInt | None = None
    """Number of pruning steps, evenly spaced; null: 3 for `iterative`, 10 for gradual kinds."""
    every: Annotated[float, Gt(0)] | None = None
    """Distance between pruning steps, instead of `rounds`."""
    score: ScheduleScore = "criterion"
    """Scores at each pruning step: by the `criterion` on current weights, or by `movement`, how far training moved
    weights away from zero (Sanh et al. 2020). The plan before training always uses the criterion. Single weights of a
    `pattern` are scored by size or movement; under movement with `regrow`, zeros move on by straight-through
    gradients."""
    regrow: bool = False
    """Lets pruned channels come back, with their former values. Single weights of a `pattern` come back from zero where
    the loss has the largest gradient, in exchange for the smallest weights (RigL, Evci et al. 2020): 30 % of those left
    at the first pruning step, falling along a cosine to none at the last. With `movement` or `straight_through` they
    come back by score, with their values."""
    freeze: Annotated[float, Gt(0)] | None = None
    """With `regrow`: when masks become final; after `end` they are chosen again at the same budget. null: at `end`."""
    rewind_lr: bool = False
    """Restarts the learning-rate schedule in each round of `iterative` (Renda et al. 2020)."""
    gradients: ScheduleGradients = "masked"
    """Masked weights of a `pattern`: `masked` rest; `straight_through` learn on until masks are final: the forward pass
    sees zeros, gradients reach the values behind them, and the next pruning step chooses from those (SR-STE, Zhou et
    al. 2021)."""
    masked_decay: Annotated[float, Ge(0)] | None = None
    """With `straight_through`: decay of the values behind the zeros; null: 0.0002, as in the paper."""


@cache
def default_budget() -> BudgetSettings:
    """Return the budget if none is given, and no pattern either: always the same object, to be known by."""
    return BudgetSettings(macs=0.5)


@dataclass(frozen=True)
class PruneSettings(Checked):
    """The channels that are removed, and how many.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> settings = pk.PruneSettings(pk.BudgetSettings(macs=0.5), criterion="l1", round_to=4, ignore=("2",))
        >>> pk.prune(model, x, settings=settings).model[0].out_features
        8
        >>> pk.PruneSettings(criterion="l3")
        Traceback (most recent call last):
        prunekit.errors.SettingsError: PruneSettings: criterion: expected the name of ... did you mean 'l2' or 'l1'?
    """

    budget: BudgetSettings = field(default_factory=default_budget)
    """Limits on what may be left; a plan meets all given ones. A `pattern` needs none: without, all channels stay."""
    criterion: CriterionName = "l2"
    """Importance score of a channel; `prunekit list criteria` explains each."""
    scope: Scope = "uniform"
    """How channels of different groups compare. `uniform`: each group keeps the same share. `global`: the lowest scores
    of all groups go. `per_mac`: the lowest per cost, in MACs or what the budget counts. `capacity`: layers keep as much
    of their MACs as the budget allows; scores choose only within a group."""
    round_to: PositiveInt | None = None
    """Channel counts are multiples of this, and of what a `pattern` needs, where possible. null: by width, of the
    largest power of two up to 16, or `target.block` if that is more, that is an eighth of the axis at most (16 of 128
    channels and more, 8 of 64, 4 of 32, 2 of 16), for which kernels are fast; fewer channels may be any number."""
    min_channels: PositiveInt = 1
    """Fewest channels that a group keeps."""
    ignore: tuple[str, ...] = ()
    """Globs over module paths whose output channels are not pruned."""
    target: Target = field(default_factory=Target)
    """Target of `latency_ms` and `speedup`; its batch and dtype also count for `memory_mb`."""
    ratios: dict[str, Share] = field(default_factory=dict)
    """Globs over module paths, each with the share of output channels to keep."""
    layout: Layout = "free"
    """Widths that layers may have. `free`: each its own. `equal`: the same where layers repeat: of one width, with
    paths that differ in numbers alone. `huggingface`: what a configuration of the model's class can say, so that plain
    `from_pretrained` loads the result; other channels, and all blocks, stay. `llama.cpp` and `vllm`: of these, what the
    server quantizes: widths become multiples of 32 (vllm: 16), or stay multiples of 256 (128) where the budget allows
    it. Heads stay as wide as they are."""
    tensor_parallel: PositiveInt = 1
    """With the layout `vllm`, the devices that a server splits each layer among: a divisor of heads and widths."""
    depth: Depth = "auto"
    """Removes whole blocks too: residual branches, or parts of a concatenation such as a layer of a DenseNet. `true`:
    widths and blocks are chosen together. `auto`: so for budgets of time in scopes `per_mac` and `global`; else blocks
    go only where widths alone cannot meet the budget. Blocks with modules in `ignore` or `ratios` stay. `prunekit
    inspect` lists all."""
    min_blocks: Annotated[int, Ge(0)] = 0
    """Fewest blocks, of those that may go, that stay in each stage: modules beside each other with numbers for names,
    such as `layer3.0` to `layer3.5`."""
    plain_classes: bool = False
    """Keeps all modules' classes, so that a pickled model loads without prunekit. Else modules may be recompiled with
    explicit sizes, or replaced by attention with explicit sizes; a removed block by a constant."""
    pattern: PatternSettings | None = None
    """Zeros among single weights of what the channels leave."""
    schedule: ScheduleSettings | None = None
    """When channels and weights go, during fine-tuning; null: all before it."""
    compact_early: bool = False
    """Continues fine-tuning on the compact model once the plan is final: faster, and equal but for the order of sums
    and dropout's random numbers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pattern is not None and self.budget is default_budget():
            object.__setattr__(self, "budget", BudgetSettings())
        if self.pattern is not None and self.budget.given and self.pattern.multiple > 1:
            object.__setattr__(self, "round_to", math.lcm(self.round_to or 1, self.pattern.multiple))

    @property
    def noted(self) -> dict[str, Any]:
        """The settings that plans and model folders keep: without a command, which may name machines and people."""
        return asdict(replace(self, target=replace(self.target, command=None)))

    @property
    def in_blocks(self) -> PruneSettings:
        """The settings with channel counts that are also multiples of the target's block."""
        return replace(self, round_to=math.lcm(self.round_to or 1, self.target.block))

    @property
    def channels_stay(self) -> bool:
        """True if only single weights are set to zero."""
        return self.pattern is not None and not self.budget.given

    @property
    def groups_compete(self) -> bool:
        """True if scores decide how many channels each group loses, and not only which ones."""
        return self.scope in ("global", "per_mac") and self.layout == "free" and not self.channels_stay

    @property
    def errors_compete(self) -> bool:
        """True if the errors of `elimination` decide how many channels each group loses."""
        return self.criterion == "elimination" and self.groups_compete

    @property
    def blocks_may_go(self) -> bool:
        """True if a plan may remove whole blocks: what is left in their place is of classes of prunekit's own."""
        return self.depth is not False and not self.plain_classes and not self.as_configuration

    @property
    def nearer_layouts(self) -> tuple[Layout, ...]:
        """The layouts with fewer conditions than this one, the nearest first."""
        return NEARER[NEARER.index(self.layout) + 1 :] if self.layout in NEARER else NEARER

    @property
    def as_configuration(self) -> bool:
        """True if a configuration of the model's class has to say all widths."""
        return self.layout not in ("free", "equal")


FLOATS = "'fp32', 'bf16' or 'fp16'"
UNCOUNTED = "the memory of quantized files is not counted"
WITH_REPAIR = "expected null, because prune.schedule prunes while training: before it, there is nothing to repair"


def schedule_contradictions(values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a schedule, as plain values, that do not fit its other keys, with what was expected."""
    kind = values.get("kind", ScheduleSettings.kind)
    given = {key for key, value in values.items() if value not in (None, False)}
    if {"rounds", "every"} <= given:
        yield "every", "expected nothing beside rounds, which says the same, got both; set one to null"
    if kind == "oneshot":
        text = "expected nothing, because kind is 'oneshot', which prunes once, at begin"
        yield from ((key, text) for key in ("end", "rounds") if key in given)
    if kind == "oneshot" and ("every" in given) != ("freeze" in given):
        text = "expected it together with {}: a 'oneshot' mask is chosen again at this distance, until then"
        yield ("every", text.format("freeze")) if "every" in given else ("freeze", text.format("every"))
    if "freeze" in given and "regrow" not in given:
        yield "freeze", "expected nothing, because regrow is false: masks that only grow are final at end"
    through = values.get("gradients") == "straight_through"
    if through and "regrow" not in given:
        yield "gradients", "expected 'masked', because regrow is false: what masked weights learn would be lost"
    if through and values.get("score") == "movement":
        yield "gradients", "expected 'masked', because score is 'movement', whose scores already learn straight-through"
    if values.get("masked_decay") is not None and not through:
        yield "masked_decay", "expected nothing, because gradients are masked, so masked weights do not change"
    if "rewind_lr" in given and kind != "iterative" and kind in get_args(ScheduleKind):
        yield "rewind_lr", f"expected false, because kind is {kind!r} and only 'iterative' has rounds to recover in"


def prune_contradictions(prune: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the keys of a `PruneSettings`, as plain values, that do not fit its others, with what was expected."""
    schedule, budget, target = prune.get("schedule"), prune.get("budget"), prune.get("target")
    quantized = isinstance(target, Mapping) and target.get("dtype") == "int8"
    if quantized and isinstance(budget, Mapping) and budget.get("memory_mb") is not None:
        yield ("target", "dtype"), f"expected {FLOATS}, because memory_mb is given: {UNCOUNTED}, got 'int8'"
    if prune.get("pattern") is not None and prune.get("compact_early") is True:
        text = "expected false, because a pattern is given: masks keep its zeros while the dense model is trained"
        yield ("compact_early",), text
    yield from depth_contradictions(prune)
    yield from server_contradictions(prune)
    yield from drop_contradictions(prune)
    if not isinstance(schedule, Mapping):
        return
    if prune.get("pattern") is None and schedule.get("gradients") == "straight_through":
        text = "expected 'masked', because there is no pattern: only single weights learn behind their masks"
        yield ("schedule", "gradients"), text
    yield from ((("schedule", key), text) for key, text in schedule_contradictions(schedule))
    timed = _timed(budget) if isinstance(budget, Mapping) else []
    if timed and schedule.get("regrow") is True:
        text = f"expected false, because {timed[0]} is given: its final plan is measured before training"
        yield ("schedule", "regrow"), f"{text}, and another of the same cost may be slower"
    if schedule.get("score") == "movement" and timed:
        text = f"expected 'criterion', because {timed[0]} is given: its final plan is chosen before training"
        yield ("schedule", "score"), text
    elif schedule.get("score") == "movement" and prune.get("scope") == "per_mac":
        text = (
            "expected 'uniform', 'global' or 'capacity', because the schedule scores by 'movement', whose scores may "
            "be negative"
        )
        yield ("scope",), text


def depth_contradictions(prune: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the keys of depth that ask for something of blocks where none may go."""
    plain, depth, least = prune.get("plain_classes") is True, prune.get("depth"), prune.get("min_blocks")
    layout = prune.get("layout")
    if layout == "huggingface" or layout in SERVERS:
        text = f"because layout is {layout!r}: its configuration cannot say which blocks are gone"
        if depth is True:
            yield ("depth",), f"expected false or 'auto', {text}, got true"
        if least:
            yield ("min_blocks",), f"expected 0, {text}, so all stay, got {least}"
    if plain and depth is True:
        text = "because plain_classes is true: what is left in place of a block is of another class"
        yield ("depth",), f"expected false or 'auto', {text}, got true"
    if least and isinstance(least, int) and (plain or depth is False):
        because = "plain_classes is true" if plain else "depth is false"
        yield ("min_blocks",), f"expected 0, because {because}, so that all blocks stay, got {least}"


def server_contradictions(prune: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the multiples that contradict those of the layout's server."""
    layout, target, split = prune.get("layout"), prune.get("target"), prune.get("tensor_parallel", 1)
    if split != 1 and layout != "vllm":
        yield (
            ("tensor_parallel",),
            f"expected 1, because layout is {layout or 'free'!r} and only 'vllm' needs it, got {split}",
        )
    if layout not in SERVERS:
        return
    block = SERVERS[str(layout)][0]
    asked: dict[tuple[str, ...], object] = {("round_to",): prune.get("round_to")}
    if isinstance(target, Mapping):
        asked["target", "block"] = target.get("block")
    for path, number in asked.items():
        if isinstance(number, int) and number % block and block % number:
            text = f"expected a multiple of {block}, or one of its divisors, because layout is {layout!r}"
            yield path, f"{text}, which stores rows in blocks of {block}, got {number}"


def drop_contradictions(prune: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the budget of the score where models are not made one by one before training."""
    budget = prune.get("budget")
    if isinstance(budget, Mapping) and budget.get("max_drop") is not None:
        reasons = {
            "pattern": "a pattern is given, whose share of zeros is not looked for",
            "schedule": "a schedule is given, which prunes while training, so that there is no score before",
        }
        for key, reason in reasons.items():
            if prune.get(key) is not None:
                yield ("budget", "max_drop"), f"expected nothing, because {reason}; give macs or another budget"


def budget_names() -> list[str]:
    """Return the names of all budgets: the fields of `BudgetSettings`, and other registered ones."""
    return list(dict.fromkeys([*OWN_BUDGETS, *BUDGETS.names]))


def other_budgets(budget: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given budgets of a recipe that are registered or user code, but no fields of `BudgetSettings`."""
    others = [name for name in budget if name not in OWN_BUDGETS and (name in BUDGETS.names or is_reference(name))]
    return {name: budget[name] for name in others if budget[name] is not None}


def _timed(budget: Mapping[str, object]) -> list[str]:
    """Return the names of the given budgets of time, in plain values of a recipe or of a `BudgetSettings`."""
    others = budget.get("others")
    every = {**budget, **(others if isinstance(others, Mapping) else {})}
    given = [name for name, value in every.items() if value is not None and name in BUDGETS.names]
    return [name for name in given if facts_of(name).measured]
