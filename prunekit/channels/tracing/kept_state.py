"""State that a model keeps between its calls in attributes that are no buffers: hidden states, caches, last results.

A hidden state that forward writes anew loses the channels that the layers around it lose. What forward makes only where
it is missing, such as a table of positions, is left out of a compact model, whose forward makes it in its own size.
Copies of the model are run to tell the one from the other, because a model that has run before holds results of that
run.

Auxiliary losses in attributes, which no output and no later call reads, may be other numbers in the compact model. A
mean over channels is another one where some are gone, and so would lock them: operators that lead to nothing but such
numbers lock nothing, and the trial does not compare them.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.channels.labels.label_flow import LabelFlow
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.execution import as_in_trace
from prunekit.channels.tracing.operator_mode import OnMeta
from prunekit.channels.tracing.traced_run import TracedRun
from prunekit.errors import reraise_shortage
from prunekit.hooks.hook import HOOK_TABLES
from prunekit.hooks.model_copy import OWN_TABLES, WithoutHistory, has_gradients, named_tensors, with_tensors
from prunekit.utils.display import listed
from prunekit.utils.inputs import call
from prunekit.utils.tensors import gather

Place = tuple[str, str, int]
"""A module path, the name of its attribute, and which of the tensors in that."""
Attribute = tuple[str, str]
"""A module path, and the name of its attribute."""


@dataclass(frozen=True, eq=False)
class KeptState:
    """The state that a model keeps between its calls."""

    # where forward leaves a tensor for the next call -> one entry for each of its axes, as of `ChannelMap`
    labels: Mapping[Place, tuple[Labels | None, ...]] = field(default_factory=dict)
    remade: frozenset[Attribute] = frozenset()  # attributes that forward makes where they are None

    def __bool__(self) -> bool:
        return bool(self.labels or self.remade)

    def renumbered(self, final: Labels) -> KeptState:
        """Return the same with a map's labels in place of a trace's, given the map's label of each of these."""
        axes_of = {place: [None if one is None else final[one] for one in axes] for place, axes in self.labels.items()}
        free = {place for place, axes in axes_of.items() if any(one is not None and one.any() for one in axes)}
        return KeptState({place: tuple(axes_of[place]) for place in axes_of if place in free}, self.remade)

    def in_words(self, model: nn.Module) -> str:
        """Return a sentence on what a model holds that a compact one has narrow, or not at all; empty if nothing."""
        held = {place[:2] for place in kept_tensors(model)}
        narrow = [f"{path}.{name}".lstrip(".") for path, name in sorted({place[:2] for place in self.labels} & held)]
        again = [f"{path}.{name}".lstrip(".") for path, name in sorted(self.remade & held)]
        parts = [f"the kept channels of {listed(narrow, FEW)}, which earlier calls left in the model"] if narrow else []
        parts += [f"None in {listed(again, FEW)}, which forward makes where it is missing"] if again else []
        return f"the compact model begins with {', and with '.join(parts)}" if parts else ""


NO_STATE = KeptState()
FEW = 4
"""How many attributes a sentence names."""


def kept_tensors(model: nn.Module, *, numbers: bool = False) -> dict[Place, Tensor]:
    """Return the tensors that modules hold in attributes that are neither parameters nor buffers."""
    own = {id(tensor) for _, tensor in named_tensors(model)}
    found: dict[Place, Tensor] = {}
    for path, module in model.named_modules():
        for name, value in _attributes(module):
            for index, tensor in enumerate(_tensors(value)):
                if id(tensor) not in own and has_gradients(tensor) and (numbers or tensor.numel() > 1):
                    found[path, name, index] = tensor
    return found


def drop_remade_(model: nn.Module, state: KeptState) -> None:
    """Set attributes that forward makes where they are missing to None, in place."""
    modules = dict(model.named_modules())
    for path, name in state.remade:
        if path in modules and name in vars(modules[path]):
            setattr(modules[path], name, None)


