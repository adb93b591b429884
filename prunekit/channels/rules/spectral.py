"""Rules of Fourier transforms, and of complex tensors that are made of real ones and taken apart again."""

from __future__ import annotations

import numpy as np

from prunekit.channels.labels import Field
from prunekit.channels.labels.label_flow import LabelFlow
from prunekit.channels.rules.pointwise import broadcast, keeps_zero, sums
from prunekit.channels.rules.rule import OperatorCall, aten, register_rule

register_rule(*aten("_conj _conj_physical conj_physical _neg_view resolve_conj resolve_neg angle"))(keeps_zero)
register_rule("aten.complex")(sums)
PARTS = "real and imaginary parts, both of which stay"


@register_rule(*aten("_fft_r2c _fft_c2c _fft_c2r"))
def transform(flow: LabelFlow, call: OperatorCall) -> None:
    """Mix all positions of the transformed axes; the others pass with their zeros."""
    source, axes = call.args[:2]
    fields = list(flow.fields(source))
    for axis in axes:
        fields = flow.tied_along([axis % source.dim()], fields, "a Fourier transform mixes these channels")
    flow.set(call.out, fields)


@register_rule("aten.view_as_real")
def as_real(flow: LabelFlow, call: OperatorCall) -> None:
    """Pass labels to both parts."""
    flow.set(call.out, [field.with_labels(field.labels[..., None]) for field in flow.fields(call.args[0])])


@register_rule("aten.view_as_complex")
def as_complex(flow: LabelFlow, call: OperatorCall) -> None:
    """Drop the last axis, which holds the two parts."""
    fields = flow.tied_along([call.out.dim()], flow.fields(call.args[0]), PARTS)
    flow.set(call.out, [field.with_labels(np.squeeze(field.labels, -1)) for field in fields])


@register_rule("aten.polar")
def polar(flow: LabelFlow, call: OperatorCall) -> None:
    """Merge lengths and angles; zero where the length is."""
    zero = {field.span for field in broadcast(flow, call.args[:1], product=False) if field.zero}
    fields = broadcast(flow, call.args[:2], product=False)
    flow.set(call.out, [Field(field.labels, field.span in zero) for field in fields])
