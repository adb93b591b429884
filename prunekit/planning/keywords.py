"""Keyword arguments that say what of a model may be removed, turned into `PruneSettings`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack

from torch import Tensor, nn

from prunekit.errors import UsageError, nearest, require_kind
from prunekit.known_names import BUDGETS, CRITERIA
from prunekit.settings.deployment import Target
from prunekit.settings.pruning import (
    BudgetSettings,
    Depth,
    Layout,
    PruneSettings,
    Scope,
    budget_names,
    depth_contradictions,
    drop_contradictions,
    server_contradictions,
)
from prunekit.settings.weight_pattern import UNSTRUCTURED, PatternSettings
from prunekit.utils.inputs import described

if TYPE_CHECKING:
    from prunekit.settings.calibration import RepairSettings
    from prunekit.statistics.channel_stats import ChannelStats
    from prunekit.statistics.taylor_terms import TaylorTerms
    from prunekit.tasks.task import Task

Where = str | nn.Module | type[nn.Module]
"""A glob over module paths, a module (which stands for all that is in it), or a class of modules."""
ELSEWHERE = {
    "pruning_ratio": "give what may be left: channels=0.5, macs=0.5, or another budget",
    "pruning_ratio_dict": "give ratios={'layer1.*': 0.5}, the shares that are kept",
    "ignored_layers": "give ignore=[model.fc]",
    "example_inputs": "give the example as the second argument, after the model",
    "importance": "give criterion='l2'; `prunekit list criteria` shows them all",
    "global_pruning": "give scope='global'",
    "iterative_steps": "make a prunekit.Pruner(..., schedule='iterative'), which prunes in a training loop",
    "device": "move model and example there, model.to(device)",
}
"""Arguments of other libraries, and what to give here instead."""


class PlanKeywords(TypedDict, total=False):
    """Keywords of `prune`, `plan`, `Pruner` and `prune_yolo` that say what may be removed; `prunekit.prune` has each.

    Registered budgets are keywords as well, by their names.
    """

    macs: float | None
    channels: float | None
    params: float | None
    size_mb: float | None
    latency_ms: float | None
    speedup: float | None
    memory_mb: float | None
    max_drop: float | None
    pattern: str | PatternSettings | None
    sparsity: float | None
    target: Target | None
    criterion: str | None
    scope: Scope | None
    round_to: int | None
    min_channels: int
    ignore: Where | Iterable[Where]
    ratios: Mapping[Any, float] | None
    layout: Layout
    tensor_parallel: int
    depth: Depth
    min_blocks: int
    plain_classes: bool
    settings: PruneSettings | None


class PruneKeywords(PlanKeywords, total=False):
    """Keywords of `prune` that integrations pass on."""

    repair: RepairSettings | Literal[False] | None
    stats: ChannelStats | None
    gradients: TaylorTerms | None
    task: Task | str | None
    evaluate: Any
    held_out: Any
    progress: bool | None


DEFAULTS = {
    name: getattr(PruneSettings(), name)
    for name in (
        "round_to",
        "min_channels",
        "ignore",
        "layout",
        "tensor_parallel",
        "depth",
        "min_blocks",
        "plain_classes",
    )
}
"""Values of keywords that are not given; any other is None then, and the budgets and the samples decide."""
SHARED = ("calibration", "images", "seed", "more_examples", "outputs", "task", "progress")
"""Further keywords of all functions that take `PlanKeywords`."""
BY_WEIGHTS, BY_SAMPLES = "l2", "elimination"
"""Criteria by default: of the weights alone, and where there are samples."""

F = TypeVar("F", bound=Callable[..., Any])


class _Hint(str):
    """The text of an annotation, which `help` shows without quotes."""

    __repr__ = str.__str__


class _LongSignature(Signature):
    """A signature that `help` shows with a parameter on each line."""

    def __str__(self) -> str:
        """Return the parameters, with a star before those that are given by name."""
        lines = [f"    {one.replace(annotation=_Hint(one.annotation))}," for one in self.parameters.values()]
        lines.insert([one.kind for one in self.parameters.values()].index(Parameter.KEYWORD_ONLY), "    *,")
        return "\n".join(["(", *lines, f") -> {self.return_annotation}"])


def shows_keywords(keywords: Any) -> Callable[[F], F]:
    """Give a function that takes `**keywords: Unpack[...]` a signature with each of them, for `help` and editors."""

    def shown(function: F) -> F:
        own = [*signature(function).parameters.values()]
        hints = {name: getattr(hint, "__forward_arg__", hint) for name, hint in keywords.__annotations__.items()}
        known = {one.name for one in own}
        each = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=DEFAULTS.get(name), annotation=hint)
            for name, hint in hints.items()
            if name not in known
        ]
        first = [one for one in own if one.kind < Parameter.KEYWORD_ONLY]
        others = [one for one in own if one.kind == Parameter.KEYWORD_ONLY]
        budgets = Parameter("budgets", Parameter.VAR_KEYWORD, annotation="float")
        whole = _LongSignature(
            [*first, *each, *others, budgets], return_annotation=signature(function).return_annotation
        )
        function.__signature__ = whole  # type: ignore[attr-defined]
        return function

    return shown


def prune_settings(model: nn.Module, samples: bool = False, **keywords: Unpack[PlanKeywords]) -> PruneSettings:
    """Return settings made from keyword arguments, which `prunekit.prune` explains; or the given settings.

    Modules in `ignore` and `ratios` are those of `model`; whether there are samples decides the default criterion. A
    budget is not needed where a pattern is given.
    """
    settings = keywords.get("settings")
    named: dict[str, Any] = {name: value for name, value in keywords.items() if name != "settings"}
    require_kind(
        "settings", settings, PruneSettings, "prunekit.PruneSettings, such as PruneSettings(BudgetSettings(macs=0.5))"
    )
    options = {name: named.pop(name) for name in OPTIONS if name in named}
    budgets = {name: value for name, value in named.items() if value is not None}
    sparsity = options.pop("sparsity", None)
    if sparsity is not None or options.get("pattern") is not None:
        options["pattern"] = pattern_settings(options.get("pattern"), sparsity)
    if "ignore" in options:
        options["ignore"] = tuple(globs_in(model, options["ignore"], "ignore"))
    if (ratios := options.get("ratios")) is not None:
        if not isinstance(ratios, Mapping):
            raise UsageError(
                "ratios: expected shares by globs over module paths, such as {'layer1.*': 0.5}, "
                f"got {type(ratios).__name__} {ratios!r}"
            )
        each = {path: share for where, share in ratios.items() for path in globs_in(model, where, "ratios")}
        options["ratios"] = each or None
    given = {
        name: value
        for name, value in options.items()
        if value is not None and (name not in DEFAULTS or value != DEFAULTS[name])
    }
    criterion = given.get("criterion")
    CRITERIA.reload(criterion or (settings.criterion if settings is not None else ""))
    if settings is not None:
        if beside := [*budgets, *given]:
            raise UsageError(
                f"settings: expected no {', '.join(beside)} beside them; give all in the settings, such as "
                "dataclasses.replace(settings, round_to=8)"
            )
        return _consistent(settings)
    drop = budgets.pop("max_drop", None)
    unknown = next((name for name in budgets if BUDGETS.problem(name) is not None), None)
    if unknown is not None:
        known = [*budget_names(), *OPTIONS, "settings", *SHARED]
        instead = ELSEWHERE.get(unknown) or nearest(unknown, known)
        raise UsageError(f"{unknown}: there is no such argument and no such budget; {instead}")
    if not budgets and drop is None and "pattern" not in given:
        raise UsageError(
            f"budget: expected at least one of {', '.join(budget_names())}, such as macs=0.5, or a pattern of zeros, "
            "such as pattern='2:4' or sparsity=0.8; got none"
        )
    for name in budgets:
        BUDGETS.reload(name)
    budget = BudgetSettings(**budgets, max_drop=drop)
    budget.require_sound()
    given["criterion"] = criterion = criterion or (BY_SAMPLES if samples else BY_WEIGHTS)
    given.setdefault("scope", "per_mac" if criterion == "elimination" or budget.measured else "uniform")
    return _consistent(PruneSettings(budget, **given))


def _consistent(settings: PruneSettings) -> PruneSettings:
    """Return settings whose keys fit each other; raise UsageError for others."""
    plain = asdict(settings)
    found = (*depth_contradictions(plain), *server_contradictions(plain), *drop_contradictions(plain))
    if problems := [f"{'.'.join(path)}: {text}" for path, text in found]:
        raise UsageError("; ".join(problems))
    return settings


OPTIONS = [name for name in PlanKeywords.__annotations__ if name not in {"settings", *BudgetSettings.__annotations__}]
"""Keywords that are no budgets."""


def pattern_settings(pattern: str | PatternSettings | None, sparsity: float | None) -> PatternSettings:
    """Return the settings of a pattern given by name, as settings, or by a share of zeros."""
    if isinstance(pattern, PatternSettings):
        if sparsity is not None:
            raise UsageError(
                "sparsity: expected nothing beside the settings of a pattern, which say it; give "
                f"dataclasses.replace(pattern, sparsity={sparsity})"
            )
        return pattern
    require_kind("pattern", pattern, str, "a name such as '2:4', 'unstructured' or 'kernel', or PatternSettings")
    return PatternSettings(UNSTRUCTURED if pattern is None else pattern, sparsity)


def globs_in(model: nn.Module, given: Where | Iterable[Where], key: str) -> Iterator[str]:
    """Yield globs over module paths for what was given as globs, modules or classes, one or several.

    A module stands for every module with parameters inside it. A class may match no module: unlike a path or a module,
    it is not about one model.
    """
    single = isinstance(given, (str, type, nn.Module)) or not isinstance(given, Iterable)
    paths = {module: path for path, module in model.named_modules()}
    for one in [given] if single else given:  # type: ignore[union-attr]
        if isinstance(one, str):
            yield one
        elif isinstance(one, nn.Module):
            if one not in paths:
                raise UsageError(
                    f"{key}: expected modules of the {type(model).__name__} that is pruned, got a {type(one).__name__} "
                    "that is none of its modules; give the one that it has, or its path, such as 'layer1.*'"
                )
            yield from _inside(one, paths)
        elif isinstance(one, type) and issubclass(one, nn.Module):
            for module in paths:
                if isinstance(module, one):
                    yield from _inside(module, paths)
        else:
            shown = described(one) if isinstance(one, Tensor) else repr(one)
            got = f"the class {one.__name__}" if isinstance(one, type) else f"{type(one).__name__} {shown}"
            expected = "expected globs over module paths, such as 'layer1.*', modules, or classes of modules"
            raise UsageError(f"{key}: {expected}; got {got}")


def _inside(module: nn.Module, paths: Mapping[nn.Module, str]) -> list[str]:
    """Return the paths of the modules with parameters in a module; its own path if there are none."""
    owners = [paths[part] for part in module.modules() if any(True for _ in part.parameters(recurse=False))]
    return owners or [paths[module]]
