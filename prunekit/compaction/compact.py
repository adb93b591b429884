"""Compaction: masked channels are taken out for good."""

from __future__ import annotations

from torch import nn

from prunekit.channels.attributes import attribute_values
from prunekit.channels.slicing import bare_widths, narrow
from prunekit.planning import Plan


def compact(model: nn.Module, plan: Plan) -> nn.Module:
    """A new, smaller model of the same class without the channels that a plan removes.

    Args:
        model: the masked model, in its dense size; not changed. What it holds at removed places is not looked at:
            `prunekit.measure.verify` tells whether it was zero.
        plan: made for this model.

    Returns:
        A model of the same class, in the same train or eval mode and on the same device, each of its parameters
        trainable or frozen as in the model given. What Accelerate or torch put around a method of an instance, such as
        autocast, is left behind: prepare the compact model anew.

    Raises:
        PlanError: the plan is that of another model; names the first tensor that does not fit.
    """
    plan.require_model(model)
    chart, keep = plan.channel_map, plan.keep
    return narrow(model, plan.kept_indices, bare_widths(model, chart, keep), attribute_values(model, chart, keep))
