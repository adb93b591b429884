"""The trace of a model: which of its channels are coupled, found by running it once; and how to add operator rules.

**What a trace knows.** Every index of every parameter axis has a label, an integer. While the model runs once, a
`Field` on each tensor says which label every index of an axis carries: the output of a convolution has the labels of
its weight's axis 0 on axis 1. Labels of channels that must be removed together are merged; labels of channels that must
stay are locked, with a reason.

**How to add a rule.** An operator without a rule locks what flows into it: that is always right, and prunes less. A
rule says what an operator really does to its labels, from any package, registered before the model is traced:

    from prunekit.channels.labels import Field, along
    from prunekit.channels.rules.rule import OperatorCall, register_rule
    from prunekit.channels.labels.label_flow import LabelFlow

    @register_rule("mylib.channel_scale")  # the operator's name: torch.ops.mylib.channel_scale(x, scale)
    def channel_scale(flow: LabelFlow, call: OperatorCall) -> None:
        x, scale = call.args
        left, x_zero = flow.on_axis(x, 1, "channel_scale: channels mixed with other axes")
        right, scale_zero = flow.on_axis(scale, 0, "channel_scale: a scale with more than one axis")
        labels = flow.join(left, right, "channel_scale: meets a tensor whose size is fixed")
        if labels is not None:
            flow.set(call.out, [Field(along(labels, 1, call.out.dim()), zero=x_zero or scale_zero)])

- `flow.on_axis(tensor, axis, reason)` returns the labels along one axis, or None if the tensor has none there; labels
  that are spread over several axes are locked with the reason. `flow.fields(tensor)` returns all fields.
- `flow.join` merges two vectors: index i of one is removed if and only if index i of the other is. If only one side has
  labels it locks them, because the other cannot shrink.
- `zero` says whether the entries of a removed channel are exactly 0 in the masked model. Only then may a later operator
  sum over them. When in doubt, say False: that locks more, where a wrong True would prune wrongly.
- A pointwise operator f(x) with f(0) = 0 is `flow.set(call.out, flow.fields(call.args[0]))`; an einsum is
  `flow.contract(left, right, "bmk", "bkn", "bmn")`; `flow.lock(fields, reason)` locks what a rule cannot follow.
- `@register_rule("mylib.matmul", traits=[Trait.COUNTED])` says more about an operator than its rule: that its
  multiply-accumulates count. `prunekit.channels.rules.rule.Trait` has all that others ask for.

The trial keeps a wrong rule from doing harm: it compares masked and compact model after every operator, and locks the
channels where they differ. Operators that only look at values (comparisons, random numbers) need no care beyond
`zero=False`. A custom operator needs a fake implementation (`register_fake`) to be traced on meta tensors; without one
the trace runs on real values.
"""

from typing import Any

from torch import nn

from prunekit.channels.interchangeable_axes import interchangeable_axes
from prunekit.channels.map_builder import build_map
from prunekit.channels.rules.rule import Trait
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.channels.tracing.tracer import trace_model
from prunekit.distributed.process_group import is_sharded
from prunekit.errors import ModelError
from prunekit.hooks.model_copy import with_weights
from prunekit.hooks.wrappers import unwrapped
from prunekit.modes.public_call import public_call
from prunekit.utils.inputs import as_example
from prunekit.utils.outputs import Outputs, ReadOutputs
from prunekit.utils.progress import reporting


@public_call
@reporting(None, "trace")
def trace(model: nn.Module, example: Any, *more_examples: Any, outputs: Outputs | None = None) -> ChannelMap:
    """Run a model on an example and return its channel map; the model is not changed.

    Args:
        model: any module; traced in eval mode, and again in train mode if its code reads which of the two it is in.
        example: its input: a tensor, a tuple of positional arguments or a mapping of arguments by name.
        more_examples: further inputs, for branches that the first does not take.
        outputs: which of the model's outputs are read, and so keep their sizes: names or positions, such as "logits",
            0 or "1.boxes", several of them, or a function of the output; None: all, except what the model returns to
            be given again, such as cached keys and values. Others may become narrower.

    Raises:
        UsageError: an example is none of these, or the model has no output of a name.
        ModelError: the model does not run on an example, or cannot be copied.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> chart = pk.trace(model, torch.randn(1, 4))
        >>> [(group.name, len(group.labels)) for group in chart.groups]
        [('0', 16)]
        >>> print(chart)
        Channel map: 16 channels in 1 group, 6 more locked in 2 places; 96 MACs for one
          sample
        ...
          locked at  channels  operator    reason
          0                 4  aten.addmm  meets an axis whose size no parameter decides, such as one of the input
          2                 2              output of the model
    """
    model = with_weights(unwrapped(model, offloaded=True))
    return traced_map(model, [as_example(model, one) for one in (example, *more_examples)], outputs)


def traced_map(model: nn.Module, examples: list[tuple[Any, ...]], outputs: Outputs | None = None) -> ChannelMap:
    """Return the channel map of a model without wrappers, on examples in the form of `as_example`; see `trace`."""
    if is_sharded(model):
        raise ModelError(
            f"{type(model).__name__}: each process has only its shards; trace and prune the whole model, and call "
            "fully_shard on the result"
        )
    read = ReadOutputs.given(outputs)
    chart = build_map(model, trace_model(model, examples, read=read))
    if not any(lock.operator in Trait.PICKS_FROM_STACK for lock in chart.traced.trace.flow.locks):
        return chart
    found = interchangeable_axes(model, chart, examples)
    return build_map(model, trace_model(model, examples, read=read, interchangeable=found)) if found else chart
