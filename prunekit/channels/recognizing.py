"""Which labels lie on the tensors of a recorded forward pass: those of the same operators in the trace."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

from prunekit.channels.labels import Field
from prunekit.channels.operators import Operator
from prunekit.channels.recording import Place, Recording, Step
from prunekit.channels.tracing import Trace
from prunekit.inputs import batch_of

Shape = Sequence[int]
Fields = tuple[Field, ...]


def recognized(trace: Trace, recording: Recording, batch: int) -> dict[Place, Fields]:
    """The fields of every tensor, in the numbering of the trace; none where they are not known.

    The trace saw attention without its fused kernels, and another batch, which may need other copies in between. What
    a fused kernel returns has the labels of what it stands for.

    Args:
        batch: of the recording.
    """
    first = batch_of(trace.example)
    traced = [operator for operator in trace.runs[0].operators if operator.call[2]]
    found: dict[Place, Fields] = {}
    ours = [(operator.module, operator.name, *map(len, operator.call[2])) for operator in traced]
    theirs = [(step.module, step.name, *map(len, step.shapes)) for step in recording.steps]
    for tag, begin, end, start, stop in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        for index in range(start, stop):
            step = recording.steps[index]
            for output, shape in enumerate(step.shapes):
                if tag == "equal":
                    fields = traced[begin + index - start].outputs[output]
                else:
                    fields = _in_its_place(traced[begin:end], shape, (first, batch)) or _passed_on(step, shape, found)
                found[index, output] = tuple(field for field in fields if _fits(field, shape))
    return found


def _fits(field: Field, shape: Shape) -> bool:
    return field.labels.ndim == len(shape) and all(field.labels.shape[axis] == shape[axis] for axis in field.span)


def _in_its_place(operators: Sequence[Operator], shape: Shape, batches: tuple[int, int]) -> Fields:
    """The fields of the last tensor of that shape; or of one that has one more axis, along which they do not differ."""
    for operator in reversed(operators):
        for fields, traced in zip(operator.outputs, operator.call[2], strict=False):
            if fields and _alike(traced, shape, batches):
                return fields
    for operator in reversed(operators):
        for fields, traced in zip(operator.outputs, operator.call[2], strict=False):
            if fields and _alike(traced[:-1], shape, batches) and all(f.labels.shape[-1] == 1 for f in fields):
                return tuple(field.with_labels(field.labels[..., 0]) for field in fields)
    return ()


def _alike(traced: Shape, shape: Shape, batches: tuple[int, int]) -> bool:
    first, batch = batches
    if len(traced) != len(shape):
        return False
    return all(a == b or a * batch == b * first for a, b in zip(traced, shape, strict=True))


def _passed_on(step: Step, shape: Shape, found: dict[Place, Fields]) -> Fields:
    """The fields of an input that they fit: of a copy."""
    for place in step.inputs:
        fields = found.get(place, ()) if place is not None else ()
        if fields and all(_fits(field, shape) for field in fields):
            return fields
    return ()
