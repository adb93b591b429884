"""The budget of parameters."""

from prunekit.planning.budgets.registry import Countable, register_budget
from prunekit.planning.terms import Term, entries


@register_budget(
    "params",
    about="share of the parameters",
    share=True,
    counted_as="params",
    found_as="{:.4f} of the dense model's parameters are left",
)
def params(countable: Countable) -> list[Term]:
    """Counts the entries of all parameters."""
    chart = countable.channel_map
    return [entries(chart, name) for name, how in chart.stored.items() if how.parameter]