def cut_state_(model: nn.Module, state: KeptState, keep: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
    """Leave the kept channels of what a model keeps between its calls, in place; others stay as they are."""
    drop_remade_(model, state)
    map_state_(model, lambda place, tensor: _narrowed(tensor, state.labels.get(place, ()), keep))


def give_state_(model: nn.Module, source: nn.Module, state: KeptState) -> None:
    """Give a model copies of what another one keeps between its calls, in place."""
    modules, others = dict(model.named_modules()), dict(source.named_modules())
    for path, name in {place[:2] for place in state.labels}:
        if path in modules and path in others and name in vars(others[path]):
            with WithoutHistory():
                setattr(modules[path], name, copy.deepcopy(vars(others[path])[name]))


@contextmanager
def same_state(model: nn.Module) -> Iterator[None]:
    """Give attributes that hold tensors, before or after, the values back that they had."""
    before = [(module, dict(_attributes(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, values in before:
            now = dict(_attributes(module))
            changed = [name for name in values.keys() | now.keys() if values.get(name) is not now.get(name)]
            for name in (one for one in changed if _tensors(values.get(one)) or _tensors(now.get(one))):
                if name in values:
                    vars(module)[name] = values[name]
                else:
                    delattr(module, name)


def map_state_(model: nn.Module, function: Callable[[Place, Tensor], Tensor]) -> None:
    """Apply a function to the tensors of `kept_tensors`, in place."""
    places = kept_tensors(model)
    for path, name in dict.fromkeys(place[:2] for place in places):
        module = model.get_submodule(path)

        def changed(index: int, tensor: Tensor, where: Attribute = (path, name)) -> Tensor:
            place = (*where, index)
            return function(place, tensor) if place in places else tensor

        vars(module)[name] = _mapped(vars(module)[name], changed)


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return a module's attributes that may hold tensors, without its tables."""
    if isinstance(module, torch.jit.ScriptModule):
        return []
    tables = (*OWN_TABLES, *HOOK_TABLES)
    return [(name, value) for name, value in vars(module).items() if name not in tables]


def _tensors(value: Any, depth: int = 0) -> list[Tensor]:
    """Return the tensors in a value, or in nested containers and dataclasses, in the order of `_mapped`."""
    if isinstance(value, Tensor):
        return [value]
    if depth == _DEEPEST:
        return []
    items = value if isinstance(value, tuple) else [item for _, item in _items(value)]
    return [tensor for item in items for tensor in _tensors(item, depth + 1)]


def _mapped(value: Any, function: Callable[[int, Tensor], Tensor]) -> Any:
    """Return a value with a function applied to its tensors, in order; containers but tuples are changed in place."""
    numbers = iter(range(2**63))

    def walk(one: Any, depth: int) -> Any:
        if isinstance(one, Tensor):
            return function(next(numbers), one)
        if depth == _DEEPEST:
            return one
        if isinstance(one, tuple):
            items = [walk(item, depth + 1) for item in one]
            same = all(new is old for new, old in zip(items, one, strict=True))
            return one if same else type(one)(*items) if hasattr(one, "_fields") else type(one)(items)
        for key, item in _items(one):
            new = walk(item, depth + 1)
            if new is not item:
                _put(one, key, new)
        return one

    return walk(value, 0)


_DEEPEST = 6
"""How deep containers are looked into, which may hold themselves."""


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Return what a container or dataclass holds, by key, index or name."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, deque)):
        return list(enumerate(value))
    found = list[tuple[Any, Any]]()
    if is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        for one in fields(value):
            with suppress(Exception):  # a configuration of transformers refuses entries that differ by layer
                found.append((one.name, getattr(value, one.name)))
    return found


def _put(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, (dict, list, deque)):
        holder[key] = value
    else:
        object.__setattr__(holder, key, value)  # a frozen dataclass too


def _narrowed(tensor: Tensor, axes: tuple[Labels | None, ...], keep: np.ndarray[Any, np.dtype[np.bool_]]) -> Tensor:
    """Return the kept entries of a state, detached; itself if it is of another shape than in the trace."""
    if len(axes) != tensor.dim():
        return tensor
    result = tensor
    for axis, labels in enumerate(axes):
        if labels is not None and labels.size == tensor.shape[axis] and not keep[labels].all():
            index = torch.from_numpy(np.flatnonzero(keep[labels])).to(tensor.device)
            result = result.detach().index_select(axis, index)
    return result


ONE_BY_ONE = 16
"""How many attributes are tried by themselves where the model does not run without all of them."""


def search_state(
    model: nn.Module, run: Callable[[nn.Module], object], *, meta: bool
) -> tuple[set[Place], frozenset[Attribute]]:
    """Return the tensors that a forward pass writes for the next, and attributes that it makes where they are None."""
    if not kept_tensors(model):
        return set(), frozenset()
    moved = _moved(model, run, meta, training=False)
    if moved is None:
        return set(), frozenset()
    moved |= _moved(model, run, meta, training=True) or set()
    still = sorted({place[:2] for place in kept_tensors(model)} - {place[:2] for place in moved})
    remade = _made_again(model, run, still, meta) if still else set()
    if remade is None:
        remade = {one for one in still[:ONE_BY_ONE] if _made_again(model, run, [one], meta)}
    return moved, frozenset(remade)


def _moved(model: nn.Module, run: Callable[[nn.Module], object], meta: bool, *, training: bool) -> set[Place] | None:
    """Return the tensors that a forward pass exchanges or writes to; None if it does not run."""
    twin = _twin(model, meta)
    before = {place: (tensor, tensor._version) for place, tensor in kept_tensors(twin).items()}
    if not _runs(twin, run, meta, training=training):
        return None
    after = kept_tensors(twin)
    same = {place for place, (one, version) in before.items() if after.get(place) is one and one._version == version}
    return before.keys() - same


def _made_again(
    model: nn.Module, run: Callable[[nn.Module], object], attributes: Iterable[Attribute], meta: bool
) -> set[Attribute] | None:
    """Return those of some attributes that forward makes where they are None; None if it does not run without them."""
    twin = _twin(model, meta)
    for path, name in attributes:
        setattr(twin.get_submodule(path), name, None)
    if not _runs(twin, run, meta):
        return None
    made = {place[:2] for place in kept_tensors(twin)}
    return {one for one in attributes if one in made}


def _twin(model: nn.Module, meta: bool) -> nn.Module:
    twin = with_tensors(model, {})
    if meta:
        map_state_(twin, lambda _, tensor: tensor.to("meta"))
    return twin


def runs_on(model: nn.Module, inputs: tuple[Any, ...], *, meta: bool) -> bool:
    """Return whether a copy of a model runs on some inputs."""
    return _runs(_twin(model, meta), lambda twin: call(twin, inputs), meta)


def _runs(model: nn.Module, run: Callable[[nn.Module], object], meta: bool, *, training: bool = False) -> bool:
    mode: AbstractContextManager[object] = OnMeta() if meta else nullcontext()
    try:
        with as_in_trace(model, training), mode:
            run(model)
    except Exception as error:  # the trace will say why the model does not run
        reraise_shortage(error)
        return False
    return True


def label_state(
    clone: nn.Module, example: tuple[Any, ...], flow: LabelFlow, stand_in: Callable[[Tensor], Tensor], *, meta: bool
) -> KeptState:
    """Give what earlier passes left for the next one labels that are coupled with what it meets, and drop caches."""
    if not kept_tensors(clone):
        return NO_STATE
    moved, remade = search_state(clone, lambda model: call(model, example), meta=meta)
    labels: dict[Place, tuple[Labels | None, ...]] = {}

    def labeled(place: Place, tensor: Tensor) -> Tensor:
        if place not in moved:
            return tensor
        new = stand_in(tensor)
        flow.set(new, flow.made_labels(new, range(new.dim())))
        labels[place] = _axes_of(flow, new)
        return new

    map_state_(clone, labeled)
    state = KeptState(labels, remade)
    drop_remade_(clone, state)
    return state


def with_left(state: KeptState, flow: LabelFlow, model: nn.Module) -> KeptState:
    """Return a state with the labels of what a pass left for the next, which are those of what it began with."""
    known = dict(state.labels)
    for place, tensor in kept_tensors(model).items():
        left, begun = _axes_of(flow, tensor), known.get(place, ())
        for old, new in zip(begun, left, strict=False):
            if old is not None and (new is None or old.size == new.size):
                flow.join(old, new, "the state that forward leaves for its next call has another size")
        if any(axis is not None for axis in left):
            known[place] = left
    return replace(state, labels=known)


def _axes_of(flow: LabelFlow, tensor: Tensor) -> tuple[Labels | None, ...]:
    """Return the labels along each axis of a tensor; None where those of an axis are spread over several, or none."""
    alone = {field.span[0]: field.labels.reshape(-1) for field in flow.fields(tensor) if len(field.span) == 1}
    return tuple(alone.get(axis) for axis in range(tensor.dim()))


def results_aside(
    runs: Sequence[TracedRun], model: nn.Module, examples: Sequence[tuple[Any, ...]]
) -> dict[int, frozenset[int]]:
    """Return, by the number of a run, the operators that lead only to numbers which no later call reads."""
    found = {number: run.aside for number, run in enumerate(runs) if run.aside}
    read = any(_reads_later(model, runs[one].inputs(examples), training=runs[one].training) for one in found)
    return {} if read else found


def operators_aside(run: TracedRun, numbers: Iterable[int], others: Iterable[int]) -> frozenset[int]:
    """Return the operators of a run that lead to numbers kept aside, and to nothing else."""
    wanted = set(numbers)
    if not wanted:
        return frozenset()
    read = {number for operator in run.operators for number in operator.reads}
    acting = {
        i for i, one in enumerate(run.operators)  # write to tensors, or return a number to Python
        if not one.call[2] or (one.name.endswith("_") and any(torch.Size(shape).numel() > 1 for shape in one.call[2]))
    }  # fmt: skip
    ends = acting | ({*range(len(run.operators))} - read - wanted)
    return frozenset(_leading_to(run, wanted) - _leading_to(run, ends | run.returned | set(others)))


def _leading_to(run: TracedRun, numbers: set[int]) -> set[int]:
    found, waiting = set[int](), [number for number in numbers if number >= 0]
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += [one for one in run.operators[number].reads if one >= 0]
    return found


class _Reads(OnMeta):
    """Notes whether operators read any of some tensors."""

    def __init__(self, watched: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._watched = {id(tensor) for tensor in watched}
        self.read = False

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator."""
        self.read = self.read or any(id(tensor) in self._watched for tensor in gather((args, kwargs)))
        return super().operator(func, args, kwargs)


def _reads_later(model: nn.Module, inputs: tuple[Any, ...], *, training: bool) -> bool:
    """Return whether a forward pass reads single numbers that the one before kept; True if it does not run twice."""
    twin = with_tensors(model, {})
    try:
        with as_in_trace(twin, training):
            with _Reads(()):
                call(twin, inputs)
            numbers = [tensor for tensor in kept_tensors(twin, numbers=True).values() if tensor.numel() == 1]
            with _Reads(numbers) as watch:
                call(twin, inputs)
    except Exception as error:  # whatever the model's own code makes of a second call
        reraise_shortage(error)
        return True
    return watch.read
