"""The search for what a model keeps between its calls in attributes: what moves, and what is made where it is missing.

A model that has run before holds results of that run. Whether forward leaves them for its next call, makes them only
where they are missing, or reads them as constants, is tried on copies.

Of auxiliary losses in attributes, which no output and no later call reads, the compact model computes its own. A mean
over channels is another number where some are gone, and so would lock them: operators that lead to nothing else neither
lock nor are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.channels.labels import Labels
from prunekit.channels.labels.label_flow import LabelFlow
from prunekit.channels.tracing.execution import mode_for_trace, plain_attention
from prunekit.channels.tracing.kept_state import Attribute, KeptState, Place, drop_remade_, kept_tensors, map_state_
from prunekit.channels.tracing.operator_mode import OnMeta, OperatorMode, run_on_meta
from prunekit.channels.tracing.traced_run import TracedOperator, TracedRun
from prunekit.errors import reraise_shortage
from prunekit.hooks.model_copy import with_tensors
from prunekit.utils.context import same_draws
from prunekit.utils.inputs import call
from prunekit.utils.tensors import gather

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
    return {
        place for place, (tensor, version) in before.items()
        if after.get(place) is not tensor or tensor._version != version
    }  # fmt: skip


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
        with mode_for_trace(model, training), torch.no_grad(), plain_attention(), same_draws(model), mode:
            run(model)
    except Exception as error:  # the trace will say why the model does not run
        reraise_shortage(error)
        return False
    return True


def label_state(
    clone: nn.Module,
    example: tuple[Any, ...],
    flow: LabelFlow,
    stand_in: Callable[[Tensor], Tensor],
    *,
    meta: bool,
) -> KeptState:
    """Give what earlier passes left for the next one labels that are coupled with what it meets, and drop caches."""
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
    ends = {i for i, one in enumerate(run.operators) if _acts(one) or (i not in read and i not in wanted)}
    return frozenset(_leading_to(run, wanted) - _leading_to(run, ends | run.returned | set(others)))


def _acts(operator: TracedOperator) -> bool:
    """Return whether an operator does more than to return tensors: writes to some, or returns a number to Python."""
    shapes = operator.call[2]
    writes = operator.name.endswith("_") and any(torch.Size(shape).numel() > 1 for shape in shapes)
    return writes or not shapes


def _leading_to(run: TracedRun, numbers: set[int]) -> set[int]:
    found, waiting = set[int](), [number for number in numbers if number >= 0]
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += [one for one in run.operators[number].reads if one >= 0]
    return found


class _Reads(OperatorMode):
    """Notes which tensors operators read."""

    def __init__(self, watched: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._watched = {id(tensor) for tensor in watched}
        self.read = False

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator."""
        self.read = self.read or any(id(tensor) in self._watched for tensor in gather((args, kwargs)))
        return run_on_meta(func, str(func._schema.name).replace("::", "."), args, kwargs)


def _reads_later(model: nn.Module, inputs: tuple[Any, ...], *, training: bool) -> bool:
    """Return whether a forward pass reads single numbers that the one before kept; True if it does not run twice."""
    twin = with_tensors(model, {})
    try:
        with mode_for_trace(twin, training), torch.no_grad(), plain_attention(), same_draws(twin):
            with _Reads(()):
                call(twin, inputs)
            numbers = [tensor for tensor in kept_tensors(twin, numbers=True).values() if tensor.numel() == 1]
            with _Reads(numbers) as watch:
                call(twin, inputs)
    except Exception as error:  # whatever the model's own code makes of a second call
        reraise_shortage(error)
        return True
    return watch.read
