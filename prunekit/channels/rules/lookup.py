"""Tables looked up by integers, and positions put in order by their values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from prunekit.channels.labels import Field, along
from prunekit.channels.rules.registry import Call, register_rule

if TYPE_CHECKING:
    from prunekit.channels.flow import Flow


@register_rule("aten.embedding", "aten._embedding_bag", "aten._embedding_bag_forward_only")
def embedding(flow: Flow, call: Call) -> None:
    """Rows of a table, or sums, means and maxima of them: the rows stay, the columns are the output's last axis."""
    table = call.args[0]
    flow.fix(flow.on_axis(table, 0, "channels that are spread over both rows and columns of a table")[0])
    columns, zero = flow.on_axis(table, 1, "channels that are spread over both rows and columns of a table")
    flow.lock(
        [f for a in call.args[1:] for f in flow.fields(a)], "decides which rows of a table are taken, or how often"
    )
    outs = call.outs
    for out in outs:
        if columns is not None and out.shape == outs[0].shape:  # of a bag also where its maxima were
            flow.set(out, [Field(along(columns, out.dim() - 1, out.dim()), zero)])


_ORDERED = {
    **dict.fromkeys(("aten.sort", "aten.argsort", "aten.mode", "aten.median", "aten.nanmedian"), 1),
    **dict.fromkeys(("aten.cummax", "aten.cummin", "aten.cumprod", "aten.logcumsumexp"), 1),
    **dict.fromkeys(("aten.topk", "aten.kthvalue"), 2),
}
"""Operator -> at which position it takes its axis, which is the last one when not given."""


@register_rule(*_ORDERED)
def ordered(flow: Flow, call: Call) -> None:
    """Positions of one axis compared with each other: that axis is locked, others pass."""
    source, outs = call.args[0], call.outs
    axis = call.arg(_ORDERED[call.name], "dim", -1) % max(source.dim(), 1)
    everything = outs[0].dim() < source.dim() - 1  # the median of a whole tensor
    fields = flow.fields(source)
    mixed = [field for field in fields if everything or axis in field.span]
    flow.lock(mixed, f"{call.name} compares these channels with each other")
    rest = [field for field in fields if field not in mixed]
    for out in outs:
        dropped = (axis,) if out.dim() < source.dim() else ()
        flow.set(out, [Field(np.squeeze(field.labels, dropped), zero=False) for field in rest])
