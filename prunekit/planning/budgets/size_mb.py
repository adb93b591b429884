"""The budget of a model's size in a file."""

from prunekit.planning.budgets.registry import Countable, register_budget
from prunekit.planning.terms import Term, entries


@register_budget(
    "size_mb",
    about="megabytes (10^6 bytes) of all parameters and buffers as they are saved",
    unit="MB",
    figure="number of megabytes (10^6 bytes)",
    per_unit=1e6,
    counted_as="tensor_bytes",
    found_as="parameters and buffers take {:.4f} MB",
)
def size_mb(countable: Countable) -> list[Term]:
    """Counts the bytes of all parameters and buffers."""
    chart = countable.channel_map
    return [entries(chart, name).times(how.element_bytes) for name, how in chart.stored.items()]
