"""The processes of a run: what the main one does for all of them, and what all must agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import nn

from prunekit.distributed.process_group import from_main, is_main, require_equal, share_tensors, size, wait_for_all
from prunekit.hooks.model_copy import named_tensors
from prunekit.planning.plan import Plan

P = ParamSpec("P")
T = TypeVar("T")


def main_process_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Make a function run in the main process alone; in the others it returns None at once."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if is_main() else None

    return run


def computed_by_main(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function run in the main process alone; the others wait for it, and return what it returned there.

    It raises in the main process what the function raises, and `PeerError` in the others.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return from_main(lambda: function(*args, **kwargs))

    return run


@computed_by_main
def main_has(value: object) -> bool:
    """Return whether the main process has a value, such as a cached result, that is not None."""
    return value is not None


def share_model(model: nn.Module, what: str) -> None:
    """Give every process the main one's weights and buffers, once the main one has them."""
    wait_for_all()
    share_tensors(named_tensors(model), what)


def share_plan(plan: Plan | None) -> Plan:
    """Return the main process's plan in every process; the others need not give one."""

    @computed_by_main
    def without_trace() -> Plan:
        assert plan is not None
        return replace(plan, channel_map=replace(plan.channel_map, source=None))  # as a saved plan is

    if size() == 1 and plan is not None:
        return plan
    received = without_trace()
    result = plan if is_main() and plan is not None else received
    require_same_plan(result, "as it was made")
    return result


def share_stage(make: Callable[[], Plan], before: Plan) -> Plan:
    """Return the plan that the main process makes for a stage of a schedule, in every process."""
    if size() == 1:
        return make()
    made = main_process_only(make)()

    @computed_by_main
    def parts() -> tuple[Any, ...]:  # without the channel map, which all processes have
        assert made is not None
        return made.keep, dict(made.provenance), dict(made.element_masks)

    received = parts()
    plan = made or Plan(before.channel_map, *received)
    require_same_plan(plan, "at a stage of the schedule")
    return plan


def require_same_plan(plan: Plan, when: str) -> None:
    """Raise unless every process has the same plan, by its hash."""
    require_equal(plan.digest, f"the plan {when}")
