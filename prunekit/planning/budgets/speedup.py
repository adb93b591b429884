"""The budget of speed, beside the dense model."""

from prunekit.planning.budgets.registry import Countable, register_budget
from prunekit.planning.terms import Term


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
    """Counts the time; the speedup is one over what is left of it."""
    return countable.terms("latency_ms")
