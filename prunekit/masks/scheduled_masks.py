"""Masks whose plan changes while a model is trained, as a schedule says."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from prunekit.errors import ArtifactError
from prunekit.masks.masked_model import ChangingMasks
from prunekit.masks.weight_masks import PrunedValues
from prunekit.planning.plan import Plan
from prunekit.planning.schedules import ScheduleStep
from prunekit.settings.pruning import MASKED_DECAY, ScheduleSettings


class Planner:
    """A maker of plans, one for each step of a schedule; scores that it keeps are in its `state_dict`."""

    masks: ChangingMasks  # which put its plans in force, once they are entered
    from_zero = False  # whether masked single weights that come back begin at zero, and not with their last values

    def active(self, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """Return the context in which scores are collected: entered after the masks, left once the plan is final."""
        return nullcontext()

    def reads_gradients(self, step: int, due: ScheduleStep) -> bool:
        """Return whether the planner reads gradients of masked single weights in the step that comes next.

        They are then left as they are until the optimizer's step, before which the planner has to mask them
        (`ChangingMasks.mask_gradients`).
        """
        return False

    def plan(self, model: nn.Module, step: ScheduleStep, before: Plan) -> Plan:
        """Return the plan of a pruning step; in several processes all call this, and must get the same plan."""
        raise NotImplementedError

    def shares(self, step: ScheduleStep, plan: Plan) -> Mapping[str, tuple[float, float]]:
        """Return by resource the share of the dense model that a pruning step aims at, and what its plan leaves."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later pruning steps need."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""


def straight_through(settings: ScheduleSettings) -> float | None:
    """Return how fast masked weights fade that learn by straight-through gradients; None if masked weights rest."""
    if settings.gradients == "masked":
        return None
    return MASKED_DECAY if settings.masked_decay is None else settings.masked_decay


@dataclass(frozen=True)
class PlanChange:
    """A pruning step that was carried out."""

    step: int  # steps of training before it
    # pruned, regrown: numbers of channels that were removed, and that came back
    pruned: int
    regrown: int
    shares: Mapping[str, tuple[float, float]]  # see `Planner.shares`
    # weights_pruned, weights_regrown: numbers of single weights that were masked, and that came back, in channels that
    # both plans keep
    weights_pruned: int = 0
    weights_regrown: int = 0


class ScheduledMasks:
    """A model under masks whose plan changes at each pruning step of a schedule, as a context manager.

    The training loop says how many steps were made (`reach`). From a pruning step on, pruned entries are exactly zero
    after every step of the optimizer. `start` is the plan before the first pruning step, and may keep everything; the
    last one is final; `on_change` is called after each change, once the masks are in force.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        pruning_steps: Sequence[ScheduleStep],
        start: Plan,
        planner: Planner,
        on_change: Callable[[], None],
        *,
        gradients: bool = True,
        straight_through: float | None,
    ) -> None:
        self.model, self.plan, self.planner = model, start, planner
        self.pruning_steps, self.changes = tuple(pruning_steps), list[PlanChange]()
        self._optimizer, self._on_change = optimizer, on_change
        self._masks = ChangingMasks(
            model, start, optimizer, restore=False, gradients=gradients, straight_through=straight_through
        )
        self._entered, self._planning = ExitStack(), ExitStack()
        self._done = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._masks)
            self.planner.masks = self._masks
            self._planning = stack.enter_context(ExitStack())
            self._planning.enter_context(self.planner.active(self.model, self._optimizer))
            self._entered = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, trace)

    @property
    def is_final(self) -> bool:
        """True if the plan is the final one."""
        return self._done == len(self.pruning_steps)

    @property
    def next(self) -> ScheduleStep | None:
        """The next pruning step; None once the plan is final."""
        return None if self.is_final else self.pruning_steps[self._done]

    @property
    def held(self) -> PrunedValues:
        """The values of entries at the time they were pruned."""
        return self._masks.held

    def reach(self, step: int) -> None:
        """Carry out the last pruning step that is due after so many training steps, and get ready for the next."""
        due = [each for each in self.pruning_steps[self._done :] if each.step <= step]
        if due:
            self._change(step, due)
        self.get_ready(step)

    def get_ready(self, step: int) -> None:
        """Leave the planner the gradients of masked weights in the next step, if it reads them then."""
        due = self.next
        self._masks.spare_gradients(due is not None and self.planner.reads_gradients(step, due))

    def _change(self, step: int, due: Sequence[ScheduleStep]) -> None:
        before = self.plan
        self._use(self.planner.plan(self.model, due[-1], before))
        self._done += len(due)
        changed = before.keep & ~self.plan.keep, self.plan.keep & ~before.keep
        # Joint labels, which are in no channel group, follow from others and do not count.
        groups = [group.labels for group in self.plan.channel_map.groups]
        pruned, regrown = (sum(int(np.count_nonzero(one[labels])) for labels in groups) for one in changed)
        shares = dict(self.planner.shares(due[-1], self.plan))
        self.changes.append(PlanChange(step, pruned, regrown, shares, *_single_weights(before, self.plan)))
        self._end_if_final()
        self._on_change()

    def _use(self, plan: Plan) -> None:
        self._masks.update(plan, from_zero=self.planner.from_zero)
        self.plan = plan

    def _end_if_final(self) -> None:
        if self.is_final:
            self._planning.close()
            self._masks.end_straight_through()

    def state_dict(self) -> dict[str, Any]:
        """Return the pruning step, the plan, the values of pruned entries, and the planner's scores."""
        return {
            "done": self._done,
            "keep": torch.from_numpy(self.plan.keep.copy()),
            "element_masks": {name: mask.clone() for name, mask in self.plan.element_masks.items()},
            "held": {name: values.clone() for name, values in self.held.values.items()},
            "provenance": json.dumps(dict(self.plan.provenance)),
            "changes": [
                {**asdict(change), "shares": {name: list(both) for name, both in change.shares.items()}}
                for change in self.changes
            ],
            "planner": self.planner.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the plan of a state; `on_change` is not called for the changes before it."""
        keep = state["keep"].cpu().numpy()
        if keep.shape != self.plan.keep.shape or not state["done"] <= len(self.pruning_steps):
            raise ArtifactError("state of a pruning schedule: it belongs to another model or schedule; train again")
        self._done = int(state["done"])
        self._use(Plan(self.plan.channel_map, keep, json.loads(state["provenance"]), dict(state["element_masks"])))
        self._masks.load_held(state["held"])
        self.planner.load_state_dict(state["planner"])
        self.changes = [
            PlanChange(**{**row, "shares": {name: (both[0], both[1]) for name, both in row["shares"].items()}})
            for row in state["changes"]
        ]
        self._end_if_final()


def _single_weights(before: Plan, after: Plan) -> tuple[int, int]:
    """Return how many single weights a plan masks that the one before doesn't, and the other way around."""
    pruned = regrown = 0
    for name in {*before.element_masks, *after.element_masks}:
        both = before.mask(name), after.mask(name)
        single = before.element_masks.get(name), after.element_masks.get(name)
        kept = [torch.ones((), dtype=torch.bool) if mask is None else mask for mask in both]
        was, now = (torch.ones((), dtype=torch.bool) if mask is None else mask for mask in single)
        pruned += int((kept[0] & ~now).sum())
        regrown += int((~was & kept[1]).sum())
    return pruned, regrown
