"""The built-in budgets: channels, MACs, parameters, file size, memory, latency, and speedup."""

from dataclasses import replace

import numpy as np

from prunekit.channels.memory_table import memory_table
from prunekit.errors import PlanError
from prunekit.planning.budgets.budget import Countable, register_budget
from prunekit.planning.budgets.cost_model import Term, entries, presence
from prunekit.settings.pruning import FLOATS, UNCOUNTED


@register_budget(
    "channels",
    about="share of the channels that are not locked",
    share=True,
    each_group=True,
    counted_as="channels",
    found_as="{} of the free channels are left; some groups are at the fewest that min_channels, round_to, ratios "
    "or their size allow",
)
def channels(countable: Countable) -> list[Term]:
    """Count the channels of all parts."""
    return [Term(part.channels, (part.labels,)) for part in countable.parts]


@register_budget(
    "macs",
    about="share of the multiply-accumulates of one sample in eval mode",
    share=True,
    counted_as="macs",
    found_as="{} of the dense model's MACs are left",
)
def macs(countable: Countable) -> list[Term]:
    """Count the multiply-accumulates of one sample."""
    chart = countable.channel_map
    return [
        Term(term.constant, term.factors, spans=presence(chart, term.module, term.factors)) for term in chart.mac_terms
    ]


@register_budget(
    "params",
    about="share of the parameters",
    share=True,
    counted_as="params",
    found_as="{} of the dense model's parameters are left",
)
def params(countable: Countable) -> list[Term]:
    """Count the entries of all parameters."""
    chart = countable.channel_map
    return [entries(chart, name) for name, how in chart.stored.items() if how.parameter]


@register_budget(
    "size_mb",
    about="megabytes (10^6 bytes) of all parameters and buffers as they are saved",
    unit="MB",
    figure="number of megabytes (10^6 bytes)",
    per_unit=1e6,
    counted_as="tensor_bytes",
    found_as="parameters and buffers take {}",
)
def size_mb(countable: Countable) -> list[Term]:
    """Count the bytes of all parameters and buffers."""
    chart = countable.channel_map
    return [entries(chart, name).times(how.element_bytes) for name, how in chart.stored.items()]


@register_budget(
    "memory_mb",
    about="the most megabytes (10^6 bytes) that are alive at once in a forward pass of the target's batch",
    unit="MB",
    figure="number of megabytes (10^6 bytes)",
    per_unit=1e6,
    peak=True,
    counted_as="memory_bytes",
    found_as="a forward pass takes {}",
)
def memory_mb(countable: Countable) -> list[list[Term]]:
    """Count the bytes alive at each moment of a forward pass that may be its peak."""
    chart, target = countable.channel_map, countable.target
    if chart.source is None:
        raise PlanError("budget memory_mb: expected a map of a traced model, got one read from a file; trace it again")
    if target.dtype == "int8":
        raise PlanError(f"budget memory_mb: target.dtype: expected {FLOATS}, got 'int8': {UNCOUNTED}")
    table, final = memory_table(chart.traced.trace, target.batch, target.dtype), chart.traced.final
    products = [tuple(final[factor] for factor in factors) for factors in table.factors]
    return [[Term(float(row[index]), products[index]) for index in np.flatnonzero(row)] for row in table.bytes]


@register_budget(
    "latency_ms",
    about="median milliseconds of one forward pass of the batch on the target, measured",
    unit="ms",
    figure="number of milliseconds",
    measured=True,
    per_unit=1e6,
)
def latency_ms(countable: Countable) -> list[Term]:
    """Count nanoseconds by the target's latency table."""
    chart, table = countable.channel_map, countable.latency
    assert table is not None  # a budget that is measured is not counted without
    final, found = chart.traced.final, []
    for module, one in table.terms:
        factors = tuple(final[factor] for factor in one.factors)
        spans = tuple(replace(span, factor=final[span.factor]) for span in one.spans)
        found.append(Term(1e6 * one.ms, factors, one.steps, (*spans, *presence(chart, module, factors))))
    return found


@register_budget(
    "speedup",
    about="how many times faster than the dense model, measured beside it on the target",
    unit="x",
    figure="number of times faster",
    share=True,
    least=True,
    measured=True,
)
def speedup(countable: Countable) -> list[Term]:
    """Count the time; the speedup is one over what is left of it."""
    return countable.terms("latency_ms")
