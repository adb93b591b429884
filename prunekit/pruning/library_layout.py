"""Widths that a configuration of transformers can say: which channels are free, and the configuration of a result."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.channels.labels.constraints import EqualWidths, Family, Removal, family_name
from prunekit.channels.map_builder import with_equal_widths
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.compaction.compact_model import compact
from prunekit.criteria.criterion import Scores
from prunekit.errors import PlanError, UsageError, first_line
from prunekit.hooks.model_copy import copied, without_values
from prunekit.masks.weight_masks import WeightMasks
from prunekit.models.hugging_face import Changes, ConfigSearch, library_model, quiet_library, shapes_of
from prunekit.planning.plan import Plan
from prunekit.planning.stored_plan import LIBRARY_CONFIG
from prunekit.settings.pruning import SERVERS
from prunekit.utils.context import seeded, set_mode, training_mode
from prunekit.utils.inputs import call
from prunekit.utils.tensors import gather, map_tensors

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-6}
"""Largest relative difference of the outputs of what a library builds; of half precision a few roundings."""
DOUBLE = 2e9
"""The most bytes that the parameters of a model take in float64 for it to be compared in that."""
MULTIPLE = 128
"""The largest number that a width may have to be a multiple of."""
NEAR = 0.98
"""The least share of a budget that larger blocks of a server use up, of what smaller ones do, to be taken."""
MORE = 1.1
"""The most that larger blocks remove by the scores, of what smaller ones do."""
TOGETHER = 6
"""The most families that share one entry of a configuration."""


@dataclass(frozen=True, eq=False)
class LibraryModel:
    """A model of transformers that is pruned, or the one inside a model that is."""

    model: nn.Module  # dense
    path: str  # of the model of transformers in it
    inner: Any  # that model
    examples: Sequence[tuple[Any, ...]]  # that both run on
    search: ConfigSearch  # for a configuration of its class
    layout: str = "huggingface"  # or that of a server

    @classmethod
    def of(cls, model: nn.Module, examples: Sequence[tuple[Any, ...]], layout: str = "huggingface") -> LibraryModel:
        """Return the model of transformers in a model."""
        found = library_model(model)
        if found is None:
            raise UsageError(
                f"layout: {layout!r} is for a model of transformers, or one with exactly one inside; got "
                f"{type(model).__name__}; 'equal' gives layers that repeat the same widths"
            )
        path, inner = found
        search = ConfigSearch(inner, inner.config)
        kind = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", ())  # with an adapter, as LoRA
        if adapter := next((path for path, module in inner.named_modules() if isinstance(module, kind)), None):
            raise UsageError(
                f"layout: expected a {type(inner).__name__} without adapters, and {adapter} is one of peft, which no "
                "configuration says: merge them first, model = model.merge_and_unload(), and prune what that returns"
            )
        if search.dense != shapes_of(inner):
            raise UsageError(
                f"layout: expected a {type(inner).__name__} of the widths in its configuration, and that builds "
                "others; load it by from_pretrained, or give layout='equal'"
            )
        return cls(model, path, inner, examples, search, layout)

    def with_weights(self, model: nn.Module) -> LibraryModel:
        """Return the same for the same network with other weights."""
        return replace(self, model=model, inner=model.get_submodule(self.path))

    def with_layout(self, channel_map: ChannelMap) -> ChannelMap:
        """Return the map with the widths that a configuration of the model's class in transformers can say.

        Each family of groups is tried: a configuration has to make tensors of the narrower shapes, and what the class
        builds from it has to compute what the compact model does. Families that no entry says alone are tried with
        others that the same entry changes, as T5's `d_ff` is for encoder and decoder. The others stay whole.
        """
        return with_equal_widths(channel_map, _LayoutSearch(self, channel_map).found())

    def with_known_layout(self, channel_map: ChannelMap, layouts: Sequence[EqualWidths]) -> ChannelMap:
        """Return the map with the last of the layouts, or another one if a trial has locked what that needs."""
        if layouts:
            channel_map = with_equal_widths(channel_map, layouts[-1])
        holds = channel_map.traced.equal_widths.holds_for(channel_map.families.keys())
        return channel_map if holds else self.with_layout(channel_map)

    def with_config_multiples(self, channel_map: ChannelMap, keep: Keep) -> Iterator[ChannelMap]:
        """Yield the map with what a configuration needs to say the widths of a plan, in one way after another.

        A width may have to be a multiple of another, as the hidden size of the number of heads, which is known once a
        plan has chosen both. Else families stay whole.
        """
        layout = _LayoutSearch(self, channel_map)
        equal = channel_map.traced.equal_widths
        for family, groups in sorted(channel_map.families.items(), key=lambda one: -one[1][0].labels.size):
            size = groups[0].labels.size
            count = int(np.count_nonzero(keep[groups[0].labels]))
            if family in equal.whole or count == size or len(equal.with_family(family)) > 1:
                continue
            known = equal.multiples.get(family, 1)
            for multiple in range(2 * known, min(MULTIPLE, count) + 1, known):
                tried = [layout.with_count(keep, family, count // multiple * multiple - less) for less in (0, multiple)]
                if all(one is not None and layout.says(one) for one in tried):
                    multiples = {**equal.multiples, family: multiple}
                    yield with_equal_widths(channel_map, replace(equal, multiples=multiples))
                    break
        for together in dict.fromkeys(equal.with_family(family) for family in channel_map.families):
            other = layout.with_whole(keep, together)
            if not np.array_equal(other, keep) and layout.says(other):
                name = f"no configuration says widths of {', '.join(sorted(map(family_name, together)))} beside others"
                yield with_equal_widths(channel_map, _with_whole(equal, together, name))

    def sayable_plan(
        self, channel_map: ChannelMap, make: Callable[[ChannelMap], Plan], scores: Scores | None = None
    ) -> Plan:
        """Return a plan of which some configuration makes the shapes; its map has what that took.

        Of several ways the one is taken that leaves most within the budgets. A server's larger blocks are taken where
        they leave nearly as much, and remove little more by the scores.
        """
        if self.layout not in SERVERS:
            return self._sayable_plan(channel_map, make)
        _, block = SERVERS[self.layout]
        equal, families = channel_map.traced.equal_widths, channel_map.families
        large = {
            family: math.lcm(block, equal.multiples.get(family, 1))
            for family, groups in families.items()
            if groups[0].labels.size % block == 0 and channel_map.kind_of(groups[0]) == Removal.HEADS
        }
        plan = self._sayable_plan(channel_map, make)
        with suppress(PlanError):  # of a budget that larger blocks cannot meet
            wider = with_equal_widths(channel_map, replace(equal, multiples={**equal.multiples, **large}))
            other = self._sayable_plan(wider, make)
            lost = [0.0 if scores is None else float(scores[~one.keep].sum()) for one in (plan, other)]
            plan = other if _used(other) >= NEAR * _used(plan) and lost[1] <= MORE * lost[0] else plan
        return plan

    def _sayable_plan(self, channel_map: ChannelMap, make: Callable[[ChannelMap], Plan]) -> Plan:
        plan = make(channel_map)
        while not (layout := _LayoutSearch(self, plan.channel_map)).says(plan.keep):
            found, errors = list[Plan](), list[PlanError]()
            for other in self.with_config_multiples(plan.channel_map, plan.keep):
                try:
                    found.append(make(other))
                except PlanError as error:
                    errors.append(error)
            if not found:
                raise (
                    errors[0] if errors else PlanError(_misfit(self.inner, self.search.dense, layout.shapes(plan.keep)))
                )
            said = [one for one in found if _LayoutSearch(self, one.channel_map).says(one.keep)]
            plan = max(said or found, key=_used)
        return plan

    def plan_in_layout(self, channel_map: ChannelMap, make: Callable[[ChannelMap], Plan]) -> Plan:
        """Return a plan whose widths a configuration says, with its entries, for a map that a trial has settled."""
        while True:
            plan = self.sayable_plan(channel_map, make)
            note, layout = self.changes(compact(self.model, plan), plan)
            if note is not None:
                return replace(plan, provenance={**plan.provenance, LIBRARY_CONFIG: note})
            channel_map = with_equal_widths(plan.channel_map, layout)

    def changes(self, small: nn.Module, plan: Plan) -> tuple[dict[str, Any] | None, EqualWidths]:
        """Return what the configuration of a compact model has to say, or a layout in which more stays whole."""
        search, chart, equal = self.search, plan.channel_map, plan.channel_map.traced.equal_widths
        calls = _Calls.of(_in_precision(small, self.examples), self.path, self.examples)
        wanted, reason = shapes_of(calls.inner), ""
        for changes in search.fitting(wanted, kept_counts(chart, plan.keep)):
            reason = calls.difference(search, changes)
            if not reason:
                return {"module": self.path, "config": search.noted(changes)}, equal
        narrower = [
            equal.with_family(chart.family_of(group)) for group in chart.groups if not plan.keep[group.labels].all()
        ]
        if not reason or not narrower:
            raise PlanError(_misfit(self.inner, search.dense, wanted, reason))
        layout = _LayoutSearch(self, chart)
        alone = [one for one in dict.fromkeys(narrower) if not layout.can_say_alone(plan.keep, one)]
        worst = max(alone or narrower, key=len)
        text = f"narrower, {' and '.join(sorted(map(family_name, worst)))} would compute something else: {reason}"
        stay = [one for one in worst if len(worst) == 1 or not layout.can_say_alone(plan.keep, [one])]
        return None, _with_whole(equal, worst, text, stay)


@dataclass(frozen=True, eq=False)
class _LayoutSearch:
    """The search for families of groups that a configuration can say."""

    library: LibraryModel
    channel_map: ChannelMap

    def found(self) -> EqualWidths:
        """Return which families keep the same share, and which stay whole."""
        name = f"a {type(self.library.inner).__name__}'s configuration"
        families, prefix = self.channel_map.families, f"{self.library.path}." if self.library.path else ""
        inside = [
            family
            for family, groups in families.items()
            if all(name.startswith(prefix) for group in groups for name, _ in group.slots)
        ]
        whole = dict.fromkeys(families.keys() - set(inside), f"{name} says no width outside it")
        left = [family for family in inside if not self._can_say((family,))]
        together = list[frozenset[Family]]()
        for several in self._combinations(left, inside):
            new = set(several) & set(left)
            if new and not any(set(several) & set(known) for known in together) and self._can_say(several):
                together.append(frozenset(several))
                left = [family for family in left if family not in new]
        whole |= {family: f"{name} cannot say another width of {family_name(family)}" for family in left}
        return EqualWidths(tuple(together), whole)

    def _combinations(self, left: list[Family], inside: list[Family]) -> list[tuple[Family, ...]]:
        """Return families that one entry changes by the same share, those with the most steps first."""
        found = dict[tuple[Family, ...], None]()
        for key, value in self.library.search.keys.items():
            for other in dict.fromkeys(() if value is None else (value // 2, value * 2 // 3, value * 3 // 4)):
                shapes = self.library.search.shapes({key: other}) if value is not None and 0 < other < value else None
                changed = self.library.search.touched({key: other}) if shapes else None
                on = [family for family in inside if changed and self._axes(family) <= changed]
                for count in range(2, min(TOGETHER, len(on)) + 1):
                    for one in combinations(on, count):
                        if set(one) & set(left) and self._makes(one, other, value, shapes):
                            found[one] = None
        return sorted(found, key=lambda several: (-self._steps(several), len(several)))

    def _makes(self, families: tuple[Family, ...], part: int, whole: int | None, shapes: Any) -> bool:
        """Return whether families that keep a share make the shapes of a configuration."""
        assert whole is not None
        steps = self._steps(families)
        if part * steps % whole:
            return False
        keep = self._kept(families, part * steps // whole, steps)
        return keep is not None and self.shapes(keep) == shapes

    def shapes(self, keep: Keep) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors of the model of transformers under a plan."""
        start = f"{self.library.path}." if self.library.path else ""
        narrow = Plan(self.channel_map, keep).narrow_shapes
        return {name: narrow.get(start + name, shape) for name, shape in self.library.search.dense.items()}

    def _axes(self, family: Family) -> set[tuple[str, int]]:
        """Return the parameter axes of a family, by the names that the model of transformers has for them."""
        start = len(self.library.path) + 1 if self.library.path else 0
        return {(name[start:], axis) for group in self.channel_map.families[family] for name, axis in group.slots}

    def _steps(self, families: Iterable[Family]) -> int:
        """Return how many narrower widths families have that keep the same share, and the whole one."""
        return int(np.gcd.reduce([group.labels.size for one in families for group in self.channel_map.families[one]]))

    def _can_say(self, families: tuple[Family, ...]) -> bool:
        """Return whether a configuration says narrower widths of some families, and its model computes the same."""
        steps = self._steps(families)
        for step in sorted(range(1, steps), key=lambda one: abs(one - steps // 2)):
            keep = self._kept(families, step, steps)
            if keep is not None:
                return self._is_said(keep)
        return False

    def _kept(self, families: tuple[Family, ...], step: int, steps: int) -> Keep | None:
        """Return a plan that keeps a share of families; None if the model does not allow the widths."""
        chart = self.channel_map
        keep = np.ones(chart.n_labels, dtype=bool)
        needed = {id(group): pair for group, *pair in zip(chart.groups, chart.steps, chart.least, strict=True)}
        for family in families:
            for group in self.channel_map.families[family]:
                count = group.labels.size * step // steps
                multiple, least = needed[id(group)]
                if count % multiple or count < least:
                    return None
                keep[group.labels[count:]] = False
        return chart.completed(keep)

    def says(self, keep: Keep) -> bool:
        """Return whether a configuration makes the shapes of a plan."""
        return next(iter(self.fitting(keep)), None) is not None

    def fitting(self, keep: Keep) -> Iterator[Changes]:
        """Yield entries of a configuration that make the shapes of a plan."""
        return self.library.search.fitting(self.shapes(keep), kept_counts(self.channel_map, keep))

    def with_count(self, keep: Keep, family: Family, count: int) -> Keep | None:
        """Return a plan with another number of what a family keeps; None if that is nothing."""
        if count < 1:
            return None
        keep = keep.copy()
        for group in self.channel_map.families[family]:
            keep[group.labels] = np.arange(group.labels.size) < count
        return self.channel_map.completed(keep)

    def with_whole(self, keep: Keep, families: Iterable[Family]) -> Keep:
        """Return a plan that keeps some families whole."""
        keep = keep.copy()
        for family in families:
            for group in self.channel_map.families.get(family, []):
                keep[group.labels] = True
        return self.channel_map.completed(keep)

    def can_say_alone(self, keep: Keep, families: Iterable[Family]) -> bool:
        """Return whether a configuration says the widths that a plan gives some families, all others whole."""
        only = np.ones_like(keep)
        for family in families:
            for group in self.channel_map.families.get(family, []):
                only[group.labels] = keep[group.labels]
        return self._is_said(self.channel_map.completed(only))

    def _is_said(self, keep: Keep) -> bool:
        fitting = list(self.fitting(keep))
        if not fitting:
            return False
        plan = Plan(self.channel_map, keep)
        calls, same = None, True
        with suppress(Exception):  # what a trial would find is not known yet, so the shapes alone decide
            dense = _in_precision(self.library.model, self.library.examples)
            small = compact(dense, plan)
            calls = _Calls.of(small, self.library.path, self.library.examples)
            with WeightMasks(dense, plan):
                same = all(
                    _are_close(outputs_of(dense, example), outputs_of(small, example))
                    for example in self.library.examples
                )
        return same and (calls is None or any(not calls.difference(self.library.search, one) for one in fitting))


def kept_counts(channel_map: ChannelMap, keep: Keep) -> set[tuple[int, int]]:
    """Return the sizes of the groups that a plan makes narrower, and what it keeps of each."""
    pairs = ((group.labels.size, int(np.count_nonzero(keep[group.labels]))) for group in channel_map.groups)
    return {(size, count) for size, count in pairs if 0 < count < size}


@dataclass(frozen=True, eq=False)
class _Calls:
    """Calls of a model of transformers inside a model that runs on its examples: arguments and results."""

    inner: Any  # the module that is called
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]]  # positional ones and those by name, of each call
    results: list[list[Tensor]]  # tensors of what each call returned

    @classmethod
    def of(cls, model: nn.Module, path: str, examples: Sequence[tuple[Any, ...]]) -> _Calls:
        """Run a model in eval mode on its examples, in its own precision."""
        inner = model.get_submodule(path)
        arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def note(module: nn.Module, given: tuple[Any, ...], by_name: dict[str, Any]) -> None:
            arguments.append((given, dict(by_name)))

        with inner.register_forward_pre_hook(note, with_kwargs=True):
            for example in examples:
                outputs_of(model, example)
        with torch.no_grad():
            results = [gather(inner(*given, **by_name)) for given, by_name in arguments]
        return cls(inner, arguments, results)

    def difference(self, search: ConfigSearch, changes: Changes) -> str:
        """Return how the model that the library builds from a configuration differs; empty if it computes the same."""
        try:
            with quiet_library(), seeded(0):
                with without_values():
                    built = search.cls(search.made(changes))
                _drop_others(built, {path for path, _ in self.inner.named_modules()})
                built.load_state_dict(self.inner.state_dict(), assign=True)
                built.tie_weights()
                search.take_rounded(built, self.inner)
                set_mode(built, False)
                if next(self.inner.parameters()).dtype == torch.float64:
                    built.double()
                with torch.no_grad():
                    found = [gather(built(*given, **by_name)) for given, by_name in self.arguments]
        except Exception as error:
            return f"it raises {type(error).__name__}: {first_line(error)}"
        for ours, theirs in zip(self.results, found, strict=True):
            if [tensor.shape for tensor in ours] != [tensor.shape for tensor in theirs]:
                return "it returns other shapes"
            for one, other in zip(ours, theirs, strict=True):
                if not is_close(one, other):
                    return "it computes something else, because its code derives a size or a scale from others"
        return ""


