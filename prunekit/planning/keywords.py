"""Keyword arguments that say what of a model may be removed, turned into `PruneSettings`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from inspect import signature
from typing import Any

from torch import Tensor, nn

from prunekit.errors import UsageError, nearest, require_kind
from prunekit.known_names import BUDGETS, CRITERIA
from prunekit.settings.pattern import UNSTRUCTURED, PatternSettings
from prunekit.settings.pruning import (
    BudgetSettings,
    Depth,
    Layout,
    PruneSettings,
    Scope,
    Target,
    budget_names,
    depth_contradictions,
)
from prunekit.utils.inputs import described

Where = str | nn.Module | type[nn.Module]
"""A glob over module paths, a module (which stands for all that is in it), or a class of modules."""
DEFAULT = PruneSettings()
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


def prune_settings(
    model: nn.Module,
    settings: PruneSettings | None = None,
    *,
    by_default: str = "l2",
    target: Target | None = None,
    criterion: str | None = None,
    scope: Scope | None = None,
    round_to: int = 1,
    min_channels: int = 1,
    ignore: Where | Iterable[Where] = (),
    ratios: Mapping[Any, float] | None = None,
    plain_classes: bool = False,
    layout: Layout = DEFAULT.layout,
    depth: Depth = DEFAULT.depth,
    min_blocks: int = 0,
    pattern: str | PatternSettings | None = None,
    sparsity: float | None = None,
    **budgets: float | None,
) -> PruneSettings:
    """Return settings made from keyword arguments, which `prunekit.prune` explains; or the given settings.

    Modules in `ignore` and `ratios` are those of `model`; `by_default` is the criterion if none is given. A budget is
    not needed where a pattern is given.
    """
    require_kind(
        "settings", settings, PruneSettings, "prunekit.PruneSettings, such as PruneSettings(BudgetSettings(macs=0.5))"
    )
    given: dict[str, Any] = {
        "criterion": criterion,
        "scope": scope,
        "target": target,
        "round_to": None if round_to == DEFAULT.round_to else round_to,
        "min_channels": None if min_channels == DEFAULT.min_channels else min_channels,
        "ignore": tuple(globs_in(model, ignore, "ignore")) or None,
        "ratios": _ratios(model, ratios) or None,
        "plain_classes": plain_classes or None,
        "layout": None if layout == DEFAULT.layout else layout,
        "depth": None if depth == DEFAULT.depth else depth,
        "min_blocks": min_blocks or None,
        "pattern": pattern_settings(pattern, sparsity),
    }
    given = {name: value for name, value in given.items() if value is not None}
    budgets = {name: value for name, value in budgets.items() if value is not None}
    CRITERIA.reload(criterion or (settings.criterion if settings is not None else ""))
    if settings is not None:
        if named := [*budgets, *given]:
            raise UsageError(
                f"settings: expected no {', '.join(named)} beside them; give all in the settings, such as "
                "dataclasses.replace(settings, round_to=8)"
            )
        return settings
    known = budget_names()
    unknown = next((name for name in budgets if BUDGETS.problem(name) is not None), None)
    if unknown is not None:
        instead = ELSEWHERE.get(unknown) or nearest(unknown, [*known, *ARGUMENTS])
        raise UsageError(f"{unknown}: there is no such argument and no such budget; {instead}")
    if not budgets and "pattern" not in given:
        raise UsageError(
            f"budget: expected at least one of {', '.join(known)}, such as macs=0.5, or a pattern of zeros, such as "
            "pattern='2:4' or sparsity=0.8; got none"
        )
    for name in budgets:
        BUDGETS.reload(name)
    budget = BudgetSettings(**budgets)
    budget.require_sound()
    criterion = criterion or by_default
    spent_where_least = criterion == "elimination" or budget.measured
    default_scope: Scope = "per_mac" if spent_where_least else "uniform"
    made = PruneSettings(**({"scope": default_scope} | given | {"budget": budget, "criterion": criterion}))
    if problems := [f"{'.'.join(path)}: {text}" for path, text in depth_contradictions(asdict(made))]:
        raise UsageError("; ".join(problems))
    return made


ARGUMENTS = [name for name, given in signature(prune_settings).parameters.items() if given.kind is given.KEYWORD_ONLY]


def pattern_settings(pattern: str | PatternSettings | None, sparsity: float | None) -> PatternSettings | None:
    """Return the settings of a pattern given by name, as settings, or by a share of zeros; None for neither."""
    if isinstance(pattern, PatternSettings):
        if sparsity is not None:
            raise UsageError(
                "sparsity: expected nothing beside the settings of a pattern, which say it; give "
                f"dataclasses.replace(pattern, sparsity={sparsity})"
            )
        return pattern
    require_kind("pattern", pattern, str, "a name such as '2:4', 'unstructured' or 'kernel', or PatternSettings")
    if pattern is None and sparsity is None:
        return None
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


def _ratios(model: nn.Module, given: Mapping[Any, float] | None) -> dict[str, float]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UsageError(
            "ratios: expected shares by globs over module paths, such as {'layer1.*': 0.5}, "
            f"got {type(given).__name__} {given!r}"
        )
    return {path: share for where, share in given.items() for path in globs_in(model, where, "ratios")}
