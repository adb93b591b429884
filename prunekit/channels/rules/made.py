"""Tensors of one number that a forward pass makes, such as the first state of a recurrent layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prunekit.channels.labels import Field, along
from prunekit.channels.rules.registry import Call, register_rule

if TYPE_CHECKING:
    from prunekit.channels.flow import Flow

MADE = frozenset({"aten.zeros", "aten.full", "aten.new_zeros"})
"""Operators with a rule for what comes out, also where nothing that goes in carries a label."""


@register_rule("aten.zeros", "aten.full")
def made(flow: Flow, call: Call) -> None:
    """Labels of its own for an axis as long as a number that the running module, or a part of it, remembers.

    So a state of `hidden_size` zeros goes with what it meets. Whether that size really follows, the trial tells.
    """
    sizes, zero = _remembered(flow), call.name != "aten.full" or call.args[1] == 0
    axes = [axis for axis, size in enumerate(call.out.shape) if size > 1 and size in sizes]
    ndim = call.out.dim()
    flow.set(call.out, [Field(along(flow.union.new(call.out.shape[axis]), axis, ndim), zero) for axis in axes])


def _remembered(flow: Flow) -> set[int]:
    if flow.model is None:
        return set()
    module = flow.model.get_submodule(flow.module)
    return {value for part in (module, *module.children()) for value in vars(part).values() if type(value) is int}


@register_rule("aten.new_zeros")
def made_beside(flow: Flow, call: Call) -> None:
    """Zeros beside a tensor: of its shape with its labels, else with labels of their own."""
    (zeros if call.out.shape == call.args[0].shape else made)(flow, call)


@register_rule("aten.zeros_like", "aten.zero", "aten.zero_")
def zeros(flow: Flow, call: Call) -> None:
    """Zeros in the shape of a tensor, with its labels."""
    flow.set(call.out, [Field(field.labels, zero=True) for field in flow.fields(call.args[0])])
