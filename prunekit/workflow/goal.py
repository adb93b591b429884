"""A budget of time and all that is needed to plan for it and to measure what a plan takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from prunekit.channels import ChannelMap
from prunekit.deploy.transform import AS_IT_IS, Transform
from prunekit.errors import UsageError
from prunekit.measure.runtimes import Inputs, inputs_like
from prunekit.planning import PruneSettings
from prunekit.planning.latency import LatencyTable
from prunekit.planning.reach import least_left, require_met_untimed
from prunekit.settings.budgets import facts_of
from prunekit.workflow.profiled import Profile
from prunekit.workflow.profiling import in_blocks, profile
from prunekit.workflow.runs import Log


@dataclass(frozen=True, eq=False)
class LatencyGoal:
    """What is asked of a model, where, by what it is predicted, and what is timed.

    Attributes:
        model: dense; on the CPU. Its weights make no difference to time.
        channel_map: of it, traced.
        inputs: that it takes.
        settings: budgets, of which at least one is of time, and the target.
        profile: of the target, or of the runtime that stands in for it.
        transform: what is done to the dense model and to every compact one before they are timed.
    """

    model: nn.Module
    channel_map: ChannelMap
    inputs: Inputs
    settings: PruneSettings
    profile: Profile
    transform: Transform = AS_IT_IS

    @property
    def table(self) -> LatencyTable:
        """By which plans are predicted."""
        return self.profile.table

    @property
    def asked(self) -> dict[str, float]:
        """The budgets of time that are given."""
        return {name: value for name, value in self.settings.budget.given.items() if facts_of(name).measured}

    @cached_property
    def least_share(self) -> float:
        """The least time that any plan is predicted to take, over what was asked for."""
        least = least_left(self.channel_map, in_blocks(self.settings), self.table)
        return max(least[name] / facts_of(name).as_cost(value) for name, value in self.asked.items()) * (1 + 1e-9)

    @cached_property
    def dense(self) -> nn.Module:
        """What compact models are timed beside: the dense one with all that is done to them but pruning."""
        return self.transform(self.model)


def goal_for(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    channel_map: ChannelMap,
    settings: PruneSettings,
    *,
    more_examples: Sequence[tuple[Any, ...]] = (),
    transform: Transform = AS_IT_IS,
    measure: bool = True,
    log: Log,
) -> LatencyGoal | None:
    """Profiles a model on the target of the settings; None where no budget is one of time.

    Args:
        model, channel_map, settings, transform: as in `LatencyGoal`.
        example_inputs: an example, see `prunekit.inputs.example`, of which inputs to time are made.
        more_examples: further inputs that the model was traced on.
        measure: whether what the cache of profiles does not have is measured.
        log: gets a line for each network.

    Raises:
        NotMeasuredError: nothing is to be measured, and the cache has too little.
        UsageError: the model takes something else than tensors with a batch, or as for `profile`.
        PlanError: a budget that is not one of time cannot be met: nothing is measured then.
    """
    timed = [name for name in settings.budget.given if facts_of(name).measured]
    if not timed:
        return None
    try:
        inputs = inputs_like(example_inputs)
    except UsageError as error:
        raise UsageError(
            f"budget {' and '.join(timed)}: {error}; give macs, params, channels or size_mb instead"
        ) from error
    require_met_untimed(channel_map, in_blocks(settings))
    found = profile(
        model,
        example_inputs,
        settings=settings,
        channel_map=channel_map,
        more_examples=more_examples,
        measure=measure,
        transform=transform,
        log=log,
        progress=False,
    )
    log("; ".join((f"profile: {found.accuracy}", *found.notes)))
    return LatencyGoal(model, channel_map, inputs, settings, found, transform)
