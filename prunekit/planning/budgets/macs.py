"""The budget of multiply-accumulates."""

from prunekit.planning.budgets.registry import Countable, register_budget
from prunekit.planning.terms import Term


@register_budget(
    "macs",
    about="share of the multiply-accumulates of one sample in eval mode",
    share=True,
    counted_as="macs",
    found_as="{:.4f} of the dense model's MACs are left",
)
def macs(countable: Countable) -> list[Term]:
    """Counts the multiply-accumulates of one sample."""
    return [Term(term.constant, term.factors) for term in countable.channel_map.mac_terms]
