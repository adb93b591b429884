"""What the processes of a run must agree on: the model and its images, and the plan in every phase."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from prunekit.channels.copying import named_tensors
from prunekit.distributed.exchange import from_main, require_equal, share_tensors, wait_for_all
from prunekit.distributed.group import is_main, size
from prunekit.planning import Plan


def share_model(model: nn.Module, what: str) -> None:
    """Gives every process the main one's weights and buffers, when that has them.

    Raises:
        RunError: the models differ in more than their values.
    """
    wait_for_all()
    share_tensors(named_tensors(model), what)


def share_plan(plan: Plan | None) -> Plan:
    """The main process's plan in every process; those others need give none.

    Raises:
        RunError: it did not arrive as it is.
    """

    def bare() -> Plan:
        assert plan is not None
        return replace(plan, channel_map=replace(plan.channel_map, source=None))  # what a saved plan has

    if size() == 1 and plan is not None:
        return plan
    received = from_main(bare)
    result = plan if is_main() and plan is not None else received
    require_same_plan(result, "as it was made")
    return result


def require_same_plan(plan: Plan, when: str) -> None:
    """Checks that every process has the same plan, by its hash.

    Raises:
        RunError: they differ; names the processes.
    """
    require_equal(plan.digest, f"the plan {when}")
