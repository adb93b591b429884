"""The budget of time on the target."""

from dataclasses import replace

from prunekit.planning.budgets.registry import Countable, register_budget
from prunekit.planning.terms import Term


@register_budget(
    "latency_ms",
    about="median milliseconds of one forward pass of the batch on the target, measured",
    unit="ms",
    figure="number of milliseconds",
    measured=True,
    per_unit=1e6,
)
def latency_ms(countable: Countable) -> list[Term]:
    """Counts nanoseconds by the target's latency table."""
    table, final = countable.latency, countable.channel_map.traced.final
    assert table is not None  # a budget that is measured is not counted without
    return [
        Term(
            1e6 * one.ms,
            tuple(final[factor] for factor in one.factors),
            one.steps,
            tuple(replace(span, factor=final[span.factor]) for span in one.spans),
        )
        for one in table.terms
    ]
