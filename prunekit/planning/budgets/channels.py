"""The budget of channels."""

from prunekit.planning.budgets.registry import Countable, register_budget
from prunekit.planning.terms import Term


@register_budget(
    "channels",
    about="share of the channels that are not locked",
    share=True,
    each_group=True,
    counted_as="channels",
    found_as="{:.4f} of the free channels are left; some groups are at the fewest that min_channels, round_to, ratios "
    "or their size allow",
)
def channels(countable: Countable) -> list[Term]:
    """Counts the channels of all parts."""
    return [Term(part.channels, (part.labels,)) for part in countable.parts]
