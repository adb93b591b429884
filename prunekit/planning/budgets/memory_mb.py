"""The budget of memory while a model runs."""

import numpy as np

from prunekit.channels.memory import memory_table
from prunekit.errors import PlanError
from prunekit.planning.budgets.registry import Countable, register_budget
from prunekit.planning.terms import Term


@register_budget(
    "memory_mb",
    about="the most megabytes (10^6 bytes) that are alive at once in a forward pass of the target's batch",
    unit="MB",
    figure="number of megabytes (10^6 bytes)",
    per_unit=1e6,
    peak=True,
    counted_as="memory_bytes",
    found_as="a forward pass takes {:.4f} MB",
)
def memory_mb(countable: Countable) -> list[list[Term]]:
    """Counts the bytes alive at each moment of a forward pass that may be its peak.

    Raises:
        ModelError: the model does not run on that batch and dtype.
        PlanError: the map was read from a file.
    """
    chart, target = countable.channel_map, countable.target
    if chart.source is None:
        raise PlanError("budget memory_mb: expected a map of a traced model, got one read from a file; trace it again")
    table, final = memory_table(chart.traced.trace, target.batch, target.dtype), chart.traced.final
    products = [tuple(final[factor] for factor in factors) for factors in table.factors]
    return [[Term(float(row[index]), products[index]) for index in np.flatnonzero(row)] for row in table.bytes]