def _drop_others(built: nn.Module, known: Set[str]) -> None:
    """Take modules out of a model that another one of its class does not have, such as a pooling layer."""
    for path, module in [*built.named_modules()]:
        for name, child in [*module.named_children()]:
            if path in known and (f"{path}.{name}" if path else name) not in known and child is not None:
                setattr(module, name, None)


def _in_precision(model: nn.Module, examples: Sequence[tuple[Any, ...]]) -> nn.Module:
    """Return a copy of a model in float64, in eval mode; in its own precision where it is too large or can't run so."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes != {torch.float64} and 8 * sum(parameter.numel() for parameter in model.parameters()) <= DOUBLE:
        double = set_mode(copied(model, dtype=torch.float64), False)
        with suppress(Exception):  # a kernel without float64
            outputs_of(double, examples[0])
            return double
    return set_mode(copied(model), False)


def outputs_of(model: nn.Module, example: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors that a model returns on an example, which is given in the model's precision."""
    dtype = next(model.parameters()).dtype
    given = map_tensors(example, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    with training_mode(model, False), torch.no_grad():
        return gather(call(model, given))


def _are_close(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Return whether tensors of the same shapes are equal but for rounding; narrower ones are states, not compared."""
    return len(ours) == len(theirs) and all(
        is_close(one, other) for one, other in zip(ours, theirs, strict=True) if one.shape == other.shape
    )


def is_close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of the same shape are equal but for rounding."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    allowed = TOLERANCE.get(a.dtype, 8 * torch.finfo(a.dtype).eps)
    largest = float(a.double().abs().max()) if a.numel() else 0.0
    return torch.equal(a, b) or bool((a.double() - b.double()).abs().max() <= allowed * largest)


def _with_whole(
    equal: EqualWidths, together: frozenset[Family], reason: str, stay: Iterable[Family] | None = None
) -> EqualWidths:
    """Return a layout without some families that keep the same share; they, or some of them, stay whole."""
    left = tuple(each for each in equal.together if each != together)
    stay = together if stay is None else stay
    return replace(equal, together=left, whole={**equal.whole, **dict.fromkeys(stay, reason)})


def _used(plan: Plan) -> float:
    """Return the share that a plan uses of the budget that it uses up the most."""
    return max((one["left"] / one["asked"] for one in plan.provenance["budgets"].values() if one["asked"]), default=1.0)


def _misfit(inner: nn.Module, dense: Mapping[str, Any], wanted: Mapping[str, Any], reason: str = "") -> str:
    if not reason:
        first = next((name for name, shape in wanted.items() if dense.get(name) != shape), "")
        reason = (
            f"no entries of it make the shapes of all tensors; the first that differs from the dense model is {first}, "
            f"{wanted.get(first)} of {dense.get(first)}"
        )
    return (
        f"layout 'huggingface': the configuration of {type(inner).__name__} cannot say the widths of this plan: "
        f"{reason}; give layout='equal', and save by prunekit.save"
    )
