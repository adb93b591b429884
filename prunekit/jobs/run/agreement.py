"""What the processes of a run must agree on: the model and its images, and the plan in every phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from prunekit.channels.cut.model_copy import named_tensors
from prunekit.distributed.process_group import from_main, is_main, require_equal, share_tensors, size, wait_for_all
from prunekit.planning.plan import Plan


def share_model(model: nn.Module, what: str) -> None:
    """Give every process the main one's weights and buffers, when that has them.

    Raises:
        RunError: the models differ in more than their values.
    """
    wait_for_all()
    share_tensors(named_tensors(model), what)


def share_plan(plan: Plan | None) -> Plan:
    """Return the main process's plan in every process; those others need give none.

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


def share_stage(make: Callable[[], Plan], before: Plan) -> Plan:
    """Return the plan that the main process makes for a stage of a schedule, in every process.

    Args:
        make: called in the main process alone.
        before: the plan in force, of the same channel map.

    Raises:
        Whatever `make` raises, as `from_main` does.
        RunError: it did not arrive as it is.
    """
    if size() == 1:
        return make()
    made: list[Plan] = []

    def parts() -> tuple[Any, ...]:
        made.append(make())
        return made[0].keep, dict(made[0].provenance), dict(made[0].element_masks)

    received = from_main(parts)  # without the channel map, which they have
    plan = made[0] if made else Plan(before.channel_map, *received)
    require_same_plan(plan, "at a stage of the schedule")
    return plan


def require_same_plan(plan: Plan, when: str) -> None:
    """Checks that every process has the same plan, by its hash.

    Raises:
        RunError: they differ; names the processes.
    """
    require_equal(plan.digest, f"the plan {when}")
